"""Settings of the roles that hold a model, the same for both jobs: the backend, the optimizer, and the adapter
(`actor.lora`), all checked before any process starts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rlinf.config.base import either
from rlinf.config.common import OptimizerConfig, TrainerConfig
from rlinf.config.embodied import PolicyActorConfig, PolicyConfig
from rlinf.config.lora import LoraConfig
from rlinf.errors import UserError
from rlinf.plugin_checks import named_class
from rlinf.run_folder.adapters import base_digest, check_peft, check_same_base
from rlinf.run_folder.checkpoints import CHECKPOINTS, MODEL, checkpoint_steps
from rlinf_workers.models import ALL_LINEAR, LoraSettings, find_targets, policy_targets
from rlinf_workers.plugins import POLICIES, TRAINERS
from rlinf_workers.policies import FOLDER_OPTIONS, PolicySettings, make_policy, outline_policy
from rlinf_workers.trainers import BackendSettings, OptimizerSettings

LARGEST_EPSILON = 1e-8
"""Adam's epsilon of the public configurations of VLAs."""


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
    return OptimizerSettings(**{name: getattr(section, name) for name in names}, epsilon=section.adam_epsilon, **others)


def epsilon_notes(actor: PolicyActorConfig, policy: PolicyConfig) -> tuple[str, ...]:
    """What the manifest says where Adam's epsilon, made for small networks, shrinks the steps of a published model."""
    if policy.options.get("folder") is None or actor.adam_epsilon <= LARGEST_EPSILON:
        return ()
    return (
        f"actor.adam_epsilon={actor.adam_epsilon:g}: the gradient of a published checkpoint, clipped to a norm of "
        f"{actor.max_grad_norm:g}, has about as small numbers, since it has so many weights, so steps shrink to a "
        f"fraction of the learning rate; public configurations have --actor.adam_epsilon {LARGEST_EPSILON:g}",
    )


# -- adapters ----------------------------------------------------------------------------------------------------------


def lora_settings(lora: LoraConfig | None, backend: str, base: Path | None) -> LoraSettings | None:
    """Returns the adapter of a language model, without the digest of its base, which takes reading it; None: the whole
    model is trained.

    Raises: UserError where peft is not there, the backend cannot train adapters, or a target means no layer.
    """
    if lora is None:
        return None
    assert base is not None, "the config was checked: an adapter has a base"
    _check_trains(backend)
    return _settings(lora, partial(find_targets, str(base)))


def policy_lora(lora: LoraConfig | None, backend: str, policy: PolicySettings) -> LoraSettings | None:
    """The same of a policy, which was asked what it needs; its base is a checkpoint or its first weights.

    Raises: UserError, also for a policy that takes no adapter.
    """
    if lora is None:
        return None
    backbone = POLICIES.spec(policy.name).adapted_modules
    if not backbone:
        adaptable = ", ".join(spec.name for spec in POLICIES.specs() if spec.adapted_modules)
        raise UserError(
            f"actor.lora: policy.name={policy.name} has no backbone whose weights could stay; it is trained whole",
            hint=f"leave actor.lora out, or use one of {adaptable}; docs/plugins/policy.md says how a policy "
            "can take one",
        )
    _check_trains(backend)
    outline = outline_policy(policy)
    return replace(_settings(lora, partial(policy_targets, outline, backbone)), backbone=backbone)


def policy_digest(policy: PolicySettings) -> str:
    """Of what decides the policy's first weights: the files of its folder, or its options and seed."""
    text = json.dumps([policy.name, policy.options, policy.seed], sort_keys=True, default=str)
    digest = hashlib.sha256(text.encode())
    for folder in (policy.options.get(name) for name in FOLDER_OPTIONS):
        if folder is not None:
            digest.update(base_digest(Path(folder)).encode())
    return digest.hexdigest()


def _check_trains(backend: str) -> None:
    check_peft("actor.lora ")
    if not TRAINERS.spec(backend).trains_adapters:
        others = either(TRAINERS, lambda spec: spec.trains_adapters)
        raise UserError(
            f"actor.lora: actor.backend={backend} cannot train adapters",
            hint=f"use {others}, or leave actor.lora out; docs/plugins/backend.md says how a backend can",
        )


def _settings(lora: LoraConfig, find: Callable[[tuple[str, ...]], tuple[tuple[str, ...], object]]) -> LoraSettings:
    try:
        targets, _ = find((ALL_LINEAR,) if lora.targets == ALL_LINEAR else tuple(lora.targets))
    except ValueError as error:
        raise UserError(f"actor.lora.targets: {error}") from error
    return LoraSettings(rank=lora.rank, alpha=lora.alpha, targets=targets, base_digest="")


def with_base(
    lora: LoraSettings | None,
    base: Path,
    run: Path,
    *,
    digest: str | None = None,
    key: str = "model.path",
    under: str = "",
) -> LoraSettings | None:
    """The settings with the digest of the base, which is read for it.

    Args:
        run: its folder, which need not exist.
        digest: known already.
        key: what the config calls the base.
        under: folder of the adapter's policy in a checkpoint.

    Raises: UserError where the run's newest checkpoint was trained on another base.
    """
    if lora is None:
        return None
    digest = digest or base_digest(base)
    newest = [path / under / MODEL for _, path in checkpoint_steps(run / CHECKPOINTS)][-1:]
    for folder in newest:
        check_same_base(folder, digest, base, key=key)
    return replace(lora, base_digest=digest)
