"""The adapter of a recipe (`actor.lora`), checked before any process starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rlinf.config.reasoning import ReasoningConfig
from rlinf.errors import UserError
from rlinf.run_folder.adapters import base_digest, check_peft, check_same_base
from rlinf.run_folder.checkpoints import CHECKPOINTS, MODEL, checkpoint_steps
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
    check_peft("actor.lora ")
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
        check_same_base(folder, digest, base, key="model.path")
    return replace(lora, base_digest=digest)
