"""Adapters saved by runs: checks them, and merges them into their base model."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from pathlib import Path

from rlinf.config.inputs import ADAPTER_CONFIG, ADAPTER_WEIGHTS, INDEX, WEIGHT_FILES, check_model_folder
from rlinf.errors import UserError
from rlinf.run_folder.checksums import file_digest

BASE_FILE = "base.json"
"""File beside an adapter that identifies its base."""


def base_digest(folder: Path) -> str:
    """Returns the digest of a folder's config and weights, those of a model or of an adapter; with an index, of the
    index and its files."""
    digest = hashlib.sha256()
    shards = {path.name for path in folder.glob("*.safetensors")} if (folder / INDEX).is_file() else set()
    for name in sorted({"config.json", ADAPTER_CONFIG, ADAPTER_WEIGHTS, *WEIGHT_FILES, *shards}):
        if (folder / name).is_file():
            digest.update(f"{name} {file_digest(folder / name)}\n".encode())
    return digest.hexdigest()


def check_adapter(folder: Path, *, key: str) -> None:
    """Checks that a saved adapter's base exists and is the one it was trained on.

    Args:
        key: config key of the folder.

    Raises: UserError.
    """
    check_peft(f"{key}={folder}: it holds an adapter, which ")
    if not (folder / BASE_FILE).is_file():
        raise UserError(
            f"{key}={folder}: the adapter has no {BASE_FILE}, which says what it was trained on",
            hint="give an adapter that rlinf trained, or a model that peft has merged (merge_and_unload)",
        )
    from rlinf_workers.models import base_of

    base = Path(base_of(str(folder)))
    check_model_folder(base, key=f"the base of {key}, {ADAPTER_CONFIG}'s base_model_name_or_path")
    check_same_base(folder, base_digest(base), base, key=key)


def check_same_base(folder: Path, digest: str, base: Path, *, key: str) -> None:
    """Checks that a saved adapter was trained on a base with this digest. Raises: UserError."""
    if not (folder / BASE_FILE).is_file():
        return  # damaged; reported by the checks of checkpoints
    from rlinf_workers.models import check_base

    try:
        check_base(str(folder), digest, str(base))
    except ValueError as error:
        raise UserError(f"{key}: {error}", hint="put the base back where it was, as it was") from error


def check_peft(who: str) -> None:
    """Raises: UserError that begins with `who` if peft is missing."""
    if importlib.util.find_spec("peft") is None:
        raise UserError(f"{who}needs the package peft, which is not installed", hint="pip install 'rlinf[lora]'")


def changes_policy(folder: Path) -> bool:
    """Whether a saved adapter changes a robot policy, not a language model."""
    return json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8")).get("task_type") is None


def write_merged(folder: Path, output: Path, dtype: str | None) -> None:
    """Writes the base model merged with an adapter into an existing folder.

    Args:
        dtype: dtype of the weights; None: the one in which the adapter was trained.

    Raises: UserError.
    """
    check_adapter(folder, key="the adapter")
    from rlinf_workers.models import write_merged as write

    write(str(folder), str(output), dtype)
