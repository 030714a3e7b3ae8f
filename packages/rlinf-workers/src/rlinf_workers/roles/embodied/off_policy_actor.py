"""Off-policy actor: trains a policy and its critics on transitions from replay buffers that live here.

transitions -> replay buffer of their shard -> updates, each: rows drawn from the buffers -> critics' step -> targets
follow -> (every `policy_delay` updates) one step of policy and temperature

A batch is divided into shards like that of the on-policy actor: shard s has the environment groups g with g %
num_shards == s, its own buffer, and an equal part of every batch. All random numbers are functions of the seed, the
step, the update and the shard, so they depend neither on the plan nor on earlier steps.

The gradient of the policy goes through the critics' values to its actions: the critics return the gradient for the
actions, which the policy's loss has as a constant. Value and gradient of the loss are exactly those of
`rlinf_algos.soft_policy_loss`, and no gradient of the critics' parameters is computed for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlinf_algos import (
    OffPolicyAlgorithm,
    critic_loss,
    policy_values,
    random_shift,
    soft_policy_loss,
    soft_targets,
    temperature_loss,
)
from rlinf_comm import record
from rlinf_envs import PICTURE
from rlinf_workers.execution.ports import Reader
from rlinf_workers.models.weight_files import WeightFiles
from rlinf_workers.plugins import POLICIES
from rlinf_workers.policies.base import PolicySettings, make_policy
from rlinf_workers.policies.soft import CriticSettings, SoftCritics, SoftPolicy
from rlinf_workers.roles.embodied.replay_buffer import FIELD, NEXT, ReplayBuffer, buffer_tensors, loaded_buffer
from rlinf_workers.roles.records.embodied import Transitions
from rlinf_workers.roles.staleness import Staleness
from rlinf_workers.trainers.base import BackendSettings, ModelAdapter, ModelOutputs, OptimizerSettings
from rlinf_workers.trainers.checkpoint import CheckpointFiles
from rlinf_workers.trainers.denormals import flushed_denormals
from rlinf_workers.trainers.worker import TrainingWorker

record(OffPolicyAlgorithm)

CRITICS = "critics"
"""Folder of the critics in a checkpoint."""
REPLAY = "replay"
"""Prefix of the files with the replay buffers in a checkpoint."""
REPLAYED, DEMONSTRATED = "replayed/", "demonstrated/"
"""Prefixes of the names in these files, before the shard."""
_ALL_SHARDS = (1 << 20) - 1
"""In place of a shard in the key of random numbers that all shards share."""


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class OffPolicyActorSettings:
    """Settings of the off-policy actor."""

    policy: PolicySettings
    algorithm: OffPolicyAlgorithm
    backend: BackendSettings
    """Its shards are the shards of a batch."""
    optimizer: OptimizerSettings
    """Of policy and temperature."""
    critic_optimizer: OptimizerSettings
    num_updates: int
    """Updates of the critics in a training step."""
    micro_batch_size: int | None = None
    """Transitions of a shard in one forward and backward pass; None: the shard's whole share of a batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledOutputs(ModelOutputs):
    """Outputs of a soft policy: `logprobs` are [n], of whole chunks."""

    actions: Tensor
    """[n, K, A]"""
    log_temperature: Tensor
    """Scalar."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Draws:
    """Observations, and the noise of the actions that the policy draws in them; n rows."""

    fields: Mapping[str, Tensor]
    noise: Tensor
    """[n, noise_size]"""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Batch:
    """Transitions of one micro-batch, n rows, with the noise for both of their states."""

    here: _Draws
    following: _Draws
    actions: Tensor
    rewards: Tensor
    terminated: Tensor

    def __len__(self) -> int:
        return len(self.rewards)


class SoftPolicyModel(ModelAdapter):
    """Adapts a soft policy to a training backend: draws actions."""

    def __init__(self, settings: PolicySettings) -> None:
        self._settings = settings

    def build(self, device: torch.device) -> SoftPolicy:
        policy = make_policy(self._settings, device)
        assert isinstance(policy, SoftPolicy), f"checked by the job: policy.name={self._settings.name} is a SoftPolicy"
        return policy

    def answers(self, model: Any, batch: _Draws, *, entropies: bool) -> SampledOutputs:
        actions, logprobs = model.sample(batch.fields, batch.noise)
        return SampledOutputs(logprobs=logprobs, actions=actions, log_temperature=model.log_temperature)


class SoftCriticsModel(ModelAdapter):
    """Adapts the critics of a soft policy to a training backend: values of the actions of a `_Batch`, [n, E]."""

    def __init__(self, settings: PolicySettings, critics: CriticSettings) -> None:
        self._settings, self._critics = settings, critics

    def build(self, device: torch.device) -> SoftCritics:
        policy_class: type[SoftPolicy] = POLICIES.get(self._settings.name)
        of = self._settings
        critics = policy_class.critics(of.fields, of.actions, self._critics, seed=of.seed, **of.options)
        return critics.to(device)

    def answers(self, model: Any, batch: _Batch, *, entropies: bool) -> ModelOutputs:
        return ModelOutputs(values=model(batch.here.fields, batch.actions))


class OffPolicyActor(TrainingWorker):
    """Trains policy and critics, data-parallel over its ranks; shard = group % num_shards."""

    def __init__(self, settings: OffPolicyActorSettings) -> None:
        self._settings, self._algorithm = settings, settings.algorithm
        algorithm, self._num_shards = settings.algorithm, settings.backend.num_shards
        critics = CriticSettings(num_critics=algorithm.num_critics, layer_norm=algorithm.critic_layer_norm)
        self._backends = {
            "": settings.backend.make(SoftPolicyModel(settings.policy), self, settings.optimizer),
            CRITICS: settings.backend.make(SoftCriticsModel(settings.policy, critics), self, settings.critic_optimizer),
        }
        self._critics = self._backends[CRITICS]
        self._backend.on_model(lambda policy: policy.log_temperature.fill_(math.log(algorithm.initial_temperature)))
        self._share()
        self._noise_size = self._backend.on_model(lambda policy: policy.noise_size)
        of = settings.policy
        policy_class: type[SoftPolicy] = POLICIES.get(of.name)
        learned = policy_class.learned_spaces(of.fields, of.actions, **of.options)
        self._target_entropy = (algorithm.target_entropy or 0.0) * learned.actions.low.numel()
        capacity = algorithm.buffer_size // self._num_shards
        self._buffers = {shard: ReplayBuffer(capacity) for shard in self._backend.shards}
        self._demonstrations: dict[int, ReplayBuffer] = {}
        """Shard -> its demonstrated transitions; empty without demonstrations."""
        self._staleness = Staleness(algorithm.max_staleness)
        self._saved: CheckpointFiles | None = None
        """A checkpoint that reads the buffers while it is written."""

    def train(self, transitions: Reader[Transitions]) -> None:
        """Stage: collects all segments of a step in the order of their groups, then runs the updates."""
        self.begin_step([item for chunk in transitions for item in chunk])
        for update in range(self._settings.num_updates):
            self.update(update)
            self.report_progress(update + 1, self._settings.num_updates, unit="updates")
        self.end_step()

    def remember(self, demonstrated: Reader[Transitions]) -> None:
        """Stage: keeps demonstrated transitions; an item has those of the shard that is its group."""
        for item in [item for chunk in demonstrated for item in chunk]:
            self._demonstrations[item.group] = ReplayBuffer(item.rewards.numel())
            self._demonstrations[item.group].add(_rows(item))

    # -- a training step, in the order of the calls ----------------------------------------------------------------

    def begin_step(self, transitions: Sequence[Transitions]) -> None:
        """Adds the transitions of the step to the buffers of their shards."""
        if self._saved is not None:
            self._saved.join()
            self._saved = None
        self._staleness.begin_step(self._version)
        for item in transitions:
            count = item.rewards.numel()
            self._staleness.add({item.policy_version: count}, f"environment group {item.group} has steps")
            self._buffers[item.group % self._num_shards].add(_rows(item), num_envs=item.rewards.shape[1])

    def update(self, update: int) -> None:
        """One update of the critics, and of the policy if it is its turn."""
        batches = {shard: self._drawn(update, shard) for shard in self._backend.shards}
        with flushed_denormals():
            self._update_critics(batches, self._subset(update))
            if (update + 1) % self._algorithm.policy_delay == 0:
                self._update_policy(batches)

    def end_step(self) -> None:
        """Records the state of the buffers."""
        self._staleness.record(self)
        for buffer in self._buffers.values():
            self.record("actor/replay_size", len(buffer) * self._num_shards)

    # -- updates ---------------------------------------------------------------------------------------------------

    def _update_critics(self, batches: Mapping[int, Sequence[_Batch]], subset: Tensor | None) -> None:
        self._critics.begin(3)
        for shard, pieces in batches.items():
            for batch in pieces:
                loss = partial(self._critic_loss, self._targets(batch, subset))
                self._critics.backward(shard, batch, loss)
        count, loss, values = self._critics.finish_backward()
        grad_norm = self._critics.step(count)
        self._critics.on_model(lambda critics: critics.follow(self._algorithm.target_rate))
        self._share()
        if self.rank == 0:
            self.record("critic/loss", loss / count)
            self.record("critic/value", values / count)
            self.record("critic/grad_norm", grad_norm)

    def _targets(self, batch: _Batch, subset: Tensor | None) -> Tensor:
        following = self._encoded(batch.following)
        drawn = self._backend.forward(following)
        assert isinstance(drawn, SampledOutputs), "the model adapter returns them"
        next_values = self._critics.on_model(
            lambda critics: critics.target_values(following.fields, drawn.actions, subset)
        )
        return soft_targets(
            batch.rewards,
            batch.terminated,
            next_values,
            drawn.logprobs,
            temperature=drawn.log_temperature.exp(),
            gamma=self._algorithm.gamma,
            backup_entropy=self._algorithm.backup_entropy,
        )

    @staticmethod
    def _critic_loss(targets: Tensor, outputs: ModelOutputs) -> tuple[Tensor, list[float]]:
        loss = critic_loss(outputs.values, targets).sum()
        values = outputs.values.detach().mean(1).sum()
        return loss, [float(len(targets)), float(loss.detach()), float(values)]

    def _update_policy(self, batches: Mapping[int, Sequence[_Batch]]) -> None:
        self._backend.begin(3)
        for shard, pieces in batches.items():
            for batch in pieces:
                here = self._encoded(batch.here)
                self._backend.backward(shard, here, partial(self._policy_loss, here.fields))
        count, loss, logprobs = self._backend.finish_backward()
        grad_norm = self._step(count)
        if self.rank == 0:
            self.record("actor/policy_loss", loss / count)
            self.record("actor/entropy", -logprobs / count)
            self.record("actor/grad_norm", grad_norm)
            self.record("actor/temperature", self._backend.on_model(lambda policy: float(policy.log_temperature.exp())))

    def _policy_loss(self, fields: Mapping[str, Tensor], outputs: ModelOutputs) -> tuple[Tensor, list[float]]:
        assert isinstance(outputs, SampledOutputs), "the model adapter returns them"
        actions, logprobs, policy_value = outputs.actions, outputs.logprobs, self._algorithm.policy_value
        values, gradient = self._critics.on_model(partial(_with_gradient, fields, actions, policy_value))
        linear = values + (gradient * (actions - actions.detach())).flatten(1).sum(1)  # the values, with that gradient
        terms = soft_policy_loss(logprobs, linear[:, None], temperature=outputs.log_temperature.exp())
        loss = terms.sum()
        if self._algorithm.target_entropy is not None:
            of_temperature = temperature_loss(
                outputs.log_temperature, logprobs, target_entropy=self._target_entropy
            ).sum()
            loss = loss + of_temperature
        return loss, [float(len(terms)), float(terms.detach().sum()), float(logprobs.detach().sum())]

    def _encoded(self, draws: _Draws) -> _Draws:
        return replace(draws, fields=self._critics.on_model(lambda critics: critics.encoded(draws.fields)))

    def _share(self) -> None:
        critics = self._critics.on_model(lambda critics: critics)
        self._backend.on_model(lambda policy: policy.share(critics))

    # -- random numbers --------------------------------------------------------------------------------------------

    def _subset(self, update: int) -> Tensor | None:
        """[num_target_critics], the target critics of an update; None: all."""
        algorithm = self._algorithm
        if algorithm.num_target_critics == algorithm.num_critics:
            return None
        generator = self.step.generator(update, _ALL_SHARDS)
        chosen = generator.choice(algorithm.num_critics, algorithm.num_target_critics, replace=False)
        return torch.from_numpy(chosen).to(self.device)

    def _drawn(self, update: int, shard: int) -> list[_Batch]:
        """A shard's share of a batch, drawn with replacement, in micro-batches."""
        generator = self.step.generator(update, shard)
        size, num_demonstrated = (
            count // self._num_shards for count in (self._algorithm.batch_size, self._algorithm.num_demonstrated)
        )
        rows = _draw(self._buffers[shard], size - num_demonstrated, generator)
        if num_demonstrated:
            prior = _draw(self._demonstrations[shard], num_demonstrated, generator)
            rows = {name: torch.cat([values, prior[name]]) for name, values in rows.items()}
        here, following = (
            torch.from_numpy(generator.standard_normal((size, self._noise_size), dtype=np.float32)) for _ in range(2)
        )
        rows |= {"noise": here, "next_noise": following}
        for name in [name for name in rows if name.startswith((FIELD + PICTURE, NEXT + PICTURE))]:
            rows[name] = self._shifted(rows[name], generator)
        rows = {name: values.to(self.device) for name, values in rows.items()}
        at_once = self._settings.micro_batch_size or size
        firsts = range(0, size, at_once)
        return [_batch({name: values[first : first + at_once] for name, values in rows.items()}) for first in firsts]

    def _shifted(self, pictures: Tensor, generator: np.random.Generator) -> Tensor:
        """Pictures [n, H, W, C], each shifted at random."""
        pad = self._algorithm.picture_shift
        if not pad:
            return pictures
        return random_shift(
            pictures, torch.from_numpy(generator.integers(2 * pad + 1, size=(len(pictures), 2))), pad=pad
        )

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def _add_files(self, files: CheckpointFiles) -> None:
        files.add_tensors(REPLAY, buffer_tensors({REPLAYED: self._buffers, DEMONSTRATED: self._demonstrations}))
        self._saved = files

    def load_checkpoint(self, folder: str) -> None:
        super().load_checkpoint(folder)
        files, capacity = WeightFiles(folder, REPLAY), self._algorithm.buffer_size // self._num_shards
        self._demonstrations.clear()
        for shard in self._backend.shards:
            self._buffers[shard] = loaded_buffer(files, f"{REPLAYED}{shard}/", capacity)
            prior = loaded_buffer(files, f"{DEMONSTRATED}{shard}/", None)
            if len(prior):
                self._demonstrations[shard] = prior

    def _state(self) -> dict[str, Any]:
        return self._staleness.state()

    def _restore(self, state: Mapping[str, Any]) -> None:
        self._staleness.restore(state)


def _rows(item: Transitions) -> dict[str, Tensor]:
    """The columns of a segment: time by time, environment by environment."""
    columns = {
        **{f"{FIELD}{name}": values for name, values in item.fields.items()},
        **{f"{NEXT}{name}": values for name, values in item.next_fields.items()},
        "actions": item.actions,
        "rewards": item.rewards,
        "terminated": item.terminated,
    }
    return {name: values.flatten(0, 1) for name, values in columns.items()}


def _draw(buffer: ReplayBuffer, count: int, generator: np.random.Generator) -> dict[str, Tensor]:
    """Transitions drawn with replacement."""
    return buffer[torch.from_numpy(generator.integers(len(buffer), size=count))]


def _batch(rows: Mapping[str, Tensor]) -> _Batch:
    def fields(prefix: str) -> dict[str, Tensor]:
        return {name.removeprefix(prefix): values for name, values in rows.items() if name.startswith(prefix)}

    return _Batch(
        here=_Draws(fields=fields(FIELD), noise=rows["noise"]),
        following=_Draws(fields=fields(NEXT), noise=rows["next_noise"]),
        actions=rows["actions"],
        rewards=rows["rewards"],
        terminated=rows["terminated"],
    )


def _with_gradient(
    fields: Mapping[str, Tensor], actions: Tensor, policy_value: str, critics: SoftCritics
) -> tuple[Tensor, Tensor]:
    """The values that the policy maximizes, [n], and their gradient in the actions, [n, K, A]."""
    with torch.enable_grad():
        inputs = actions.detach().requires_grad_()
        values = policy_values(critics(fields, inputs), policy_value)
        (gradient,) = torch.autograd.grad(values.sum(), inputs)
    return values.detach(), gradient
