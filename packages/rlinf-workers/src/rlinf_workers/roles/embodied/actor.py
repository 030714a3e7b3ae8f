"""Embodied actor: trains a policy, and its value function if the algorithm uses one, on segments or whole episodes.

trajectories -> advantages of each group -> whitened over the batch -> epochs of minibatches -> policy loss (+ value
loss) -> one Adam step per minibatch

`train` does all of it; `rlinf.program.embodied` makes the same calls in one process.

A sample is a chunk with one ratio and one advantage, unless the algorithm asks for one per action or per token
(`ratio_level`, `reward_level`). The loss of a sample is the mean over its ratios, minus the weighted mean of their
entropies, plus the weighted mean over its values. Actions that were not executed, and their tokens, contribute nothing.

The proximal policy is the one that sampled. If an algorithm corrects the log-prob mismatch between engine and trainer,
the trainer's log-probabilities are computed before the first step and anchor the ratio.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlinf_algos import Algorithm, BatchTokens, Moments, at_level, first_episode_mask, logprobs_at_level, sequence_hash
from rlinf_comm import record
from rlinf_workers.algorithm_parts import AdvantagePart, PolicyLossPart, PolicyTerms, value_loss
from rlinf_workers.execution.ports import Reader
from rlinf_workers.policies.base import Policy, PolicySettings, make_policy
from rlinf_workers.roles.embodied.dealing import EpisodeBatch
from rlinf_workers.roles.embodied.imitating import ImitatedRows, ImitatingActor, ImitatingActorSettings
from rlinf_workers.roles.embodied.steps import (
    action_steps,
    chunk_steps,
    episode_weights,
    of_actions,
    state_ids,
    was_executed,
)
from rlinf_workers.roles.embodied.whole_episodes import groups_of, samples_of
from rlinf_workers.roles.records.embodied import Trajectory
from rlinf_workers.roles.staleness import Staleness
from rlinf_workers.token_choice import TokenChoice, TokenChooser, TokenValues
from rlinf_workers.trainers.base import ModelAdapter, ModelOutputs

TOTALS = ("samples", "ratios", "policy_loss", "value_loss", "kl", "entropy")
"""Sums over a minibatch that every algorithm reports, in this order; the statistics of the policy loss follow."""


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class EmbodiedActorSettings(ImitatingActorSettings):
    """Settings of the embodied actor."""

    algorithm: Algorithm
    episodes: EpisodeBatch | None = None
    """The whole episodes that a step is made of; None: a step is segments."""

    @property
    def model(self) -> ModelAdapter:
        """The model adapter that the backend trains."""
        return self.adapted(PolicyModel(self.policy))


@dataclass
class ShardBatch:
    """The samples of one shard, flat over time and environments: N chunks of K actions, each of D numbers or tokens."""

    fields: dict[str, Tensor]
    """[N, ...] each"""
    actions: Tensor
    """[N, K, A]"""
    extras: dict[str, Tensor]
    """[N, ...] each"""
    rollout_logprobs: Tensor
    proximal_logprobs: Tensor
    """[N, K, D] each"""
    executed: Tensor
    """[N, K] bool"""
    values: Tensor
    advantages: Tensor
    returns: Tensor
    """[N] each, or [N, K] where actions are rewarded"""
    counts: Tensor
    """[N] or [N, K] bool: executed, in an episode that has an advantage."""
    weights: Tensor
    """[N], of the losses of each sample; 1 unless episodes are averaged (`episode_aggregation`)."""

    def __getitem__(self, rows: Tensor) -> ShardBatch:
        def chosen(values: Any) -> Any:
            if isinstance(values, dict):
                return {name: tensor[rows] for name, tensor in values.items()}
            return values[rows]

        return ShardBatch(**{name: chosen(values) for name, values in vars(self).items()})

    def __len__(self) -> int:
        return len(self.advantages)


class PolicyMicroBatch(NamedTuple):
    """Samples of one forward and backward pass."""

    shard: int
    samples: ShardBatch
    choice: TokenChoice | None
    """None unless the algorithm chooses tokens over the minibatch."""


class _Ratios(NamedTuple):
    """Inputs of the policy loss for n samples with R ratios each; every tensor is [n, R]."""

    policy: Tensor
    proximal: Tensor
    rollout: Tensor
    advantages: Tensor
    mask: Tensor
    entropies: Tensor


class PolicyModel(ModelAdapter):
    """Adapts a policy to a training backend: evaluates the actions of a `ShardBatch`, or the supervised losses of
    `ImitatedRows`."""

    def __init__(self, settings: PolicySettings) -> None:
        self._settings = settings

    def build(self, device: torch.device) -> Policy:
        return make_policy(self._settings, device)

    def answers(self, model: Any, batch: ShardBatch | ImitatedRows, *, entropies: bool) -> ModelOutputs:
        if isinstance(batch, ImitatedRows):
            return batch.outputs(model)
        return model.evaluate(batch.fields, batch.actions, batch.extras)


class EmbodiedActor(ImitatingActor):
    """Trains the policy, data-parallel over its ranks; shard = group % num_shards, the group of a whole episode being
    its start."""

    _settings: EmbodiedActorSettings

    def __init__(self, settings: EmbodiedActorSettings) -> None:
        self._algorithm = settings.algorithm
        self._num_shards = settings.backend.num_shards
        self._settings, self._optimizer = settings, settings.optimizer
        self._micro_batch_size = settings.micro_batch_size
        self._backends = {"": settings.backend.make(settings.model, self, self._optimizer)}
        self._advantage = AdvantagePart(settings.algorithm)
        self._policy_loss, self._chooser = PolicyLossPart(settings.algorithm), TokenChooser(settings.algorithm)
        self._totals = (*TOTALS, *self._policy_loss.statistics)
        self._staleness = Staleness(settings.algorithm.max_staleness)
        self._first_version, self._last_kl = 0, 0.0
        """The version at the start of the step, and the KL of its last minibatch."""
        self._num_learned = 0
        """Micro-batches of the step so far."""

    def train(self, trajectories: Reader[Trajectory]) -> None:
        """Stage: collects all segments of a step in the order of their groups, or its episodes in any order, then runs
        the epochs."""
        batches = self.begin_step([trajectory for chunk in trajectories for trajectory in chunk])
        for rows in self.minibatches(batches):
            micro_batches = self.micro_batches(batches, rows)
            self.begin_update()
            for batch in micro_batches:
                self.learn(batch)
            if not self.end_update():
                break
        self.end_step(batches)

    # -- a training step, in the order of the calls ----------------------------------------------------------------

    def begin_step(self, trajectories: Sequence[Trajectory]) -> dict[int, ShardBatch]:
        """The samples of each shard of this replica, with their advantages."""
        self._optimize_with(None)
        self._first_version, self._last_kl, self._num_learned = self._version, 0.0, 0
        self._staleness.begin_step(self._version)
        for t in trajectories:
            what = f"environment group {t.group} has" if t.episode is None else f"episode {t.episode} has"
            self._staleness.add({t.policy_version: int(t.num_executed.sum())}, f"{what} steps")
        if self._settings.episodes is not None:
            trajectories = groups_of(trajectories, self._settings.episodes, self._backend.shards)
        batches = {
            shard: self._prepare([t for t in trajectories if t.group % self._num_shards == shard])
            for shard in self._backend.shards
        }
        if self._settings.episodes is not None and self._algorithm.episode_aggregation == "episode_mean":
            self._weigh_episodes(batches)
        if self._algorithm.whiten_advantages:
            self._whiten(batches)
        if self._policy_loss.corrects:
            for batch in batches.values():
                batch.proximal_logprobs = self._logprobs(batch)
        return batches

    def minibatches(self, batches: Mapping[int, ShardBatch]) -> Iterator[dict[int, Tensor]]:
        """Yields, for each optimizer step, the rows of each shard to train on; every epoch shuffles anew."""
        count = self._algorithm.num_minibatches
        for epoch in range(self._algorithm.num_epochs):
            parts = {s: self._order(epoch, s, len(batch)).tensor_split(count) for s, batch in batches.items()}
            for number in range(count):
                yield {shard: parts[shard][number] for shard in batches}

    def micro_batches(
        self, batches: Mapping[int, ShardBatch], rows: Mapping[int, Tensor]
    ) -> Iterator[PolicyMicroBatch]:
        """Splits a minibatch into the micro-batches to compute."""
        pieces = {
            shard: of_shard.split(self._micro_batch_size or len(of_shard)) if len(of_shard) else ()
            for shard, of_shard in rows.items()
        }
        chooses = self._algorithm.chooses_tokens
        choices = self._choices(batches, pieces) if chooses else {shard: [None] * len(p) for shard, p in pieces.items()}
        return (
            PolicyMicroBatch(shard, batches[shard][piece], choice)
            for shard in pieces
            for piece, choice in zip(pieces[shard], choices[shard], strict=True)
        )

    def begin_update(self) -> None:
        """Begins an optimizer step: zeroes the gradients."""
        self._backend.begin(len(self._totals))

    def learn(self, batch: PolicyMicroBatch) -> None:
        """Forward, loss and backward of a micro-batch: adds to the gradient."""
        loss = partial(self._loss, batch.samples, batch.choice)
        self._backend.backward(batch.shard, batch.samples, loss, entropies=True)
        self._num_learned += 1
        self.report_progress(self._num_learned, unit="micro-batches")

    def end_update(self) -> bool:
        """Sums the gradient over shards and ranks, clips it and takes the optimizer step, unless the policy has moved
        farther than `target_kl`. A training step takes its first one always: older weights may have sampled, and what
        it publishes needs a new version. Returns whether the step was taken."""
        sums = dict(zip(self._totals, self._backend.finish_backward(), strict=True))
        self._last_kl, target = sums["kl"] / sums["ratios"], self._algorithm.target_kl
        if target is not None and self._last_kl > target and self._version > self._first_version:
            return False
        self._apply(sums)
        return True

    def end_step(self, batches: Mapping[int, ShardBatch]) -> None:
        """Records how far the policy has moved, and updates the policy's statistics of observations."""
        if self.rank == 0:
            self.record("actor/kl", self._last_kl)
            self.record("actor/optimizer_steps", self._version - self._first_version)
        self._staleness.record(self)
        self._absorb(lambda policy: [policy.observation_sums(batch.fields) for batch in batches.values()])

    # -- samples and their advantages ------------------------------------------------------------------------------

    def _prepare(self, trajectories: list[Trajectory]) -> ShardBatch:
        def flat(tensors: Sequence[Tensor]) -> Tensor:
            samples = [samples_of(t, tensor) for t, tensor in zip(trajectories, tensors, strict=True)]
            return torch.cat(samples).to(self.device)

        advantages, returns, counts = zip(*map(self._advantages, trajectories), strict=True)
        logprobs = flat([t.rollout_logprobs for t in trajectories])
        return ShardBatch(
            fields={name: flat([t.fields[name] for t in trajectories]) for name in trajectories[0].fields},
            actions=flat([t.actions for t in trajectories]),
            extras={name: flat([t.extras[name] for t in trajectories]) for name in trajectories[0].extras},
            rollout_logprobs=logprobs,
            proximal_logprobs=logprobs,
            executed=flat([was_executed(t.num_executed, t.rewards.shape[-1]) for t in trajectories]),
            values=flat([t.values for t in trajectories]),
            advantages=flat(advantages),
            returns=flat(returns),
            counts=flat(counts),
            weights=flat([self._weights(t, counted) for t, counted in zip(trajectories, counts, strict=True)]),
        )

    def _weights(self, t: Trajectory, counts: Tensor) -> Tensor:
        """[T, n]."""
        counts = counts if counts.ndim == 2 else counts.any(-1)
        if self._algorithm.episode_aggregation == "chunk_mean":
            return torch.ones_like(counts, dtype=t.rewards.dtype)
        if t.episode is not None:
            return counts / counts.sum(0)
        return episode_weights(t.terminated | t.truncated, counts)

    def _advantages(self, t: Trajectory) -> tuple[Tensor, Tensor, Tensor]:
        """Returns advantages, returns and the mask of steps that count: [T, n] each, or [T, n, K] if actions are
        rewarded."""
        if self._algorithm.reward_level == "chunk":
            steps = chunk_steps(t)
            if "state_ids" in self._advantage.takes.inputs:
                steps["state_ids"] = state_ids(t).to(t.rewards.device)
            return self._advantages_of_steps(steps)
        num_actions = t.rewards.shape[-1]
        executed = was_executed(t.num_executed, num_actions)
        advantages, returns, counts = (
            of_actions(tensor, num_actions) for tensor in self._advantages_of_steps(action_steps(t))
        )
        return advantages.masked_fill(~executed, 0.0), returns.masked_fill(~executed, 0.0), counts & executed

    def _advantages_of_steps(self, steps: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """[S, n] each. A group is the environments of a trajectory; steps after their first episodes are left out."""
        rewards = steps["rewards"]
        if self._advantage.takes.works_on == "steps":
            inputs = {name: steps[name] for name in self._advantage.takes.inputs}
            advantages, returns = self._advantage(inputs, rewards.shape)
            counts = torch.ones_like(steps["terminated"])
        else:
            returns, counts = None, first_episode_mask(steps["terminated"], steps["truncated"])
            sums = rewards.masked_fill(~counts, 0.0).double().sum(0).to(rewards.dtype)
            inputs = {"rewards": sums[None], "lengths": counts.sum(0)[None]}
            advantages, _ = self._advantage(inputs, inputs["rewards"].shape)
            advantages = advantages.expand(rewards.shape).masked_fill(~counts, 0.0)
        return advantages, torch.zeros_like(advantages) if returns is None else returns, counts

    def _weigh_episodes(self, batches: Mapping[int, ShardBatch]) -> None:
        """Scales weights of 1 / (length of the episode) so that the mean over the samples of the step is the mean over
        its episodes."""
        sizes = [[len(batch), float(batch.weights.double().sum().round())] for batch in batches.values()]
        num_samples, num_episodes = self._backend.sum_over_shards(torch.tensor(sizes, dtype=torch.float64)).tolist()
        for batch in batches.values():
            batch.weights *= num_samples / num_episodes

    def _whiten(self, batches: Mapping[int, ShardBatch]) -> None:
        """Normalizes advantages to mean 0 and standard deviation 1 over the whole batch, across shards."""
        parts = [batch.advantages[batch.counts].cpu() for batch in batches.values()]
        moments = Moments.of_parts(parts, self._backend.sum_over_shards, name="advantages")
        for batch in batches.values():
            batch.advantages = moments.whiten(batch.advantages, batch.counts)

    def _logprobs(self, batch: ShardBatch) -> Tensor:
        """[N, K, D], log-probabilities of the policy before its first step."""
        size = self._micro_batch_size or max(1, len(batch) // self._algorithm.num_minibatches)
        pieces = torch.arange(len(batch), device=self.device).split(size)
        return torch.cat([self._backend.forward(batch[rows]).logprobs for rows in pieces])

    def _order(self, epoch: int, shard: int, num_samples: int) -> Tensor:
        generator = torch.Generator().manual_seed(
            (self.step.seed << 40) + (self.step.step << 16) + epoch * self._num_shards + shard
        )
        return torch.randperm(num_samples, generator=generator).to(self.device)

    def _choices(
        self, batches: Mapping[int, ShardBatch], pieces: Mapping[int, Sequence[Tensor]]
    ) -> dict[int, list[TokenChoice]]:
        """Returns the tokens that are chosen over a whole minibatch, after a pass over its micro-batches."""
        values, masks = [], []
        for shard, few_rows in pieces.items():
            values.append([])
            masks.append([])
            for few in few_rows:
                batch = batches[shard][few]
                ratios = self._ratios(batch, self._backend.forward(batch, entropies=True))
                mask = ratios.mask != 0
                priorities = sequence_hash([few[:, None], torch.arange(mask.shape[1], device=few.device)]).to(
                    mask.device
                )
                tokens = BatchTokens(
                    policy_logprobs=ratios.policy[mask],
                    proximal_logprobs=ratios.proximal[mask],
                    advantages=ratios.advantages[mask],
                    priorities=(priorities ^ shard)[mask],
                )
                values[-1].append(TokenValues(tokens=tokens, entropies=ratios.entropies[mask]))
                masks[-1].append(ratios.mask)
        choices = self._chooser.choose(values, masks, self._backend.sum_over_shards)
        return dict(zip(pieces, choices, strict=True))

    def _loss(self, batch: ShardBatch, choice: TokenChoice | None, answers: ModelOutputs) -> tuple[Tensor, list[float]]:
        surrogate, entropy_sum, num_ratios = self._policy_terms(batch, choice, answers)
        policy_sum, value_sum = _sum_of_means(surrogate.terms, batch.weights), torch.zeros(())
        loss = policy_sum - self._algorithm.entropy_coef * entropy_sum
        if self._algorithm.value_coef:
            counted = torch.ones_like(answers.values) if answers.values.ndim == 1 else batch.executed
            terms = value_loss(self._algorithm, answers.values, batch.values, batch.returns, counted).loss_terms
            value_sum = _sum_of_means(terms, batch.weights)
            loss = loss + self._algorithm.value_coef * value_sum
        totals = [len(batch), num_ratios, policy_sum.detach(), value_sum.detach(), surrogate.kl, entropy_sum.detach()]
        return loss, [float(total) for total in (*totals, *surrogate.statistics.values())]

    def _policy_terms(
        self, batch: ShardBatch, choice: TokenChoice | None, answers: ModelOutputs
    ) -> tuple[PolicyTerms, Tensor, Tensor]:
        """Returns the terms of the policy loss, the entropies summed over samples, and the number of ratios."""
        of = self._ratios(batch, answers)
        terms = self._policy_loss(of.policy, of.proximal, of.rollout, of.advantages, of.mask, choice)
        return terms, _sum_of_means(of.entropies, batch.weights), of.mask.sum()

    def _ratios(self, batch: ShardBatch, answers: ModelOutputs) -> _Ratios:
        """A chunk is one action of the policy, whether it was executed to the end or not. If its actions or tokens have
        their own ratios, those that were not executed are masked."""
        level = self._algorithm.ratio_level
        executed = None if level == "chunk" else batch.executed
        inputs = at_level(level, answers.logprobs, batch.proximal_logprobs, batch.advantages, executed)
        others = (logprobs_at_level(level, each, executed) for each in (batch.rollout_logprobs, answers.entropies))
        logprobs, proximal, advantages, mask, rollout, entropies = (
            each.reshape(len(batch), -1) for each in (*inputs, *others)
        )
        return _Ratios(logprobs, proximal, rollout, advantages, mask.to(logprobs.dtype), entropies)

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
            self.record(name, sums[name] / sums["ratios"])


def _sum_of_means(terms: Tensor, weights: Tensor) -> Tensor:
    """[N] or [N, E] and [N] -> the weighted sum over samples of the mean over their E elements."""
    weighted = terms * weights.view(-1, *[1] * (terms.ndim - 1))
    return weighted.sum() / (terms.numel() // len(terms))
