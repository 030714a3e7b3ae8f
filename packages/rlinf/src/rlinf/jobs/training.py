"""What both jobs tell the roles that hold a model: the backend and the optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch

from rlinf.config.common import OptimizerConfig, TrainerConfig
from rlinf.doors import named_class
from rlinf.errors import UserError
from rlinf_workers.plugins import BACKEND_CHECKS, BACKENDS, POLICIES
from rlinf_workers.policies.base import PolicySettings, make_policy, outline_policy
from rlinf_workers.trainers.base import BackendSettings, OptimizerSettings


def backend_settings(actor: TrainerConfig, num_shards: int, model: Mapping[str, Any] | None = None) -> BackendSettings:
    """Args:
        model: what stands, or will, in the config.json of a language model.

    Raises: UserError where there is no such backend, its constructor does not take the options, or it cannot hold the
        model so.
    """
    name, options = actor.backend, dict(actor.backend_options)
    settings = {"optimizer": None, "num_shards": num_shards}
    named_class(BACKENDS, name, options, None, None, at=f"actor.backend={name}", **settings)
    if name in BACKEND_CHECKS.names():
        try:
            BACKEND_CHECKS.get(name)(options, model or {})
        except ValueError as error:
            raise UserError(str(error)) from error
    return BackendSettings(name=name, options=options, num_shards=num_shards)


def check_recompute(backend: BackendSettings, policy: PolicySettings) -> None:
    """Raises: UserError for a robot policy that has no layers whose halves `fsdp2` could compute again."""
    if backend.name != "fsdp2" or not backend.options.get("recompute"):
        return
    from rlinf_workers.trainers.fsdp2.sharding import recompute_feed_forward

    has_backbone = bool(POLICIES.get(policy.name).backbone)
    try:
        recompute_feed_forward(outline_policy(policy) if has_backbone else make_policy(policy, torch.device("cpu")))
    except ValueError as error:
        raise UserError(str(error)) from error


def optimizer_settings(section: OptimizerConfig, **others: Any) -> OptimizerSettings:
    """What a section of the config says of the optimizer, and what it leaves open."""
    said = {field.name for field in fields(OptimizerSettings)} & type(section).model_fields.keys()
    return OptimizerSettings(**{name: getattr(section, name) for name in said}, **others)
