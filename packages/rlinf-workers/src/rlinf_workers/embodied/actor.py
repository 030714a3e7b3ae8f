"""Embodied actor: trains a policy and its values by PPO, or the policy alone by GRPO, on whole segments.

trajectories -> GAE, normalised over the batch, or the group as baseline -> epochs of minibatches -> clipped loss (+
value loss) -> one Adam step each
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from safetensors.torch import load_model, save_model
from torch import Tensor

from rlinf_algos.advantages import (
    episode_group_advantages,
    first_episode_mask,
    gae,
    grpo_advantages,
    rewards_to_go,
)
from rlinf_algos.normalization import Moments
from rlinf_algos.policy_loss import ppo_clip_loss
from rlinf_comm.records import record
from rlinf_workers.execution.ports import Reader
from rlinf_workers.policies.base import Policy, PolicySettings, make_policy
from rlinf_workers.records.embodied import Trajectory
from rlinf_workers.training.base import BackendSettings, Evaluation, OptimizerSettings
from rlinf_workers.training.worker import TrainingWorker

ADAM_EPSILON = 1e-5
"""As in the reference implementations of PPO (arXiv:2005.12729, appendix); torch's default is 1e-8."""
WEIGHTS_FILE = "policy.safetensors"
NUM_STATISTICS = 6


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class GaeSettings:
    """PPO's advantages: against the value function."""

    gamma: float
    gae_lambda: float
    bootstrap_at_termination: bool


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class GroupSettings:
    """GRPO's advantages: against the other environments of the group, which began in the same state. No critic."""

    compares: Literal["episodes", "steps"]
    """The sum of an episode's rewards, one advantage for all its steps; or the rewards still to come at each step, with
    those of the others at the same step."""
    gamma: float
    """Discount of the rewards still to come; an episode's sum has none."""
    normalize_std: bool


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class EmbodiedActorSettings:
    """The algorithm and its optimizer."""

    policy: PolicySettings
    backend: BackendSettings
    """Its shards are those of a batch."""
    optimizer: OptimizerSettings
    advantage: GaeSettings | GroupSettings
    clip: float
    num_epochs: int
    minibatch_size: int
    value_coef: float
    entropy_coef: float
    target_kl: float | None
    """An epoch loop ends when the approximate KL of a minibatch exceeds it."""


@dataclass
class _Batch:
    """The samples of one shard, flat over time and environments; N samples."""

    fields: dict[str, Tensor]
    """[N, ...] each"""
    actions: Tensor
    """[N, K, A]"""
    logprobs: Tensor
    advantages: Tensor
    returns: Tensor
    """[N] each"""

    def __getitem__(self, rows: Tensor) -> _Batch:
        fields = {name: values[rows] for name, values in self.fields.items()}
        return _Batch(fields, self.actions[rows], self.logprobs[rows], self.advantages[rows], self.returns[rows])

    def __len__(self) -> int:
        return len(self.advantages)


class PolicyModel:
    """A policy as a training backend holds it; answers a `_Batch` with what it thinks of the batch's actions."""

    def __init__(self, settings: PolicySettings) -> None:
        self._settings = settings

    def build(self, device: torch.device) -> Policy:
        return make_policy(self._settings, device)

    def answers(self, model: Any, batch: _Batch, *, entropies: bool) -> Evaluation:
        return model.evaluate(batch.fields, batch.actions)

    def save(self, model: Any, folder: str) -> None:
        save_model(model, f"{folder}/{WEIGHTS_FILE}")

    def load(self, model: Any, folder: str) -> None:
        load_model(model, f"{folder}/{WEIGHTS_FILE}")


def _advantages_and_returns(t: Trajectory, settings: GaeSettings | GroupSettings) -> tuple[Tensor, Tensor]:
    """[T, n] each. A group of GRPO is the environments of one trajectory; what follows its first episodes gets 0."""
    if isinstance(settings, GaeSettings):
        return gae(
            t.rewards,
            t.values,
            t.next_values,
            t.terminated,
            t.truncated,
            gamma=settings.gamma,
            lam=settings.gae_lambda,
            bootstrap_at_termination=settings.bootstrap_at_termination,
        )
    mask = first_episode_mask(t.terminated, t.truncated)
    if settings.compares == "steps":
        to_go = rewards_to_go(t.rewards, mask, settings.gamma, dim=0)
        advantages = grpo_advantages(to_go, mask=mask, normalize_std=settings.normalize_std)
    else:
        one_group = torch.zeros(t.rewards.shape[1], dtype=torch.int64)
        advantages = episode_group_advantages(t.rewards, mask, one_group, normalize_std=settings.normalize_std)
    return advantages, torch.zeros_like(advantages)


class EmbodiedActor(TrainingWorker):
    """Trains the policy, data-parallel over its ranks; shard = group % num_shards."""

    def __init__(self, settings: EmbodiedActorSettings) -> None:
        self._settings = settings
        self._num_shards = settings.backend.num_shards
        self._backends = {"": settings.backend.make(PolicyModel(settings.policy), self, settings.optimizer)}

    def train(self, trajectories: Reader[Trajectory]) -> None:
        """Stage: all segments of a step, in the order of their groups; then the epochs."""
        received = [trajectory for chunk in trajectories for trajectory in chunk]
        batches = {
            shard: self._prepare([t for t in received if t.group % self._num_shards == shard])
            for shard in self._backend.shards
        }
        if isinstance(self._settings.advantage, GaeSettings):
            self._normalize_advantages(batches)
        self._optimize(batches)
        self._absorb_observations(batches)

    def _prepare(self, trajectories: list[Trajectory]) -> _Batch:
        parts = [_advantages_and_returns(t, self._settings.advantage) for t in trajectories]
        advantages = torch.cat([advantage.flatten() for advantage, _ in parts])
        return _Batch(
            fields={
                name: torch.cat([t.fields[name].flatten(0, 1) for t in trajectories]).to(self.device)
                for name in trajectories[0].fields
            },
            actions=torch.cat([t.actions.flatten(0, 1) for t in trajectories]).to(self.device),
            logprobs=torch.cat([t.rollout_logprobs.flatten() for t in trajectories]).to(self.device),
            advantages=advantages.to(self.device),
            returns=torch.cat([returns.flatten() for _, returns in parts]).to(self.device),
        )

    def _normalize_advantages(self, batches: Mapping[int, _Batch]) -> None:
        """To zero mean and unit variance over the whole batch, whatever its shards."""
        parts = [batch.advantages.cpu() for batch in batches.values()]
        moments = Moments.of_parts(parts, self._backend.sum_over_shards, name="advantages")
        for batch in batches.values():
            batch.advantages = moments.whiten(batch.advantages, in_float64=False)

    def _optimize(self, batches: Mapping[int, _Batch]) -> None:
        size = self._settings.minibatch_size // self._num_shards
        num_samples = min(len(batch) for batch in batches.values())
        first = self._version
        kl = 0.0
        for epoch in range(self._settings.num_epochs):
            orders = {shard: self._order(epoch, shard, len(batch)) for shard, batch in batches.items()}
            for start in range(0, num_samples, size):
                minibatch = {shard: orders[shard][start : start + size] for shard in batches}
                statistics = self._accumulate(batches, minibatch)
                kl = statistics[3] / statistics[0]
                if self._settings.target_kl is not None and kl > self._settings.target_kl:
                    self._report(first, kl)
                    return
                self._apply(statistics)
        self._report(first, kl)

    def _order(self, epoch: int, shard: int, num_samples: int) -> Tensor:
        generator = torch.Generator().manual_seed(
            (self.step.seed << 40) + (self.step.step << 16) + epoch * self._num_shards + shard
        )
        return torch.randperm(num_samples, generator=generator).to(self.device)

    def _accumulate(self, batches: Mapping[int, _Batch], minibatch: Mapping[int, Tensor]) -> list[float]:
        """Summed gradient of a minibatch over all shards; [samples, policy loss, value loss, KL, clipped, entropy],
        sums too."""
        self._backend.begin(NUM_STATISTICS)
        for shard, rows in minibatch.items():
            chosen = batches[shard][rows]
            self._backend.backward(shard, chosen, partial(self._loss, chosen), entropies=True)
        return self._backend.reduce()

    def _loss(self, batch: _Batch, answers: Evaluation) -> tuple[Tensor, list[float]]:
        settings = self._settings
        policy = ppo_clip_loss(
            answers.logprobs,
            batch.logprobs,
            batch.advantages,
            None,
            clip_low=settings.clip,
            clip_high=settings.clip,
        )
        value_terms = 0.5 * (answers.values - batch.returns).square()
        policy_sum, value_sum, entropy_sum = policy.loss_terms.sum(), value_terms.sum(), answers.entropies.sum()
        loss = policy_sum + settings.value_coef * value_sum - settings.entropy_coef * entropy_sum
        count = float(len(batch))
        kl_sum, clipped = float(policy.approx_kl) * count, float(policy.clip_fraction) * count
        sums = [float(part.detach()) for part in (policy_sum, value_sum)]
        return loss, [count, *sums, kl_sum, clipped, float(entropy_sum.detach())]

    def _apply(self, statistics: list[float]) -> None:
        count, policy_loss, value_loss, _, clipped, entropy = statistics
        grad_norm = self._step(count)
        if self.rank == 0:
            self.record("actor/policy_loss", policy_loss / count)
            if self._settings.value_coef:
                self.record("actor/value_loss", value_loss / count)
            self.record("actor/clip_fraction", clipped / count)
            self.record("actor/entropy", entropy / count)
            self.record("actor/grad_norm", grad_norm)

    def _report(self, first_version: int, kl: float) -> None:
        if self.rank == 0:
            self.record("actor/kl", kl)
            self.record("actor/optimizer_steps", self._version - first_version)

    def _absorb_observations(self, batches: Mapping[int, _Batch]) -> None:
        sums = self._backend.on_model(
            lambda policy: [policy.observation_sums(batch.fields) for batch in batches.values()]
        )
        total = self._backend.sum_over_shards(torch.stack(sums)).to(self.device)
        self._backend.on_model(lambda policy: policy.absorb(total))
