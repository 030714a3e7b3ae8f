"""Policy actor: trains an actor-critic by PPO, or its policy alone by GRPO, on whole segments.

trajectories -> GAE, normalised over the batch, or the group as baseline -> epochs of minibatches -> clipped loss (+
value loss) -> one Adam step each
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rlinf_algos.advantages import (
    episode_group_advantages,
    first_episode_mask,
    gae,
    grpo_advantages,
    rewards_to_go,
)
from rlinf_algos.policy_loss import ppo_clip_loss
from rlinf_comm.records import record
from rlinf_workers.execution.ports import Reader
from rlinf_workers.policies.actor_critic import ActorCritic, ActorCriticSettings
from rlinf_workers.records.embodied import Trajectory
from rlinf_workers.training.checkpoint import load_tensors, save_tensors
from rlinf_workers.training.replicated.gradients import ShardedGradients
from rlinf_workers.training.worker import TrainingWorker

ADAM_EPSILON = 1e-5
"""As in the reference implementations of PPO (arXiv:2005.12729, appendix); torch's default is 1e-8."""


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

    model: ActorCriticSettings
    num_shards: int
    learning_rate: float
    max_grad_norm: float
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

    states: Tensor
    """[N, D]"""
    actions: Tensor
    """[N, A]"""
    logprobs: Tensor
    advantages: Tensor
    returns: Tensor
    """[N] each"""


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
    """Trains the actor-critic, data-parallel over its ranks; shard = group % num_shards."""

    def __init__(self, settings: EmbodiedActorSettings) -> None:
        self._settings = settings
        self._model = ActorCritic(settings.model).to(self.device)
        self._gradients = ShardedGradients(self._model.parameters(), settings.num_shards, self.ranks, num_statistics=6)
        self._optimizer = torch.optim.Adam(self._model.parameters(), settings.learning_rate, eps=ADAM_EPSILON)

    def train(self, trajectories: Reader[Trajectory]) -> None:
        """Stage: all segments of a step, in the order of their groups; then the epochs."""
        received = [trajectory for chunk in trajectories for trajectory in chunk]
        batches = {
            shard: self._prepare([t for t in received if t.group % self._settings.num_shards == shard])
            for shard in self._gradients.shards
        }
        if isinstance(self._settings.advantage, GaeSettings):
            self._normalize_advantages(batches)
        self._optimize(batches)
        self._absorb_observations(batches)

    def _prepare(self, trajectories: list[Trajectory]) -> _Batch:
        parts = [_advantages_and_returns(t, self._settings.advantage) for t in trajectories]
        advantages = torch.cat([advantage.flatten() for advantage, _ in parts])
        return _Batch(
            states=torch.cat([t.states.flatten(0, 1) for t in trajectories]).to(self.device),
            actions=torch.cat([t.actions.flatten(0, 1) for t in trajectories]).to(self.device),
            logprobs=torch.cat([t.rollout_logprobs.flatten() for t in trajectories]).to(self.device),
            advantages=advantages.to(self.device),
            returns=torch.cat([returns.flatten() for _, returns in parts]).to(self.device),
        )

    def _normalize_advantages(self, batches: Mapping[int, _Batch]) -> None:
        """To zero mean and unit variance over the whole batch, whatever its shards."""
        count, total, squares = self._gradients.sum_over_shards(
            {
                shard: torch.stack(
                    [
                        torch.tensor(float(len(batch.advantages)), dtype=torch.float64),
                        batch.advantages.double().sum().cpu(),
                        batch.advantages.double().square().sum().cpu(),
                    ]
                )
                for shard, batch in batches.items()
            }
        ).tolist()
        mean = total / count
        std = max(0.0, (squares - count * mean * mean) / max(count - 1, 1.0)) ** 0.5
        for batch in batches.values():
            batch.advantages = (batch.advantages - mean) / (std + 1e-8)

    def _optimize(self, batches: Mapping[int, _Batch]) -> None:
        size = self._settings.minibatch_size // self._settings.num_shards
        num_samples = min(len(batch.advantages) for batch in batches.values())
        first = self._version
        kl = 0.0
        for epoch in range(self._settings.num_epochs):
            orders = {shard: self._order(epoch, shard, len(batch.advantages)) for shard, batch in batches.items()}
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
            (self.step.seed << 40) + (self.step.step << 16) + epoch * self._settings.num_shards + shard
        )
        return torch.randperm(num_samples, generator=generator).to(self.device)

    def _accumulate(self, batches: Mapping[int, _Batch], minibatch: Mapping[int, Tensor]) -> list[float]:
        """Summed gradient of a minibatch over all shards; [samples, policy loss, value loss, KL, clipped, entropy],
        sums too."""
        settings = self._settings
        self._gradients.zero()
        for shard, rows in minibatch.items():
            batch = batches[shard]
            output = self._model(batch.states[rows], actions=batch.actions[rows])
            policy = ppo_clip_loss(
                output.logprobs,
                batch.logprobs[rows],
                batch.advantages[rows],
                None,
                clip_low=settings.clip,
                clip_high=settings.clip,
            )
            value_terms = 0.5 * (output.values - batch.returns[rows]).square()
            policy_sum, value_sum, entropy_sum = policy.loss_terms.sum(), value_terms.sum(), output.entropy.sum()
            loss = policy_sum + settings.value_coef * value_sum - settings.entropy_coef * entropy_sum
            count = float(len(rows))
            kl_sum, clipped = float(policy.approx_kl) * count, float(policy.clip_fraction) * count
            self._gradients.backward(
                shard,
                loss,
                [
                    count,
                    *(float(part.detach()) for part in (policy_sum, value_sum)),
                    kl_sum,
                    clipped,
                    float(entropy_sum.detach()),
                ],
            )
        return self._gradients.reduce().tolist()

    def _apply(self, statistics: list[float]) -> None:
        count, policy_loss, value_loss, _, clipped, entropy = statistics
        grad_norm = self._optimizer_step(self._optimizer, num_terms=count, max_grad_norm=self._settings.max_grad_norm)
        self._policy_steps += 1
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
        sums = self._gradients.sum_over_shards(
            {
                shard: torch.cat(
                    [
                        torch.tensor([float(len(batch.states))], dtype=torch.float64),
                        batch.states.double().sum(0).cpu(),
                        batch.states.double().square().sum(0).cpu(),
                    ]
                )
                for shard, batch in batches.items()
            }
        ).to(self.device)
        size = (len(sums) - 1) // 2
        self._model.absorb_observations(sums[0], sums[1 : 1 + size], sums[1 + size :])

    # -- weights, state, checkpoints -------------------------------------------------------------------------------

    def weights(self) -> Mapping[str, Tensor]:
        return dict(self._model.state_dict(keep_vars=True))

    def _save_weights(self, folder: str) -> None:
        save_tensors(self.weights(), f"{folder}/policy.safetensors")

    def _load_weights(self, folder: str) -> None:
        load_tensors(self.weights(), f"{folder}/policy.safetensors")
