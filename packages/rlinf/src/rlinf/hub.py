"""Models and data sets by their names on the Hugging Face Hub.

    ORG/NAME[@REVISION]                          a model
    ORG/NAME[@REVISION][:SUBSET][[SPLIT]]        a data set, for example openai/gsm8k:main[train]

Everything goes through `huggingface_hub` and `datasets`, so that the cache, the tokens (`HF_TOKEN`, `hf auth login`),
`HF_ENDPOINT` and `HF_HUB_OFFLINE` are the user's own. A name is pinned to a commit before a run starts: a model becomes
the folder of its snapshot in the cache, a data set gets its commit as revision. `public_name` turns a snapshot's folder
back into a name, which is what a run's config.yaml states.
"""

from __future__ import annotations

import glob
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from rlinf.errors import UserError

Kind = Literal["model", "dataset"]
WHAT = {"model": "model", "dataset": "data set"}

_WORD = r"[A-Za-z0-9_][\w.-]*"
_NAME = re.compile(
    rf"(?P<repo>{_WORD}/{_WORD})(@(?P<revision>[\w./-]+))?(:(?P<subset>[\w.-]+))?(\[(?P<split>[^/]+)\])?"
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SNAPSHOT = re.compile(
    r"(?P<kind>models|datasets)--(?P<org>[^/]+?)--(?P<name>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})"
)

SAFETENSORS, PYTORCH = "*.safetensors", "pytorch_model*.bin*"
TEXT_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "*.md")
"""What a language model's folder holds besides its weights."""
UNUSED = ("*.msgpack", "*.h5", "*.onnx", "*.gguf", "*.py")
CARD = "README.md"
"""Describes a model or a data set; the head of a data set's may state subsets and their files."""
DATA_FILES = ("*.parquet", "*.jsonl", "*.json", "*.csv", "*.arrow", "*.txt", "*.gz", "*.zst", "*.zip")
ROW_FORMATS = (".jsonl", ".json", ".csv", ".parquet", ".arrow")
"""Endings of the data files that are read row by row (`rlinf.tasks.row_files`)."""
KNOWN_DATASETS = {
    "gsm8k": "openai/gsm8k:main",
    "math": "DigitalLearningGmbH/MATH-lighteval:default",
    "math500": "HuggingFaceH4/MATH-500[test]",
    "dapo17k": "BytedTsinghua-SIA/DAPO-Math-17k[train]",
    "deepscaler": "agentica-org/DeepScaleR-Preview-Dataset[train]",
    "aime24": "HuggingFaceH4/aime_2024[train]",
    "aime25": "math-ai/aime25[test]",
    "amc23": "math-ai/amc23[test]",
    "minerva_math": "math-ai/minervamath[test]",
    "mmlu_stem": "TIGER-Lab/MMLU-STEM[test]",
    "gpqa_diamond": "Idavidrein/gpqa:gpqa_diamond[train]",
}
"""Short name of a data set -> its name on the Hub; `gsm8k[train]` names a split of one that has several."""
WRITE_LOGIN = "log in with `hf auth login`, or set HF_TOKEN, with a token that may write"
CHECK_NETWORK = "check the network, and HF_ENDPOINT"
TIMEOUT_S = 15
"""How long the Hub may take to say what commit a name has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HubName:
    """The name of a model or a data set on the Hub."""

    repo: str
    """ORG/NAME."""
    revision: str | None = None
    """Branch, tag or commit; None: the default branch."""
    subset: str | None = None
    """Of a data set: its configuration, for example "main"."""
    split: str | None = None
    """Of a data set: "train" for example, or a slice of it as `datasets` reads it, "train[:1000]"."""

    @property
    def is_pinned(self) -> bool:
        """Whether the revision is a commit."""
        return self.revision is not None and _COMMIT.fullmatch(self.revision) is not None

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        subset = f":{self.subset}" if self.subset else ""
        return f"{self.repo}{revision}{subset}{f'[{self.split}]' if self.split else ''}"


def hub_name(path: Path) -> HubName | None:
    """Returns the name that a relative path spells; None for a path on this machine.

    A path counts as local where it exists, where its parent folder exists, and where it has the ending of a data file.
    """
    match = _NAME.fullmatch(str(path))
    if match is None or path.is_absolute():
        return None
    name = HubName(**match.groupdict())
    is_plain = name.split is None and name.subset is None and name.revision is None
    if is_plain and (path.exists() or path.parent.exists() or path.suffix in ROW_FORMATS):
        return None
    return name


def known_dataset(path: Path) -> Path | None:
    """Returns the name on the Hub that a short name stands for; None for any other path and where a file has that name.

    Example: `gsm8k[train]` stands for `openai/gsm8k:main[train]`.
    """
    short, bracket, split = str(path).partition("[")
    full = KNOWN_DATASETS.get(short)
    if full is None or path.exists():
        return None
    return Path(f"{full.partition('[')[0]}[{split}" if bracket else full)


def public_name(path: Path) -> str | None:
    """Returns ORG/NAME@COMMIT for the folder of a snapshot in the user's cache; None for any other path."""
    match = _SNAPSHOT.fullmatch("/".join(path.parts[-3:]))
    if match is None:
        return None
    from huggingface_hub import constants

    is_in_cache = path.parents[2] == Path(constants.HF_HUB_CACHE)
    return f"{match['org']}/{match['name']}@{match['commit']}" if is_in_cache else None


def fetch_model(name: HubName, key: str, *, config_only: bool = False, is_text: bool = True) -> Path:
    """Downloads the files of a model that the cache lacks, and returns the folder of the snapshot.

    Args:
        key: config key with the name, for messages.
        config_only: only config.json, which a plan needs.
        is_text: a language model: what transformers reads, with the weights in one format. Otherwise a robot's policy,
            whose published folders differ from each other.
    Raises: UserError.
    """
    if name.subset is not None or name.split is not None:
        raise UserError(
            f"{_at(name, key)}: a model has no subset and no split", hint="write ORG/NAME or ORG/NAME@REVISION"
        )
    if config_only:
        return _snapshot(name, "model", key, ("config.json",))
    if not is_text:
        return _snapshot(name, "model", key, None, UNUSED)
    folder = _snapshot(name, "model", key, (*TEXT_FILES, SAFETENSORS), ("*/*",))
    if not any(folder.glob(SAFETENSORS)):
        _snapshot(replace(name, revision=folder.name), "model", key, (PYTORCH,), ("*/*",))
    return folder


def fetch_dataset(name: HubName, key: str, *, is_whole: bool = False) -> Path:
    """Downloads the files of a data set's subset that the cache lacks, and returns the folder of the snapshot, which
    has the commit as its name.

    Args:
        key: config key with the name, for messages.
        is_whole: all files of the data set, whatever they are.
    Raises: UserError.
    """
    if is_whole:
        return _snapshot(name, "dataset", key, None)
    folder = _snapshot(name, "dataset", key, (CARD, ".gitattributes"))
    files = _files_of_subset(folder / CARD, name, key)
    return _snapshot(replace(name, revision=folder.name), "dataset", key, (*files, CARD))


def files_of(folder: Path) -> list[str]:
    """The files of a snapshot that the cache has, relative to its folder."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def has_all(folder: Path, files: Sequence[str]) -> bool:
    """Whether the files, relative to the folder, are in it."""
    return all((folder / file).is_file() for file in files)


def fetch_same(folder: Path, files: Sequence[str]) -> None:
    """Downloads files of a snapshot that another machine has at this path, to this path, unless they are here.

    Raises: UserError.
    """
    from huggingface_hub import snapshot_download

    if has_all(folder, files):
        return
    match = _SNAPSHOT.fullmatch("/".join(folder.parts[-3:]))
    assert match is not None, "the folder of a snapshot"
    name = HubName(repo=f"{match['org']}/{match['name']}", revision=match["commit"])
    kind: Kind = "model" if match["kind"] == "models" else "dataset"
    cache = folder.parents[2]
    try:
        with _refusals(name, kind, ""):
            snapshot_download(
                name.repo,
                repo_type=kind,
                revision=name.revision,
                cache_dir=cache,
                allow_patterns=[glob.escape(file) for file in files],
            )
    except OSError as error:
        raise UserError(
            f"{name}: {cache} cannot be written to: {error}",
            hint="set HF_HOME to a folder that can be written to on every node",
        ) from error


# -- downloads -----------------------------------------------------------------------------------------------------


def _snapshot(name: HubName, kind: Kind, key: str, allowed: Sequence[str] | None, ignored: Sequence[str] = ()) -> Path:
    """The folder of a snapshot, with the files that match. Says nothing where the cache has them all."""
    from huggingface_hub import errors, snapshot_download

    commit = name.revision if name.is_pinned else _commit(name, kind, key)
    download = partial(
        snapshot_download,
        name.repo,
        repo_type=kind,
        allow_patterns=None if allowed is None else list(allowed),
        ignore_patterns=list(ignored),
    )
    with _refusals(name, kind, key):
        if hasattr(errors, "IncompleteSnapshotError"):  # of releases that know whether the cache has all files
            with suppress(errors.LocalEntryNotFoundError):
                return Path(download(revision=commit, local_files_only=True))
        return Path(download(revision=name.revision))


def _commit(name: HubName, kind: Kind, key: str) -> str:
    """The commit of a branch or a tag: the Hub's, or with a note the cache's where the Hub cannot be reached."""
    from huggingface_hub import HfApi, constants

    try:
        with _refusals(name, kind, key):
            info = HfApi().repo_info(name.repo, repo_type=kind, revision=name.revision, timeout=TIMEOUT_S)
            assert info.sha is not None, "the Hub says the commit of what it finds"
            return info.sha
    except Unreachable as error:
        folder = Path(constants.HF_HUB_CACHE) / f"{kind}s--{name.repo.replace('/', '--')}"
        file = folder / "refs" / (name.revision or constants.DEFAULT_REVISION)
        if not file.is_file():
            raise
        commit = file.read_text(encoding="utf-8").strip()
        print(f"note: {_at(name, key)}: {error.reason}; commit {commit[:12]} in the cache is used", file=sys.stderr)
        return commit


def _files_of_subset(card: Path, name: HubName, key: str) -> tuple[str, ...]:
    """The patterns of a subset's files, as the card of its data set states them; all data files where it does not."""
    from huggingface_hub import RepoCard

    if not card.is_file():
        return DATA_FILES
    data = RepoCard.load(card, ignore_metadata_errors=True).data.to_dict()
    configs = {config.get("config_name"): config for config in data.get("configs") or ()}
    if not configs:
        return DATA_FILES
    subset = name.subset or ("default" if "default" in configs else next(iter(configs)) if len(configs) == 1 else None)
    if subset not in configs:
        named = f"no subset {name.subset!r}" if name.subset else "several subsets"
        raise UserError(
            f"{_at(name, key)}: the data set has {named}: {', '.join(map(str, configs))}",
            hint=f"name one of them, for example {replace(name, subset=str(next(iter(configs))))}",
        )
    files = configs[subset].get("data_files", ())
    files = [files] if isinstance(files, str) else files
    paths = [one.get("path", ()) if isinstance(one, dict) else one for one in files]
    return tuple(path for one in paths for path in ([one] if isinstance(one, str) else one)) or DATA_FILES


# -- uploads -------------------------------------------------------------------------------------------------------


def check_push(repo: str) -> None:
    """Checks the name of a model to upload, and that the Hub knows the user's token. Raises: UserError."""
    from huggingface_hub import HfApi, constants, get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        if repo.count("/") != 1:
            raise HFValidationError("it has no owner before the name")
        validate_repo_id(repo)
    except HFValidationError as error:
        raise UserError(
            f"--push {repo}: not a name on the Hub: {str(error).splitlines()[0]}",
            hint="write USER/NAME or ORGANIZATION/NAME, with letters, digits, '-', '_' and '.'",
        ) from error
    if constants.HF_HUB_OFFLINE:
        raise UserError(f"--push {repo}: HF_HUB_OFFLINE is set", hint="unset it to upload, or leave --push out")
    if get_token() is None:
        raise UserError(f"--push {repo}: you are not logged in to {constants.ENDPOINT}", hint=WRITE_LOGIN)
    with _push_refusals(repo):
        HfApi().whoami()


def push_model(folder: Path, repo: str, *, private: bool, message: str) -> str:
    """Uploads a folder as a model, in one commit; creates the model if there is none of the name.

    Args:
        private: a new model is private. A public one of the name is not uploaded to.
        message: of the commit.
    Returns: the address of the commit.
    Raises: UserError.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    with _push_refusals(repo):
        api.create_repo(repo, private=private or None, exist_ok=True)
        if private and not api.repo_info(repo).private:
            raise UserError(
                f"--push {repo} --private: this model exists and is public",
                hint="choose another name, or make it private in its settings on the Hub",
            )
        return api.upload_folder(repo_id=repo, folder_path=folder, commit_message=message).commit_url


@contextmanager
def _push_refusals(repo: str) -> Iterator[None]:
    """Turns errors of the Hub's client in uploads into a UserError of one screen."""
    from huggingface_hub import constants, errors

    hub = constants.ENDPOINT
    try:
        yield
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        what = {
            401: f"{hub} does not accept your token",
            403: f"your token may not write models of {repo.partition('/')[0]}",
        }
        hints = {401: WRITE_LOGIN, 403: f"check the name of the owner; {WRITE_LOGIN}"}
        raise UserError(
            f"--push {repo}: {what.get(status, f'{hub} answers {status}: {str(error).splitlines()[0]}')}",
            hint=hints.get(status, "try again"),
        ) from error
    except Exception as error:
        if (reason := _why_unreachable(error)) is None:
            raise
        raise UserError(f"--push {repo}: {reason}", hint=CHECK_NETWORK) from error


# -- errors --------------------------------------------------------------------------------------------------------


def _at(name: HubName, key: str) -> str:
    return f"{key}={name}" if key else str(name)


class Unreachable(UserError):
    """The Hub does not answer, and the cache lacks what was asked for."""

    def __init__(self, message: str, *, reason: str, hint: str) -> None:
        super().__init__(message, hint=hint)
        self.reason = reason


@contextmanager
def _refusals(name: HubName, kind: Kind, key: str) -> Iterator[None]:
    """Turns errors of the Hub's client into a UserError of one screen."""
    from huggingface_hub import constants, errors

    at, what, hub = _at(name, key), WHAT[kind], constants.ENDPOINT
    login = "log in with `hf auth login`, or set HF_TOKEN"
    try:
        yield
    except errors.GatedRepoError as error:
        raise UserError(
            f"{at}: the owner of this {what} gives access on request",
            hint=f"accept the terms on {hub}/{name.repo}; {login}",
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise UserError(
            f"{at}: there is no folder of this name, and {hub} has no {what} of it that you may read",
            hint=f"check the spelling; if it is private, {login}",
        ) from error
    except errors.RevisionNotFoundError as error:
        raise UserError(
            f"{at}: {name.repo} has no revision {name.revision!r}",
            hint=f"{hub}/{name.repo} lists its branches and tags; a commit may have been deleted",
        ) from error
    except (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError) as error:
        is_set = constants.HF_HUB_OFFLINE
        reason = "HF_HUB_OFFLINE is set" if is_set else f"{hub} cannot be reached"
        raise Unreachable(
            f"{at}: {reason}, and the cache {constants.HF_HUB_CACHE} lacks files of this {what}",
            reason=reason,
            hint=f"{'unset it, or fetch' if is_set else 'fetch'} the {what} once with a network: hf download "
            f"{name.repo}{' --repo-type dataset' if kind == 'dataset' else ''}",
        ) from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        hints = {
            401: login,
            403: f"your token may not read it; {login} with another one",
            429: f"too many requests were sent from here; wait some minutes, or {login}, which raises the limit",
        }
        raise UserError(
            f"{at}: {hub} answers {status}: {str(error).splitlines()[0]}",
            hint=hints.get(status, "try again; what was downloaded is kept"),
        ) from error
    except Exception as error:
        if (reason := _why_unreachable(error)) is None:
            raise
        raise Unreachable(f"{at}: {reason}", reason=reason, hint=CHECK_NETWORK) from error


def _why_unreachable(error: Exception) -> str | None:
    """Returns that the Hub cannot be reached, with the reason, for an error of the connection; None for others. The
    errors of the client's library differ between its releases."""
    from huggingface_hub import constants

    kinds = {one.__name__ for one in type(error).__mro__}
    if not kinds & {"TransportError", "ConnectionError", "TimeoutException", "Timeout"}:
        return None
    return f"{constants.ENDPOINT} cannot be reached ({type(error).__name__}: {str(error)[:200]})"
