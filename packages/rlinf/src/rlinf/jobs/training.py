"""What both jobs tell the roles that hold a model: the backend and the optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch

from rlinf.config.common import OptimizerConfig, TrainerConfig
from rlinf.errors import UserError
from rlinf.plugin_checks import named_class
from rlinf_workers.plugins import POLICIES, TRAINERS
from rlinf_workers.policies import PolicySettings, make_policy, outline_policy
from rlinf_workers.trainers import BackendSettings, OptimizerSettings


def backend_settings(actor: TrainerConfig, num_shards: int, model: Mapping[str, Any] | None = None) -> BackendSettings:
    """Args:
        model: what stands, or will, in the config.json of a language model.

    Raises: UserError where there is no such backend, its constructor does not take the options, or it cannot hold the
        model so.
    """
    name, options, spec = actor.backend, dict(actor.backend_options), actor.trainer_spec
    settings = {"optimizer": None, "num_shards": num_shards}
    named_class(TRAINERS, name, options, None, None, at=f"actor.backend={name}", **settings)
    if text := spec.config_problem(options, model or {}):
        raise UserError(f"actor.backend={name}: {text}")
    return BackendSettings(name=name, options=options, num_shards=num_shards)


def check_policy_module(actor: TrainerConfig, policy: PolicySettings) -> None:
    """Raises: UserError for a robot policy whose module the backend cannot train with the recipe's options."""

    def module() -> Any:
        has_backbone = bool(POLICIES.spec(policy.name).adapted_modules)
        return outline_policy(policy) if has_backbone else make_policy(policy, torch.device("cpu"))

    if text := actor.trainer_spec.module_problem(actor.backend_options, module):
        raise UserError(f"actor.backend_options.{text}")


def optimizer_settings(section: OptimizerConfig, **others: Any) -> OptimizerSettings:
    """What a section of the config says of the optimizer, and what it leaves open."""
    names = {field.name for field in fields(OptimizerSettings)} & type(section).model_fields.keys()
    return OptimizerSettings(**{name: getattr(section, name) for name in names}, **others)
