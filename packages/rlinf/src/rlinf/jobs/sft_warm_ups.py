"""SFT warm-ups that earlier runs made, in the user's cache folder.

An SFT warm-up is taken from there only if nothing that could change a bit of it differs: the sections of the config
that decide it, the contents of the files they name, the number of ranks, the machine's processor, the versions of what
computes and the source of our own packages. It lies there as a checkpoint does, with checksums.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlinf.config.reasoning import ReasoningConfig
from rlinf.errors import UserError
from rlinf.hub import hub_name
from rlinf.run_folder.checkpoints import writing_with_checksums
from rlinf.run_folder.checksums import damage, file_digest
from rlinf.run_folder.lock import FolderLock
from rlinf.run_folder.manifest import processor_name, timestamp
from rlinf.tasks.row_files import matching
from rlinf_workers.launchers import Interpreter

NUM_KEPT = 8
SECTIONS = ("seed", "task", "model", "sft_warm_up", "rollout", "reward", "evaluation")
"""Sections of the config that decide about an SFT warm-up, beside single keys. The evaluation is among them because its
accuracy ends the SFT warm-up."""
PACKAGES = ("rlinf", "rlinf_workers", "rlinf_algos", "rlinf_comm")
LIBRARIES = ("torch", "transformers", "tokenizers", "numpy", "safetensors")
OWN_CODE = ("function", "model", "code", "weighted", "by_source")
"""Kinds of reward that may hang on code or files which the config does not name."""


def cache_folder() -> Path:
    """`rlinf/sft-warm-ups` in $XDG_CACHE_HOME, or in ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "rlinf" / "sft-warm-ups"


class SftWarmUps:
    """The SFT warm-ups of one config.

    Args:
        config: has an SFT warm-up.
        num_ranks: how many ranks train.
        device: where they train, `cpu` or `cuda`.
        environments: role -> the interpreter of its own environment.

    Attributes:
        why_not: why its SFT warm-up is neither kept nor taken; None: it is.
    """

    def __init__(
        self, config: ReasoningConfig, *, num_ranks: int, device: str, venvs: Mapping[str, Interpreter]
    ) -> None:
        assert config.sft_warm_up is not None
        self.why_not: str | None = None
        if not config.sft_warm_up.reuse:
            self.why_not = "sft_warm_up.reuse is false"
        elif config.reward.kind in OWN_CODE:
            self.why_not = f"reward.kind={config.reward.kind} may hang on more than the config"
        else:
            self._path = cache_folder() / _key(config, num_ranks, device, venvs)

    def find(self) -> tuple[Path, str] | None:
        """The folder of the SFT warm-up, and what to say of it; None: there is none of this user. A damaged one is
        deleted."""
        if self.why_not is not None or not self._path.is_dir() or self._path.stat().st_uid != os.geteuid():
            return None
        problem = damage(self._path)
        if problem is not None:
            shutil.rmtree(self._path)
            return None
        state = json.loads((self._path / "state.json").read_text(encoding="utf-8"))
        self._path.touch()
        text = (
            f"SFT warm-up: taken from {self._path}, which a run of {state['name']} made on {state['made']} "
            f"(accuracy {state['accuracy']:.3f}); --sft_warm_up.reuse false makes it anew"
        )
        return self._path, text

    @contextmanager
    def keeping(self, name: str, accuracy: float, digests: Mapping[str, str]) -> Iterator[Path]:
        """Yields a folder to save into, which later runs find; `digests` as in `writing_with_checksums`.

        Raises: OSError, UserError where the cache cannot be written.
        """
        folder = self._path.parent
        folder.mkdir(parents=True, exist_ok=True)
        lock = FolderLock(folder, ["rlinf", "train"])
        try:
            if self._path.exists():
                shutil.rmtree(self._path)
            state = {"name": name, "made": timestamp(), "accuracy": accuracy}
            with writing_with_checksums(self._path, state, digests) as partial:
                yield partial
            _prune(folder)
        finally:
            lock.release()


def _prune(folder: Path) -> None:
    """Keeps those that were used last."""
    folders = sorted((path for path in folder.iterdir() if path.is_dir()), key=lambda path: path.stat().st_mtime)
    for path in folders[:-NUM_KEPT]:
        shutil.rmtree(path)


def _key(config: ReasoningConfig, num_ranks: int, device: str, venvs: Mapping[str, Interpreter]) -> str:
    values = config.model_dump(mode="json")
    decides: dict[str, Any] = {name: values[name] for name in SECTIONS}
    decides["num_shards"] = config.actor.resolved_shards
    decides["backend"] = [config.actor.backend, dict(config.actor.backend_options)]
    decides["has_critic"] = config.algorithm.has_critic
    decides["num_ranks"], decides["device"] = num_ranks, device
    decides["threads"] = config.cluster.threads_per_device
    decides["files"] = {str(path): file_digest(path) for path in _files(config)}
    decides["processor"], decides["python"] = processor_name(), platform.python_version()
    decides["libraries"] = {name: importlib.metadata.version(name) for name in LIBRARIES}
    decides["source"] = {name: _source_digest(name) for name in PACKAGES}
    decides["venvs"] = {
        role: [
            interpreter.python,
            dict(interpreter.packages),
            [_folder_digest(folder) for folder in interpreter.folders.values()],
        ]
        for role, interpreter in venvs.items()
    }
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:32]


def _files(config: ReasoningConfig) -> list[Path]:
    """Every file of the model and the data that the config names."""
    task = config.task
    named = [config.model.path] if config.model.path else []
    if task.kind == "files":
        named += task.all_files
    named = [file for path in named for file in (matching(path) if hub_name(path) is None else ())]  # or a commit
    files = [file for path in named for file in ([path] if path.is_file() else path.rglob("*"))]
    return sorted(file for file in files if file.is_file())


def _source_digest(package: str) -> str:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise UserError(f"package {package} is not installed")
    return _folder_digest(Path(spec.origin).parent)


def _folder_digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted((*folder.rglob("*.py"), *folder.rglob("*.so"))):
        digest.update(f"{file.relative_to(folder)} {file_digest(file)}\n".encode())
    return digest.hexdigest()
