"""Embodied actor: trains a policy, and its values where the algorithm reads them, on whole segments.

trajectories -> advantages of each group -> whitened over the batch -> epochs of minibatches -> policy loss (+ value
loss) -> one Adam step each

The proximal policy is the one that sampled. Where an algorithm corrects the gap between the two, the log-probabilities
of the policy in training are asked before the first step and anchor the ratio.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlinf_algos.advantages import first_episode_mask
from rlinf_algos.algorithm import Algorithm
from rlinf_algos.normalization import Moments
from rlinf_comm.records import record
from rlinf_workers.algorithm_parts import AdvantagePart, PolicyLossPart, value_loss
from rlinf_workers.execution.ports import Reader
from rlinf_workers.policies.base import Policy, PolicySettings, make_policy
from rlinf_workers.records.embodied import Trajectory
from rlinf_workers.training.base import BackendSettings, Evaluation, OptimizerSettings, Trainable
from rlinf_workers.training.worker import TrainingWorker

ADAM_EPSILON = 1e-5
"""As in the reference implementations of PPO (arXiv:2005.12729, appendix); torch's default is 1e-8."""
TOTALS = ("samples", "policy_loss", "value_loss", "kl", "entropy")
"""Sums over a minibatch that every algorithm has, in this order; those of the policy loss follow."""


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class EmbodiedActorSettings:
    """What and how the actor trains."""

    policy: PolicySettings
    algorithm: Algorithm
    backend: BackendSettings
    """Its shards are those of a batch."""
    optimizer: OptimizerSettings


@dataclass
class _Batch:
    """The samples of one shard, flat over time and environments; N samples."""

    fields: dict[str, Tensor]
    """[N, ...] each"""
    actions: Tensor
    """[N, K, A]"""
    extras: dict[str, Tensor]
    """[N, ...] each"""
    rollout_logprobs: Tensor
    proximal_logprobs: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor
    """[N] each"""
    counts: Tensor
    """[N] bool: in an episode that has an advantage."""

    def __getitem__(self, rows: Tensor) -> _Batch:
        def chosen(values: Any) -> Any:
            if isinstance(values, dict):
                return {name: tensor[rows] for name, tensor in values.items()}
            return values[rows]

        return _Batch(**{name: chosen(values) for name, values in vars(self).items()})

    def __len__(self) -> int:
        return len(self.advantages)


class PolicyModel(Trainable):
    """A policy as a training backend holds it; answers a `_Batch` with what it thinks of the batch's actions."""

    def __init__(self, settings: PolicySettings) -> None:
        self._settings = settings

    def build(self, device: torch.device) -> Policy:
        return make_policy(self._settings, device)

    def answers(self, model: Any, batch: _Batch, *, entropies: bool) -> Evaluation:
        return model.evaluate(batch.fields, batch.actions, batch.extras)


class EmbodiedActor(TrainingWorker):
    """Trains the policy, data-parallel over its ranks; shard = group % num_shards."""

    def __init__(self, settings: EmbodiedActorSettings) -> None:
        self._algorithm = settings.algorithm
        self._num_shards = settings.backend.num_shards
        self._backends = {"": settings.backend.make(PolicyModel(settings.policy), self, settings.optimizer)}
        self._advantage = AdvantagePart(settings.algorithm)
        self._policy_loss = PolicyLossPart(settings.algorithm)

    def train(self, trajectories: Reader[Trajectory]) -> None:
        """Stage: all segments of a step, in the order of their groups; then the epochs."""
        received = [trajectory for chunk in trajectories for trajectory in chunk]
        batches = {
            shard: self._prepare([t for t in received if t.group % self._num_shards == shard])
            for shard in self._backend.shards
        }
        if self._algorithm.whiten_advantages:
            self._whiten(batches)
        if self._policy_loss.corrects:
            for batch in batches.values():
                batch.proximal_logprobs = self._logprobs(batch)
        self._optimize(batches)
        self._absorb_observations(batches)

    def _prepare(self, trajectories: list[Trajectory]) -> _Batch:
        def flat(tensors: Sequence[Tensor]) -> Tensor:
            return torch.cat([tensor.flatten(0, 1) for tensor in tensors]).to(self.device)

        advantages, returns, counts = zip(*map(self._advantages, trajectories), strict=True)
        logprobs = flat([t.rollout_logprobs for t in trajectories])
        return _Batch(
            fields={name: flat([t.fields[name] for t in trajectories]) for name in trajectories[0].fields},
            actions=flat([t.actions for t in trajectories]),
            extras={name: flat([t.extras[name] for t in trajectories]) for name in trajectories[0].extras},
            rollout_logprobs=logprobs,
            proximal_logprobs=logprobs,
            values=flat([t.values for t in trajectories]),
            advantages=flat(advantages),
            returns=flat(returns),
            counts=flat(counts),
        )

    def _advantages(self, t: Trajectory) -> tuple[Tensor, Tensor, Tensor]:
        """Advantages, returns and which steps count, [T, n] each. A group is the environments of a trajectory; what
        follows their first episodes has no part in it."""
        if self._advantage.takes.works_on == "steps":
            given = {name: getattr(t, name) for name in self._advantage.takes.inputs}
            advantages, returns = self._advantage(given, t.rewards.shape)
            counts = torch.ones_like(t.terminated)
        else:
            returns, counts = None, first_episode_mask(t.terminated, t.truncated)
            sums = t.rewards.masked_fill(~counts, 0.0).double().sum(0).to(t.rewards.dtype)
            given = {"rewards": sums[None], "lengths": counts.sum(0)[None]}
            advantages, _ = self._advantage(given, given["rewards"].shape)
            advantages = advantages.expand(t.rewards.shape).masked_fill(~counts, 0.0)
        return advantages, torch.zeros_like(advantages) if returns is None else returns, counts

    def _whiten(self, batches: Mapping[int, _Batch]) -> None:
        """Mean 0 and deviation 1 over the whole batch, whatever its shards."""
        parts = [batch.advantages[batch.counts].cpu() for batch in batches.values()]
        moments = Moments.of_parts(parts, self._backend.sum_over_shards, name="advantages")
        for batch in batches.values():
            batch.advantages = moments.whiten(batch.advantages, batch.counts, in_float64=False)

    def _logprobs(self, batch: _Batch) -> Tensor:
        """[N], by the policy before its first step."""
        found: list[Tensor] = []
        for rows in torch.arange(len(batch), device=self.device).split(len(batch) // self._algorithm.num_minibatches):
            found.append(self._backend.forward(batch[rows]).logprobs)
        return torch.cat(found)

    def _optimize(self, batches: Mapping[int, _Batch]) -> None:
        num_samples = min(len(batch) for batch in batches.values())
        size = num_samples // self._algorithm.num_minibatches
        first, kl, target = self._version, 0.0, self._algorithm.target_kl
        for epoch in range(self._algorithm.num_epochs):
            orders = {shard: self._order(epoch, shard, len(batch)) for shard, batch in batches.items()}
            for start in range(0, num_samples, size):
                minibatch = {shard: orders[shard][start : start + size] for shard in batches}
                sums = self._accumulate(batches, minibatch)
                kl = sums["kl"] / sums["samples"]
                if target is not None and kl > target:
                    self._report(first, kl)
                    return
                self._apply(sums)
        self._report(first, kl)

    def _order(self, epoch: int, shard: int, num_samples: int) -> Tensor:
        generator = torch.Generator().manual_seed(
            (self.step.seed << 40) + (self.step.step << 16) + epoch * self._num_shards + shard
        )
        return torch.randperm(num_samples, generator=generator).to(self.device)

    def _accumulate(self, batches: Mapping[int, _Batch], minibatch: Mapping[int, Tensor]) -> dict[str, float]:
        """Summed gradient of a minibatch over all shards; the sums of `TOTALS` and of the policy loss."""
        names = (*TOTALS, *self._policy_loss.statistics)
        self._backend.begin(len(names))
        for shard, rows in minibatch.items():
            chosen = batches[shard][rows]
            self._backend.backward(shard, chosen, partial(self._loss, chosen), entropies=True)
        return dict(zip(names, self._backend.reduce(), strict=True))

    def _loss(self, batch: _Batch, answers: Evaluation) -> tuple[Tensor, list[float]]:
        logprobs, entropies = answers.logprobs[:, None], answers.entropies[:, None]
        proximal, rollout = batch.proximal_logprobs[:, None], batch.rollout_logprobs[:, None]
        found = self._policy_loss(logprobs, proximal, rollout, batch.advantages, torch.ones_like(logprobs), entropies)
        policy_sum, entropy_sum, value_sum = found.terms.sum(), answers.entropies.sum(), torch.zeros(())
        loss = policy_sum - self._algorithm.entropy_coef * entropy_sum
        if self._algorithm.value_coef:
            everywhere = torch.ones_like(answers.values)
            terms = value_loss(self._algorithm, answers.values, batch.values, batch.returns, everywhere).loss_terms
            value_sum = terms.sum()
            loss = loss + self._algorithm.value_coef * value_sum
        totals = [len(batch), policy_sum.detach(), value_sum.detach(), found.kl, entropy_sum.detach()]
        return loss, [float(total) for total in (*totals, *found.statistics.values())]

    def _apply(self, sums: Mapping[str, float]) -> None:
        count = sums["samples"]
        grad_norm = self._step(count)
        if self.rank:
            return
        self.record("actor/grad_norm", grad_norm)
        self.record("actor/policy_loss", sums["policy_loss"] / count)
        if self._algorithm.value_coef:
            self.record("actor/value_loss", sums["value_loss"] / count)
        self.record("actor/entropy", sums["entropy"] / count)
        for name in self._policy_loss.statistics:
            self.record(name, sums[name] / count)

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
