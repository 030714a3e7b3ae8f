"""The adapter of a recipe (`actor.lora`), checked before any process starts."""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path

from rlinf.config.inputs import INDEX, WEIGHT_FILES
from rlinf.config.reasoning import ReasoningConfig
from rlinf.errors import UserError
from rlinf.run_folder.seal import file_digest
from rlinf_workers.models.lora import ALL_LINEAR, LoraSettings, find_targets
from rlinf_workers.registry import BACKENDS
from rlinf_workers.training.base import can_train_adapters


def lora_settings(config: ReasoningConfig) -> LoraSettings | None:
    """What the actor is told, but for the digest of the base, which takes reading it; None: it trains the whole model.

    Raises: UserError where peft is not there, the backend cannot train adapters, or a target means no layer.
    """
    lora, base = config.actor.lora, config.model.path
    if lora is None:
        return None
    assert base is not None, "the config was checked: an adapter has a base"
    if importlib.util.find_spec("peft") is None:
        raise UserError("actor.lora needs the package peft, which is not installed", hint="pip install 'rlinf[lora]'")
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


def base_digest(folder: Path) -> str:
    """Of the config and the weights of a model folder; of an index and its files where there is one."""
    digest = hashlib.sha256()
    shards = {path.name for path in folder.glob("*.safetensors")} if (folder / INDEX).is_file() else set()
    for name in sorted({"config.json", *WEIGHT_FILES, *shards}):
        if (folder / name).is_file():
            digest.update(f"{name} {file_digest(folder / name)}\n".encode())
    return digest.hexdigest()
