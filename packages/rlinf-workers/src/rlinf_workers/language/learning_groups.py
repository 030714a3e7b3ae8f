"""From scored groups to what each update learns from: which groups count, the advantage of each token, micro-batches.

scored groups -> groups with a signal -> overlong penalty, KL penalty -> advantages -> overlong filter -> whitened over
the step -> updates -> micro-batches
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlinf_algos import adapted_kl_coef, dapo, rewards_at_last_token
from rlinf_algos.aggregation import divisor
from rlinf_algos.algorithm import Algorithm
from rlinf_algos.normalization import Moments
from rlinf_algos.parts import BUILTIN_ADVANTAGES, BUILTIN_POLICY_LOSSES
from rlinf_algos.presets import KLS
from rlinf_workers.algorithm_parts import AdvantagePart
from rlinf_workers.balance import balanced
from rlinf_workers.collectives import exchanged
from rlinf_workers.language.token_budget import bins_within, filled_up, num_tokens_of, split
from rlinf_workers.models.packed import pack_without_padding
from rlinf_workers.models.sequences import fit_width, pack_groups
from rlinf_workers.models.trainable import CompletionBatch, LogitNorms
from rlinf_workers.records.language import SampleGroup, ScoredGroup
from rlinf_workers.token_choice import Choice
from rlinf_workers.trainers.base import TrainingBackend
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
    logit_norms: Tensor | None = None
    """[G, T], of the policy before the update; of advantages that read them."""
    token_kl: Tensor | None = None
    """[G, T], nats, to the reference; of algorithms that have it in the reward."""
    first_row: int = 0
    """Place of its first completion in the whole group, of which it may be a part."""

    @property
    def index(self) -> int:
        return self.samples.index

    def part(self, rows: slice) -> LearningGroup:
        """Some of its completions."""
        whole = {"samples", "first_row"}
        taken: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in whole}
        taken = {name: None if value is None else value[rows] for name, value in taken.items()}
        first_row = self.first_row + (rows.start or 0)
        return LearningGroup(samples=self.samples.part(rows), first_row=first_row, **taken)


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

    def make(
        self,
        groups: Sequence[ScoredGroup],
        values: Mapping[int, Tensor] | None = None,
        logit_norms: Mapping[int, Tensor] | None = None,
    ) -> list[LearningGroup]:
        """The groups with advantages, and with returns where there are values; values and norms are index -> [G, T].

        What compares completions is called once for all groups, [P, G]: no bit of a row depends on the others. A
        function of one's own, which may not keep to that, and one that works on tokens are called for each group.
        """
        made = [self._without_advantages(group) for group in groups]
        for group in made:
            group.values = (values or {}).get(group.index)
            group.logit_norms = (logit_norms or {}).get(group.index)
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

    def _without_advantages(self, group: ScoredGroup) -> LearningGroup:
        """The KL in the reward is between the policy that sampled and the reference, by the log-probabilities of the
        engine that sampled: they are constants, known as soon as the group is."""
        samples, kl = group.samples, None
        if self._kl is not None:
            kl = self._kl(samples.rollout_logprobs, samples.ref_logprobs, samples.loss_mask)
        return LearningGroup(samples=samples, rewards=group.rewards, advantages=torch.zeros(0), token_kl=kl)

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
        for name, known in (("values", group.values), ("logit_norms", group.logit_norms)):
            given |= {} if known is None else {name: known}
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


def whiten(groups: Sequence[LearningGroup], shard_of: Callable[[int], int], backend: TrainingBackend) -> None:
    """Mean 0 and deviation 1 over all tokens of the step, whatever its shards and ranks.

    Args:
        shard_of: index of a group -> its shard.
    """
    by_shard: dict[int, list[Tensor]] = {shard: [torch.zeros(0)] for shard in backend.shards}
    for group in groups:
        mask, advantages = group.samples.loss_mask != 0, group.advantages
        by_token = advantages if advantages.ndim == 2 else advantages[:, None].expand(mask.shape)
        by_shard[shard_of(group.index)].append(by_token[mask])
    parts = [torch.cat(tokens) for tokens in by_shard.values()]
    moments = Moments.of_parts(parts, backend.sum_over_shards, name="advantages")
    for group in groups:
        group.advantages = moments.whiten(group.advantages, in_float64=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokens:
    """Groups side by side, on the device. B completions of at most T tokens."""

    sequences: CompletionBatch
    prompts: tuple[int, ...]
    """[B], index of each row's prompt."""
    rows: tuple[int, ...]
    """[B], which completion of its prompt each row is."""
    advantages: Tensor
    """[B] or [B, T]"""
    rollout_logprobs: Tensor
    """[B, T]"""
    ref_logprobs: Tensor | None
    proximal_logprobs: Tensor | None
    values: Tensor | None
    returns: Tensor | None
    """[B, T]; None: the groups have none."""
    choice: Choice | None = None
    """Of an algorithm that chooses tokens over the batch of an optimizer step."""


Pack = Callable[[Sequence[SampleGroup]], CompletionBatch]


def tokens_of(groups: Sequence[LearningGroup], device: torch.device, pack: Pack = pack_groups) -> Tokens | None:
    """The groups side by side, as wide as the longest completion; None: there are none. An engine need not make all
    groups equally wide."""
    if not groups:
        return None
    samples = [group.samples for group in groups]
    sequences = pack(samples).to(device)
    width = sequences.loss_mask.shape[1]

    def joined(tensors: Iterable[Tensor | None]) -> Tensor | None:
        found = [fit_width(one, width) if one.ndim == 2 else one for one in tensors if one is not None]
        return torch.cat(found).to(device) if len(found) == len(groups) else None

    advantages, rollout_logprobs = joined(g.advantages for g in groups), joined(s.rollout_logprobs for s in samples)
    assert advantages is not None and rollout_logprobs is not None, "every group has them"
    return Tokens(
        sequences=sequences,
        prompts=tuple(sample.index for sample in samples for _ in sample.loss_mask),
        rows=tuple(group.first_row + row for group in groups for row in range(len(group.samples.loss_mask))),
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
    arrive; else, and where the model itself has to be asked first, the groups of the step are gathered, and with a
    budget of tokens shared out over the shards anew.

    Args:
        worker: records what is learned of the groups; it has the step.
        values: what the critic says of tokens, [B, T]; None: the algorithm has no critic.
        ref_logprobs: what the reference says of tokens, [B, T]; None: the groups have it, or the algorithm needs none.
        micro_batch_groups: groups of a micro-batch, which is padded.
        max_tokens: tokens of a micro-batch, which is packed; None: as `micro_batch_groups` says.
        balances: gathers the groups of a step in any case, so that shards have equally many tokens.
        num_prompts: groups that a step trains on; with oversampling more arrive.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        worker: Worker,
        backend: TrainingBackend,
        values: Callable[[CompletionBatch], Tensor] | None,
        ref_logprobs: Callable[[CompletionBatch], Tensor] | None = None,
        *,
        num_shards: int,
        micro_batch_groups: int,
        num_prompts: int,
        max_completion_tokens: int,
        max_tokens: int | None = None,
        balances: bool = False,
    ) -> None:
        self._algorithm, self._worker, self._backend, self._values = algorithm, worker, backend, values
        self._num_shards, self._size, self._num_prompts = num_shards, micro_batch_groups, num_prompts
        self._max_completion_tokens, self._max_tokens = max_completion_tokens, max_tokens
        self._pack: Pack = pack_groups if max_tokens is None else pack_without_padding
        self._ref_logprobs = ref_logprobs
        self._gathers = algorithm.gathers_whole_step or balances or ref_logprobs is not None
        self._shards: dict[int, int] = {}
        """Index of a group -> its shard, of those that were shared out by their tokens in this step."""
        self.advantages = AdvantageMaker(algorithm, max_completion_tokens=max_completion_tokens)
        self._kl_sums = torch.zeros(0)
        """[shards of this rank, 2] float64, of a KL in the reward: nats, completions."""
        has_bonus = algorithm.entropy_coef or algorithm.entropy_target is not None
        has_penalty = (algorithm.kl_coef and algorithm.kl_in == "loss") or has_bonus or algorithm.router_aux_coef
        is_own = algorithm.policy_loss not in BUILTIN_POLICY_LOSSES  # may learn from more than advantages
        self._learns_from_all = bool(has_penalty) or is_own

    def of_step(self, scored: Iterable[Sequence[ScoredGroup]]) -> Iterator[Iterator[MicroBatch]]:
        """An update is used up before the next is asked for. Where groups are gathered, their order in `scored` decides
        nothing; else the sums of gradients are made in it."""
        self._kl_sums = torch.zeros(len(self._backend.shards), 2, dtype=torch.float64)
        self._shards.clear()
        if self._gathers:
            groups = [group for chunk in scored for group in chunk]
            yield from self._gathered(sorted(groups, key=lambda group: group.samples.index))
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
        """Several updates, advantages that the whole step decides about, or shards of equally many tokens."""
        algorithm, num_groups = self._algorithm, self._worker.step.num_items
        have_signal = self._signals(scored)
        positions = {index: index for index in range(num_groups)}
        if algorithm.dynamic_sampling:
            positions = choose_groups(scored, have_signal, self._backend, num_groups, self._num_prompts)
            num_groups = len(positions)
        update_of = {index: position * algorithm.num_minibatches // num_groups for index, position in positions.items()}
        scored = [group for group in scored if group.samples.index in positions]
        if self._max_tokens is not None:
            scored = self._shared_out(scored, update_of)
        groups = self._prepared(scored)
        for _ in range(algorithm.num_epochs):
            for minibatch in range(algorithm.num_minibatches):
                yield self._micro_batches(group for group in groups if update_of[group.index] == minibatch)

    def _shared_out(self, scored: Sequence[ScoredGroup], update_of: Mapping[int, int]) -> list[ScoredGroup]:
        """The groups of this replica's shards, once the shards of every update have about equally many tokens; replicas
        send each other what is another's now. All of them know all lengths, so they find the same shards."""
        sizes = torch.zeros(len(self._backend.shards), self._worker.step.num_items, dtype=torch.int64)
        learned = signals(scored, by_parts=self._algorithm.reads_parts)
        for group, has_signal in zip(scored, learned, strict=True):
            if has_signal or self._learns_from_all or self._values is not None:
                sizes[0][group.samples.index] = num_tokens_of(group.samples)
        known = self._backend.sum_over_shards(sizes).tolist()
        for update in range(self._algorithm.num_minibatches):
            members = sorted(index for index, number in update_of.items() if number == update)
            shards = balanced([known[index] for index in members], self._num_shards)
            self._shards.update(zip(members, shards, strict=True))
        replicas = self._worker.replicas
        sent: list[list[ScoredGroup]] = [[] for _ in range(replicas.num_ranks)]
        for group in scored:
            sent[self._shard_of(group.samples.index) % replicas.num_ranks].append(group)
        mine = [group for groups in exchanged(sent, replicas) for group in groups]
        return sorted(mine, key=lambda group: group.samples.index)

    def _shard_of(self, index: int) -> int:
        return self._shards.get(index, index % self._num_shards)

    def _prepared(self, scored: Sequence[ScoredGroup]) -> list[LearningGroup]:
        """What has to be known before the first update: what the reference says, values, advantages, and the
        log-probabilities that anchor the ratio."""
        if self._ref_logprobs is not None:
            said = self.ask([group.samples for group in scored], self._ref_logprobs)
            scored = [
                replace(group, samples=replace(group.samples, ref_logprobs=said[group.samples.index]))
                for group in scored
            ]
        samples = [group.samples for group in scored]
        values = {} if self._values is None else self.ask(samples, self._values)
        recomputes = self._algorithm.num_updates > 1 and self._algorithm.proximal_policy == "actor"
        proximal = self.ask(samples, self.logprobs) if recomputes else {}
        norms = self.ask(samples, self._logit_norms) if self._algorithm.reads_logit_norms else {}
        groups = self._with_advantages(scored, values, norms)
        for group in groups:
            group.proximal_logprobs = proximal.get(group.index)
        if self._algorithm.whiten_advantages:
            whiten(groups, self._shard_of, self._backend)
        return groups

    def _signals(self, scored: Sequence[ScoredGroup]) -> list[bool]:
        found = signals(scored, by_parts=self._algorithm.reads_parts)
        for has_signal in found:
            self._worker.record("actor/groups_without_advantage", float(not has_signal))
        return found

    def _with_advantages(
        self,
        scored: Sequence[ScoredGroup],
        values: Mapping[int, Tensor] | None = None,
        logit_norms: Mapping[int, Tensor] | None = None,
    ) -> list[LearningGroup]:
        """The groups with their advantages; a KL in the reward is recorded."""
        made = self.advantages.make(scored, values, logit_norms)
        for group, before in zip(made, scored, strict=True):
            if group.token_kl is not None:
                kl, tokens = group.token_kl.sum(-1), float(before.samples.loss_mask.sum())
                self._worker.record("actor/ref_kl", float(kl.sum()) / max(tokens, 1.0), weight=tokens)
                row = self._backend.shards.index(self._shard_of(group.index))
                self._kl_sums[row] += torch.tensor([float(kl.double().sum()), len(kl)], dtype=torch.float64)
        return made

    def logprobs(self, batch: CompletionBatch) -> Tensor:
        """[B, T], of the present policy."""
        return self._backend.forward(batch).logprobs

    def _logit_norms(self, batch: CompletionBatch) -> Tensor:
        """[B, T], of the present policy."""
        return self._backend.forward(LogitNorms(batch)).logit_norms

    def ask(self, groups: Sequence[SampleGroup], answer: Callable[[CompletionBatch], Tensor]) -> dict[int, Tensor]:
        """Index of a group -> what a forward says of its tokens, [G, T]. In micro-batches of a shard, so that numbers
        do not depend on the number of ranks."""
        found: dict[int, list[Tensor]] = {}
        for shard in self._backend.shards:
            for samples, batch in self.batches(groups, shard):
                rows = answer(batch).cpu()
                for sample, row in zip(samples, rows.split([len(s.loss_mask) for s in samples]), strict=True):
                    told = fit_width(row, sample.completion_ids.shape[1]) * sample.loss_mask
                    found.setdefault(sample.index, []).append(told)
        return {index: rows[0] if len(rows) == 1 else torch.cat(rows) for index, rows in found.items()}

    def batches(
        self, groups: Sequence[SampleGroup], shard: int
    ) -> Iterator[tuple[Sequence[SampleGroup], CompletionBatch]]:
        """A shard's groups, or parts of them, that are computed at once, and the same as a batch on the device."""
        for samples in self._cut([group for group in groups if self._shard_of(group.index) == shard]):
            yield samples, self._pack(samples).to(self._worker.device)

    def _cut(self, mine: Sequence[SampleGroup]) -> list[Sequence[SampleGroup]]:
        """Groups, or parts of them in their order, that are asked at once."""
        if self._max_tokens is None:
            return [mine[start : start + self._size] for start in range(0, len(mine), self._size)]
        parts = [group.part(rows) for group in mine for rows in split(group, self._max_tokens)]
        return list(filled_up(parts, num_tokens_of, self._max_tokens))

    def _micro_batches(self, groups: Iterable[LearningGroup]) -> Iterator[MicroBatch]:
        if self._max_tokens is not None:
            yield from self._by_tokens(groups, self._max_tokens)
            return
        waiting: dict[int, list[LearningGroup]] = {shard: [] for shard in self._backend.shards}
        for group in groups:
            shard = self._shard_of(group.index)
            waiting[shard].append(group)
            if len(waiting[shard]) == self._size:
                yield self._micro_batch(shard, waiting[shard])
                waiting[shard] = []
        for shard, rest in waiting.items():
            if rest:
                yield self._micro_batch(shard, rest)

    def _by_tokens(self, groups: Iterable[LearningGroup], limit: int) -> Iterator[MicroBatch]:
        """Packed micro-batches: of a gathered step about equal ones, else each as full as it gets while groups come."""
        waiting: dict[int, list[LearningGroup]] = {shard: [] for shard in self._backend.shards}
        for group in groups:
            shard, parts = self._shard_of(group.index), [group.part(rows) for rows in split(group.samples, limit)]
            waiting[shard] += parts
            if not self._gathers:
                *full, waiting[shard] = filled_up(waiting[shard], self._num_computed, limit)
                for batch in full:
                    yield self._micro_batch(shard, batch)
        for shard, rest in waiting.items():
            if rest:
                for items in bins_within([self._num_computed(part) for part in rest], limit):
                    yield self._micro_batch(shard, [rest[item] for item in items])

    def _num_computed(self, group: LearningGroup) -> int:
        """Tokens that the models compute for a group; 0 for one that only counts."""
        is_computed = self._is_useful(group) or (self._values is not None and bool(group.samples.loss_mask.any()))
        return num_tokens_of(group.samples) if is_computed else 0

    def _is_useful(self, group: LearningGroup) -> bool:
        """Groups without any advantage teach the policy nothing, but for a penalty in the loss."""
        if not group.samples.loss_mask.any():
            return False
        return self._learns_from_all or bool((group.advantages != 0).any())

    def _micro_batch(self, shard: int, groups: Sequence[LearningGroup]) -> MicroBatch:
        name, limit = self._algorithm.aggregation, self._max_completion_tokens
        masks = [group.samples.loss_mask for group in groups]
        kept = [group for group, mask in zip(groups, masks, strict=True) if mask.any()]
        useful = [group for group in kept if self._is_useful(group)]
        for_policy, for_critic = tokens_of(useful, self._worker.device, self._pack), None
        if self._values is not None:
            is_same = len(useful) == len(kept)
            for_critic = for_policy if is_same else tokens_of(kept, self._worker.device, self._pack)
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
