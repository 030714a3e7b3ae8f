"""Reinforcement learning in the noise of a frozen policy: DSRL (arXiv:2506.15799) with critics of noise.

A policy that denoises actions by an ODE is a function of an observation and of initial noise. Here a soft actor chooses
this noise, and critics value it; the other policy never changes. Departures from the authors' code for pi0 (dsrl_pi0):

* The actor sees the state and the mean feature of the vision-language model over pictures and instruction; there, small
  pictures through an encoder of its own, on real robots beside the last token's feature.
* Noise is chosen for the numbers that the environment's actions have; those that only the model has start from 0.
  There, noise has all 32 numbers of the model. As there, predicted actions beyond R start from the last row of noise.
* The first random noise is uniform within the bound; there, standard normal.
* The frozen policy is where actions are computed, and nowhere else: the actor that trains neither loads nor sends it.

Legend: n rows, K actions of a chunk, A numbers of an action, R rows of noise, S numbers of the state, W width of the
vision-language model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields as fields_of
from typing import Any

import torch
from torch import Tensor

from rlinf_envs import ActionSpec, FieldSpec
from rlinf_workers.models.placement import tensors_of
from rlinf_workers.models.weight_names import plain_weights
from rlinf_workers.plugins import POLICIES
from rlinf_workers.policies.base import (
    Fields,
    Needs,
    PolicyError,
    PolicySettings,
    PolicyStep,
    make_policy,
    outline_policy,
)
from rlinf_workers.policies.flow.policy import Denoiser, FlowPolicy
from rlinf_workers.policies.options import options_of
from rlinf_workers.policies.soft import CriticSettings, LearnedSpaces
from rlinf_workers.policies.soft_actor.critics import CriticEnsemble
from rlinf_workers.policies.soft_actor.policy import SoftActor


@dataclass(frozen=True, kw_only=True, slots=True)
class SoftNoiseOptions:
    """Options of the soft actor and of its critics. All others are those of the frozen policy."""

    flow: str = ""
    """Name of the frozen policy: pi0, pi05, smolvla, or package.module:Class of a `FlowPolicy`."""
    flow_folder: str | None = None
    """A folder of weights that training wrote, RUN/checkpoints/step-*/model; with the options that the run had. None:
    those of the option `folder`, a published checkpoint."""
    noise_bound: float = 1.5
    """Largest number of the noise; without the actor, noise is standard normal. The paper's b_W."""
    noise_rows: int = 1
    """R: the first R predicted actions have noise of their own, and the others that of the last of them."""
    hidden_size: int = 256
    """Width of the hidden layers."""
    num_layers: int = 2
    """Hidden layers of the actor, and of each critic."""


class SoftNoise(SoftActor):
    """A soft actor over the initial noise [R, A] of a frozen `FlowPolicy`."""

    takes_demonstrations = False

    @classmethod
    def needs(cls, fields: Mapping[str, FieldSpec], actions: ActionSpec, **options: Any) -> Needs:
        chosen, flow = _divided(fields, actions, options)
        for name in ("noise_rows", "hidden_size", "num_layers"):
            if getattr(chosen, name) < 1:
                raise PolicyError(f"options.{name} is {getattr(chosen, name)}; use at least 1")
        if not 0 < chosen.noise_bound < float("inf"):
            raise PolicyError(f"options.noise_bound is {chosen.noise_bound}; use a number above 0, such as 1.5")
        flow_class = POLICIES.get(flow.name) if flow.name else None
        if not (isinstance(flow_class, type) and issubclass(flow_class, FlowPolicy)):
            raise PolicyError(
                f"options.flow is {flow.name!r}, which has no noise that actions are denoised from; use pi0, pi05 or "
                "smolvla"
            )
        if chosen.flow_folder is None and flow.options.get("folder") is None:
            raise PolicyError(
                f"{flow.name} is not trained here, so that it must have learned already: give options.flow_folder, the "
                "folder RUN/checkpoints/step-*/model of a run, or options.folder, a published checkpoint"
            )
        return flow_class.needs(fields, actions, **flow.options)

    @classmethod
    def learned_spaces(cls, fields: Mapping[str, FieldSpec], actions: ActionSpec, **options: Any) -> LearnedSpaces:
        """State and features [S + W], noise [R, A]."""
        chosen, flow = _divided(fields, actions, options)
        outline = outline_policy(flow)
        assert isinstance(outline, FlowPolicy), "checked by `needs`"
        size = fields["state"].shape[0] + outline.sizes().prefix_width
        shape = (chosen.noise_rows, actions.low.numel())
        high = torch.full(shape, float(chosen.noise_bound))
        return LearnedSpaces(
            fields={"state": FieldSpec(shape=(size,), dtype="float32")},
            actions=ActionSpec(kind="continuous", shape=shape, low=-high, high=high),
        )

    def __init__(self, fields: Mapping[str, FieldSpec], actions: ActionSpec, *, seed: int = 0, **options: Any) -> None:
        chosen, self._flow_settings = _divided(fields, actions, options)
        self._flow_folder = chosen.flow_folder
        spaces = self.learned_spaces(fields, actions, **options)
        super().__init__(spaces.fields, _row_of(spaces), seed=seed, **_of_actor(chosen))
        self._held: list[FlowPolicy] = []
        """The frozen policy once it has been needed. In a list, so that it is no part of this module's weights."""
        self._last: tuple[Fields, Denoiser] | None = None
        """What `observe` has read last."""

    @classmethod
    def critics(
        cls,
        fields: Mapping[str, FieldSpec],
        actions: ActionSpec,
        settings: CriticSettings,
        *,
        seed: int = 0,
        **options: Any,
    ) -> CriticEnsemble:
        chosen, _ = _divided(fields, actions, options)
        spaces = cls.learned_spaces(fields, actions, **options)
        return SoftActor.critics(spaces.fields, _row_of(spaces), settings, seed=seed, **_of_actor(chosen))

    def act(self, fields: Fields, noise: Tensor | None) -> PolicyStep:
        step = super().act(self.observe(fields), noise)
        actions = self.execute(fields, step.actions)
        return PolicyStep(
            actions=actions,
            logprobs=step.logprobs.sum(1, keepdim=True).expand(-1, actions.shape[1], -1),
            values=step.values,
        )

    @torch.no_grad()
    def observe(self, fields: Fields) -> Fields:
        denoiser = self._flow(fields["state"].device).denoiser(fields)
        self._last = fields, denoiser
        return {"state": torch.cat([fields["state"], denoiser.features], dim=-1)}

    @torch.no_grad()
    def execute(self, fields: Fields, actions: Tensor) -> Tensor:
        if self._last is None or self._last[0] is not fields:
            self.observe(fields)
        assert self._last is not None, "`observe` sets it"
        return self._flow(actions.device).denoise(self._last[1], fields, actions)

    def _flow(self, device: torch.device) -> FlowPolicy:
        """The frozen policy, loaded when it is first needed."""
        if not self._held:
            flow = make_policy(self._flow_settings, device).requires_grad_(False)
            assert isinstance(flow, FlowPolicy), "checked by `needs`"
            if self._flow_folder is not None:
                stored = plain_weights(flow, self._flow_folder)
                stored.files.fill(stored.layout, 0, tensors_of(flow))
            self._held.append(flow)
        return self._held[0].to(device)


def _divided(
    fields: Mapping[str, FieldSpec], actions: ActionSpec, options: Mapping[str, Any]
) -> tuple[SoftNoiseOptions, PolicySettings]:
    """The options of the soft actor, and the frozen policy with all others."""
    names = {field.name for field in fields_of(SoftNoiseOptions)}
    chosen = options_of(SoftNoiseOptions, {name: value for name, value in options.items() if name in names})
    others = {name: value for name, value in options.items() if name not in names}
    return chosen, PolicySettings(name=chosen.flow, fields=dict(fields), actions=actions, options=others)


def _of_actor(chosen: SoftNoiseOptions) -> dict[str, int]:
    """Options of the `SoftActor`, whose chunk is the rows of noise."""
    return {"hidden_size": chosen.hidden_size, "num_layers": chosen.num_layers, "chunk_size": chosen.noise_rows}


def _row_of(spaces: LearnedSpaces) -> ActionSpec:
    """One row of noise."""
    low, high = spaces.actions.low[0], spaces.actions.high[0]
    return ActionSpec(kind="continuous", shape=tuple(low.shape), low=low, high=high)
