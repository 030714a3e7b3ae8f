"""Adapters: that of a recipe (`actor.lora`) and those that runs have saved, checked before any process starts."""

from __future__ import annotations

import hashlib
import importlib.util
from dataclasses import replace
from pathlib import Path

from rlinf.config.inputs import ADAPTER_CONFIG, INDEX, WEIGHT_FILES, check_model_folder
from rlinf.config.reasoning import ReasoningConfig
from rlinf.errors import UserError
from rlinf.run_folder.checkpoints import MODEL, checkpoint_steps
from rlinf.run_folder.seal import file_digest
from rlinf_workers.models.lora import ALL_LINEAR, BASE_FILE, LoraSettings, base_of, check_base, find_targets
from rlinf_workers.registry import BACKENDS
from rlinf_workers.training.base import can_train_adapters

CHECKPOINTS = "checkpoints"


def lora_settings(config: ReasoningConfig) -> LoraSettings | None:
    """What the actor is told, but for the digest of the base, which takes reading it; None: it trains the whole model.

    Raises: UserError where peft is not there, the backend cannot train adapters, or a target means no layer.
    """
    lora, base = config.actor.lora, config.model.path
    if lora is None:
        return None
    assert base is not None, "the config was checked: an adapter has a base"
    _check_peft("actor.lora ")
    backend = config.actor.backend
    if not can_train_adapters(BACKENDS.get(backend)):
        raise UserError(
            f"actor.lora: actor.backend={backend} cannot train adapters",
            hint="use replicated or fsdp2, or leave actor.lora out; docs/doors/backend.md says how a backend can",
        )
    try:
        targets = (ALL_LINEAR,) if lora.targets == ALL_LINEAR else tuple(lora.targets)
        found, _ = find_targets(str(base), targets)
    except ValueError as error:
        raise UserError(f"actor.lora.targets: {error}") from error
    return LoraSettings(rank=lora.rank, alpha=lora.alpha, targets=found, base_digest="")


def with_base(lora: LoraSettings | None, base: Path, run: Path) -> LoraSettings | None:
    """The settings with the digest of the base, which is read for it.

    Args:
        run: its folder, which need not exist.

    Raises: UserError where the run's newest checkpoint was trained on another base.
    """
    if lora is None:
        return None
    digest = base_digest(base)
    newest = [path / MODEL for _, path in checkpoint_steps(run / CHECKPOINTS)][-1:]
    for folder in newest:
        _check_base(folder, digest, base, key="model.path")
    return replace(lora, base_digest=digest)


def base_digest(folder: Path) -> str:
    """Of the config and the weights of a model folder; of an index and its files where there is one."""
    digest = hashlib.sha256()
    shards = {path.name for path in folder.glob("*.safetensors")} if (folder / INDEX).is_file() else set()
    for name in sorted({"config.json", *WEIGHT_FILES, *shards}):
        if (folder / name).is_file():
            digest.update(f"{name} {file_digest(folder / name)}\n".encode())
    return digest.hexdigest()


def check_adapter(folder: Path, *, key: str) -> None:
    """Whether an adapter that a run saved can be used: its base is there, and is the one that it was trained on.

    Args:
        key: what the config calls the folder.

    Raises: UserError.
    """
    _check_peft(f"{key}={folder}: it holds an adapter, which ")
    if not (folder / BASE_FILE).is_file():
        raise UserError(
            f"{key}={folder}: the adapter has no {BASE_FILE}, which says what it was trained on",
            hint="give an adapter that rlinf trained, or a model that peft has merged (merge_and_unload)",
        )
    base = Path(base_of(str(folder)))
    check_model_folder(base, key=f"the base of {key}, {ADAPTER_CONFIG}'s base_model_name_or_path")
    _check_base(folder, base_digest(base), base, key=key)


def _check_base(folder: Path, digest: str, base: Path, *, key: str) -> None:
    if not (folder / BASE_FILE).is_file():
        return  # damaged, which is said of checkpoints elsewhere
    try:
        check_base(str(folder), digest, str(base))
    except ValueError as error:
        raise UserError(f"{key}: {error}", hint="put the base back where it was, as it was") from error


def _check_peft(who: str) -> None:
    if importlib.util.find_spec("peft") is None:
        raise UserError(f"{who}needs the package peft, which is not installed", hint="pip install 'rlinf[lora]'")
