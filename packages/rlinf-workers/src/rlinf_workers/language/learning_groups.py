"""From scored groups to what each update learns from: which groups count, the advantage of each token, micro-batches.

scored groups -> groups with a signal -> overlong penalty, KL penalty -> advantages -> overlong filter -> whitened over
the step -> updates -> micro-batches
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from rlinf_algos import adapted_kl_coef, dapo, rewards_at_last_token
from rlinf_algos.aggregation import divisor
from rlinf_algos.algorithm import Algorithm
from rlinf_algos.normalization import Moments
from rlinf_algos.parts import BUILTIN_ADVANTAGES, BUILTIN_POLICY_LOSSES
from rlinf_algos.presets import KLS
from rlinf_workers.algorithm_parts import AdvantagePart
from rlinf_workers.models.sequences import SequenceBatch, fit_width, pack_groups
from rlinf_workers.records.language import SampleGroup, ScoredGroup
from rlinf_workers.training.base import TrainingBackend
from rlinf_workers.worker import Worker


@dataclass(kw_only=True, slots=True)
class LearningGroup:
    """A group on its way through the actor. G completions of at most T tokens."""

    samples: SampleGroup
    """Its loss_mask is 0 on completions that are filtered out."""
    rewards: Tensor
    """[G] float32, as scored."""
    advantages: Tensor
    """[G], the same for all tokens of a completion, or [G, T]."""
    proximal_logprobs: Tensor | None = None
    """[G, T]; None: the policy has not moved since, and its own are taken."""
    values: Tensor | None = None
    """[G, T], of the critic before the update."""
    returns: Tensor | None = None
    """[G, T], what the critic should have said."""
    token_kl: Tensor | None = None
    """[G, T], nats, to the reference; of algorithms that have it in the reward."""

    @property
    def index(self) -> int:
        return self.samples.index


def kl_estimate(algorithm: Algorithm) -> Callable[..., Tensor] | None:
    """The KL to the reference that the algorithm names, with its clamp; None: it has no weight."""
    if not algorithm.kl_coef:
        return None
    function = KLS.get(algorithm.kl)
    return function if algorithm.kl_clamp is None else partial(function, clamp=algorithm.kl_clamp)


def signals(groups: Sequence[ScoredGroup], *, by_parts: bool = False) -> list[bool]:
    """Whether any two rewards of a group differ, or any two values of a part of them: without that a group says nothing
    about which completion is better."""
    if not groups:
        return []
    reads_parts = by_parts and groups[0].parts is not None
    rows = torch.stack([_parts_of(group).T if reads_parts else group.rewards[None] for group in groups])  # [P, K, G]
    return dapo.has_signal(rows.flatten(0, 1)).view_as(rows).flatten(1).any(dim=1).tolist()


def choose_groups(
    groups: Sequence[ScoredGroup], have_signal: Sequence[bool], backend: TrainingBackend, num_items: int, limit: int
) -> dict[int, int]:
    """Dynamic sampling (DAPO, arXiv:2503.14476, section 3.2): index -> position of the first `limit` groups with a
    signal, over all ranks.

    Args:
        groups: this rank's, and which of them have a signal.
        num_items: groups of the step, over all ranks.
    """
    flags = torch.zeros(len(backend.shards), num_items, dtype=torch.int64)
    for group, has_signal in zip(groups, have_signal, strict=True):
        flags[0][group.samples.index] = int(has_signal)
    chosen = backend.sum_over_shards(flags).nonzero()[:limit, 0].tolist()
    return {index: position for position, index in enumerate(chosen)}


class AdvantageMaker:
    """Rewards of a group -> its advantages, by the algorithm."""

    def __init__(self, algorithm: Algorithm, *, max_completion_tokens: int) -> None:
        self._algorithm = algorithm
        self._max_completion_tokens = max_completion_tokens
        self._advantage = AdvantagePart(algorithm)
        self._kl = kl_estimate(algorithm) if algorithm.kl_in == "reward" else None
        self.kl_coef = algorithm.kl_coef
        """The weight of a KL in the reward; it changes where the algorithm has a `kl_target`."""

    def adapt_kl_coef(self, kl_sum: float, num_samples: int) -> None:
        """After a step, where the algorithm has a `kl_target`.

        Args:
            kl_sum: nats, over all completions of the step, of all ranks.
            num_samples: completions of the step.
        """
        target, horizon = self._algorithm.kl_target, self._algorithm.kl_horizon
        assert target is not None and horizon is not None, "asked only where there is a target"
        self.kl_coef = adapted_kl_coef(
            self.kl_coef, kl_sum / num_samples, target_kl=target, num_samples=num_samples, horizon=horizon
        )

    def make(self, groups: Sequence[ScoredGroup], values: Mapping[int, Tensor] | None = None) -> list[LearningGroup]:
        """The groups with advantages, and with returns where there are values, index -> [G, T].

        What compares completions is called once for all groups, [P, G]: no bit of a row depends on the others. A
        function of one's own, which may not keep to that, and one that works on tokens are called for each group.
        """
        made = [self._without_advantages(group, (values or {}).get(group.samples.index)) for group in groups]
        if self._advantage.takes.works_on == "tokens":
            for group in made:
                self._set_on_tokens(group)
        else:
            size = max(1, len(made)) if self._algorithm.advantage in BUILTIN_ADVANTAGES else 1
            for start in range(0, len(made), size):
                self._set_on_groups(made[start : start + size], groups[start : start + size])
        if self._algorithm.overlong_filter:
            for group in made:
                group.samples = self._filtered(group.samples)
        return made

    def _without_advantages(self, group: ScoredGroup, values: Tensor | None) -> LearningGroup:
        """The KL in the reward is between the policy that sampled and the reference, by the log-probabilities of the
        engine that sampled: they are constants, known as soon as the group is."""
        samples, kl = group.samples, None
        if self._kl is not None:
            kl = self._kl(samples.rollout_logprobs, samples.ref_logprobs, samples.loss_mask)
        return LearningGroup(
            samples=samples, rewards=group.rewards, advantages=torch.zeros(0), values=values, token_kl=kl
        )

    def _penalised(self, group: LearningGroup) -> Tensor:
        """[G], the rewards with their weight, less the penalty on length."""
        penalised = group.rewards
        if self._algorithm.overlong_buffer_tokens:
            penalised = penalised + dapo.overlong_penalty(
                group.samples.loss_mask.sum(-1),
                max_tokens=self._max_completion_tokens,
                buffer_tokens=self._algorithm.overlong_buffer_tokens,
                penalty=self._algorithm.overlong_penalty or 0.0,
            )
        return self._algorithm.reward_coef * penalised

    def _set_on_tokens(self, group: LearningGroup) -> None:
        tokens = rewards_at_last_token(self._penalised(group), group.samples.loss_mask)
        tokens = tokens if group.token_kl is None else tokens - self.kl_coef * group.token_kl
        given = {"rewards": tokens, "loss_mask": group.samples.loss_mask}
        given |= {} if group.values is None else {"values": group.values}
        group.advantages, group.returns = self._advantage(given, tokens.shape)

    def _set_on_groups(self, made: Sequence[LearningGroup], groups: Sequence[ScoredGroup]) -> None:
        rewards = [self._penalised(group) for group in made]
        rewards = [
            reward if group.token_kl is None else reward - (self.kl_coef * group.token_kl).sum(-1)
            for reward, group in zip(rewards, made, strict=True)
        ]
        lengths = torch.stack([group.samples.loss_mask.sum(-1) for group in made])
        given = {"rewards": torch.stack(rewards), "lengths": lengths, **self._parts(groups)}
        for group, advantages in zip(made, self._advantage(given, lengths.shape)[0], strict=True):
            group.advantages = advantages

    def _parts(self, groups: Sequence[ScoredGroup]) -> dict[str, Tensor]:
        if not self._algorithm.reads_parts:
            return {}
        weights = groups[0].part_weights
        if weights is None:
            raise ValueError(f"advantage {self._algorithm.advantage!r} reads the parts of a reward, and this has none")
        return {"parts": torch.stack([_parts_of(group) for group in groups]), "part_weights": weights}

    @staticmethod
    def _filtered(samples: SampleGroup) -> SampleGroup:
        """Without the completions that were cut at the limit. They were compared with the others all the same."""
        if samples.truncated is None:
            raise ValueError("algorithm.overlong_filter: the engine does not say which completions were cut")
        kept = dapo.overlong_filter(samples.loss_mask, samples.truncated)
        return replace(samples, loss_mask=kept.to(samples.loss_mask.dtype))


def _parts_of(group: ScoredGroup) -> Tensor:
    """[G, K]"""
    assert group.parts is not None, "all groups of a run have parts, or none has"
    return group.parts


def whiten(groups: Sequence[LearningGroup], num_shards: int, backend: TrainingBackend) -> None:
    """Mean 0 and deviation 1 over all tokens of the step, whatever its shards and ranks."""
    by_shard: dict[int, list[Tensor]] = {shard: [torch.zeros(0)] for shard in backend.shards}
    for group in groups:
        mask, advantages = group.samples.loss_mask != 0, group.advantages
        by_token = advantages if advantages.ndim == 2 else advantages[:, None].expand(mask.shape)
        by_shard[group.index % num_shards].append(by_token[mask])
    parts = [torch.cat(tokens) for tokens in by_shard.values()]
    moments = Moments.of_parts(parts, backend.sum_over_shards, name="advantages")
    for group in groups:
        group.advantages = moments.whiten(group.advantages, in_float64=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokens:
    """Groups side by side, on the device. B completions of at most T tokens."""

    sequences: SequenceBatch
    advantages: Tensor
    """[B] or [B, T]"""
    rollout_logprobs: Tensor
    """[B, T]"""
    ref_logprobs: Tensor | None
    proximal_logprobs: Tensor | None
    values: Tensor | None
    returns: Tensor | None
    """[B, T]; None: the groups have none."""


def tokens_of(groups: Sequence[LearningGroup], device: torch.device) -> Tokens | None:
    """The groups side by side, cut at the longest completion; None: there are none."""
    if not groups:
        return None
    samples = [group.samples for group in groups]
    sequences = pack_groups(samples).to(device)
    width = sequences.loss_mask.shape[1]

    def joined(tensors: Iterable[Tensor | None]) -> Tensor | None:
        found = [tensor[:, :width] if tensor.ndim == 2 else tensor for tensor in tensors if tensor is not None]
        return torch.cat(found).to(device) if len(found) == len(groups) else None

    advantages, rollout_logprobs = joined(g.advantages for g in groups), joined(s.rollout_logprobs for s in samples)
    assert advantages is not None and rollout_logprobs is not None, "every group has them"
    return Tokens(
        sequences=sequences,
        advantages=advantages,
        rollout_logprobs=rollout_logprobs,
        ref_logprobs=joined(sample.ref_logprobs for sample in samples),
        proximal_logprobs=joined(group.proximal_logprobs for group in groups),
        values=joined(group.values for group in groups),
        returns=joined(group.returns for group in groups),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """Groups of one forward and backward, all of one shard."""

    shard: int
    divisor: float
    """What the groups add to the number that makes the summed loss of an update the mean that the algorithm names."""
    num_tokens: float
    for_policy: Tokens | None
    """Those with a gradient; the others only count. None: no group has one."""
    for_critic: Tokens | None
    """Those with any token left; None: there is no critic, or no such group."""


class Updates:
    """The optimizer steps of a training step, each as its micro-batches.

    Where one update is made of advantages that need their own group alone, micro-batches come while groups still
    arrive; else, and where the model itself has to be asked first, the groups of the step are gathered.

    Args:
        worker: records what is learned of the groups; it has the step.
        values: what the critic says of tokens, [B, T]; None: the algorithm has no critic.
        ref_logprobs: what the reference says of tokens, [B, T]; None: the groups have it, or the algorithm needs none.
        micro_batch_groups: groups of a micro-batch.
        num_prompts: groups that a step trains on; with oversampling more arrive.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        worker: Worker,
        backend: TrainingBackend,
        values: Callable[[SequenceBatch], Tensor] | None,
        ref_logprobs: Callable[[SequenceBatch], Tensor] | None = None,
        *,
        num_shards: int,
        micro_batch_groups: int,
        num_prompts: int,
        max_completion_tokens: int,
    ) -> None:
        self._algorithm, self._worker, self._backend, self._values = algorithm, worker, backend, values
        self._num_shards, self._size, self._num_prompts = num_shards, micro_batch_groups, num_prompts
        self._ref_logprobs = ref_logprobs
        self._max_completion_tokens = max_completion_tokens
        self.advantages = AdvantageMaker(algorithm, max_completion_tokens=max_completion_tokens)
        self._kl_sums = torch.zeros(0)
        """[shards of this rank, 2] float64, of a KL in the reward: nats, completions."""
        has_penalty = (algorithm.kl_coef and algorithm.kl_in == "loss") or algorithm.entropy_coef
        is_own = algorithm.policy_loss not in BUILTIN_POLICY_LOSSES  # may learn from more than advantages
        self._learns_from_all = bool(has_penalty) or is_own

    def of_step(self, scored: Iterable[Sequence[ScoredGroup]]) -> Iterator[Iterator[MicroBatch]]:
        """An update is used up before the next is asked for. `scored` has the groups in the order of their index."""
        self._kl_sums = torch.zeros(len(self._backend.shards), 2, dtype=torch.float64)
        if self._algorithm.gathers_whole_step or self._ref_logprobs is not None:
            yield from self._gathered([group for chunk in scored for group in chunk])
        else:
            yield self._micro_batches(group for chunk in scored for group in self._learning(chunk))
        if self._algorithm.kl_target is not None:
            self._adapt_kl()

    def _learning(self, chunk: Sequence[ScoredGroup]) -> list[LearningGroup]:
        """On-policy: the proximal policy is the policy itself."""
        have_signal = self._signals(chunk)
        if self._algorithm.dynamic_sampling:
            chunk = [group for group, has_signal in zip(chunk, have_signal, strict=True) if has_signal]
        return self._with_advantages(chunk)

    def _gathered(self, scored: Sequence[ScoredGroup]) -> Iterator[Iterator[MicroBatch]]:
        """Several updates, or advantages that the whole step decides about."""
        algorithm, num_groups = self._algorithm, self._worker.step.num_items
        have_signal = self._signals(scored)
        positions = {group.samples.index: group.samples.index for group in scored}
        if algorithm.dynamic_sampling:
            positions = choose_groups(scored, have_signal, self._backend, num_groups, self._num_prompts)
            num_groups = len(positions)
        groups = self._prepared([group for group in scored if group.samples.index in positions])
        for _ in range(algorithm.num_epochs):
            for minibatch in range(algorithm.num_minibatches):
                yield self._micro_batches(
                    group
                    for group in groups
                    if positions[group.index] * algorithm.num_minibatches // num_groups == minibatch
                )

    def _prepared(self, scored: Sequence[ScoredGroup]) -> list[LearningGroup]:
        """What has to be known before the first update: what the reference says, values, advantages, and the
        log-probabilities that anchor the ratio."""
        if self._ref_logprobs is not None:
            said = self._ask(scored, self._ref_logprobs)
            scored = [
                replace(group, samples=replace(group.samples, ref_logprobs=said[group.samples.index]))
                for group in scored
            ]
        values = {} if self._values is None else self._ask(scored, self._values)
        proximal: dict[int, Tensor] = {}
        if self._algorithm.num_updates > 1:
            proximal = self._ask(scored, lambda batch: self._backend.forward(batch).logprobs)
        groups = self._with_advantages(scored, values)
        for group in groups:
            group.proximal_logprobs = proximal.get(group.index)
        if self._algorithm.whiten_advantages:
            whiten(groups, self._num_shards, self._backend)
        return groups

    def _signals(self, scored: Sequence[ScoredGroup]) -> list[bool]:
        found = signals(scored, by_parts=self._algorithm.reads_parts)
        for has_signal in found:
            self._worker.record("actor/groups_without_advantage", float(not has_signal))
        return found

    def _with_advantages(
        self, scored: Sequence[ScoredGroup], values: Mapping[int, Tensor] | None = None
    ) -> list[LearningGroup]:
        """The groups with their advantages; a KL in the reward is recorded."""
        made = self.advantages.make(scored, values)
        for group, before in zip(made, scored, strict=True):
            if group.token_kl is not None:
                kl, tokens = group.token_kl.sum(-1), float(before.samples.loss_mask.sum())
                self._worker.record("actor/ref_kl", float(kl.sum()) / max(tokens, 1.0), weight=tokens)
                row = self._backend.shards.index(group.index % self._num_shards)
                self._kl_sums[row] += torch.tensor([float(kl.double().sum()), len(kl)], dtype=torch.float64)
        return made

    def _ask(self, scored: Sequence[ScoredGroup], answer: Callable[[SequenceBatch], Tensor]) -> dict[int, Tensor]:
        """Index of a group -> what a forward says of its tokens, [G, T]. In micro-batches of a shard, so that numbers
        do not depend on the number of ranks."""
        found: dict[int, Tensor] = {}
        for shard in self._backend.shards:
            mine = [group.samples for group in scored if group.samples.index % self._num_shards == shard]
            for start in range(0, len(mine), self._size):
                samples = mine[start : start + self._size]
                batch = pack_groups(samples).to(self._worker.device)
                rows = answer(batch).cpu().split(batch.group_size)
                for sample, row in zip(samples, rows, strict=True):
                    found[sample.index] = fit_width(row, sample.completion_ids.shape[1]) * sample.loss_mask
        return found

    def _micro_batches(self, groups: Iterable[LearningGroup]) -> Iterator[MicroBatch]:
        waiting: dict[int, list[LearningGroup]] = {shard: [] for shard in self._backend.shards}
        for group in groups:
            shard = group.index % self._num_shards
            waiting[shard].append(group)
            if len(waiting[shard]) == self._size:
                yield self._micro_batch(shard, waiting[shard])
                waiting[shard] = []
        for shard, rest in waiting.items():
            if rest:
                yield self._micro_batch(shard, rest)

    def _micro_batch(self, shard: int, groups: Sequence[LearningGroup]) -> MicroBatch:
        """Groups without any advantage teach the policy nothing, but for a penalty in the loss."""
        name, limit = self._algorithm.aggregation, self._max_completion_tokens
        masks = [group.samples.loss_mask for group in groups]
        kept = [group for group, mask in zip(groups, masks, strict=True) if mask.any()]
        useful = [group for group in kept if self._learns_from_all or bool((group.advantages != 0).any())]
        for_policy, for_critic = tokens_of(useful, self._worker.device), None
        if self._values is not None:
            for_critic = for_policy if len(useful) == len(kept) else tokens_of(kept, self._worker.device)
        return MicroBatch(
            shard=shard,
            divisor=sum(divisor(name, mask, max_completion_tokens=limit) for mask in masks),
            num_tokens=sum(float(mask.sum()) for mask in masks),
            for_policy=for_policy,
            for_critic=for_critic,
        )

    def _adapt_kl(self) -> None:
        """The weight of the KL for the next step, the same on all ranks."""
        if self._worker.rank == 0:
            self._worker.record("actor/kl_coef", self.advantages.kl_coef)
        kl, num_samples = self._backend.sum_over_shards(self._kl_sums).tolist()
        if num_samples:
            self.advantages.adapt_kl_coef(kl, int(num_samples))
