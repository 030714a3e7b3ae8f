"""Which sequences are computed together, limited by their number or by their tokens.

groups -> one shard each -> micro-batches of a shard, one forward and backward pass each

Depends only on indices and lengths, so neither the number of ranks nor the mode changes the batches
(docs/decisions/020).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from rlinf_algos import BUILTIN_POLICY_LOSSES, Algorithm, aggregation_divisor
from rlinf_workers.balance import balanced
from rlinf_workers.models.packed import computed_parts, computed_tokens, num_computed_tokens, pack_without_padding
from rlinf_workers.models.placement import to_device
from rlinf_workers.models.sequences import fit_width, pack_groups
from rlinf_workers.models.trainable import CompletionBatch
from rlinf_workers.roles.language.advantages import LearningGroup
from rlinf_workers.roles.records.language import SampleGroup
from rlinf_workers.token_choice import TokenChoice

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokens:
    """Groups concatenated along the batch dimension, on the device. B completions of at most T tokens."""

    sequences: CompletionBatch
    prompts: tuple[int, ...]
    """[B], index of each row's prompt."""
    rows: tuple[int, ...]
    """[B], which completion of its prompt each row is."""
    advantages: Tensor
    """[B] or [B, T]"""
    rollout_logprobs: Tensor
    """[B, T]"""
    token_versions: Tensor
    """[B, T] int64 on the CPU, the version of the weights that sampled each token; arbitrary where the mask is 0."""
    ref_logprobs: Tensor | None
    proximal_logprobs: Tensor | None
    values: Tensor | None
    returns: Tensor | None
    """[B, T]; None: there is no critic."""
    shares: Tensor | None = None
    """[B], the share that each row has of the tokens of its episode; None: each row is a sequence."""
    computed: tuple[int, int]
    """Of the groups, see `computed_tokens`."""
    choice: TokenChoice | None = None
    """None unless the algorithm chooses tokens over the batch of an optimizer step."""


Pack = Callable[[Sequence[SampleGroup]], CompletionBatch]


def tokens_of(groups: Sequence[LearningGroup], device: torch.device, pack: Pack = pack_groups) -> Tokens | None:
    """Concatenates groups, padded to the longest completion; None if there are none. Engines may return groups of
    different widths."""
    if not groups:
        return None
    samples = [group.samples for group in groups]
    sequences = pack(samples).to(device)
    width = sequences.loss_mask.shape[1]

    def joined(tensors: Iterable[Tensor | None]) -> Tensor | None:
        rows = [fit_width(one, width) if one.ndim == 2 else one for one in tensors if one is not None]
        return to_device(torch.cat(rows), device) if len(rows) == len(groups) else None

    advantages, rollout_logprobs = joined(g.advantages for g in groups), joined(s.rollout_logprobs for s in samples)
    assert advantages is not None and rollout_logprobs is not None, "every group has advantages and log-probabilities"
    return Tokens(
        sequences=sequences,
        prompts=tuple(sample.index for sample in samples for _ in sample.loss_mask),
        rows=tuple(group.first_row + row for group in groups for row in range(len(group.samples.loss_mask))),
        advantages=advantages,
        rollout_logprobs=rollout_logprobs,
        token_versions=torch.cat([fit_width(sample.token_versions(), width) for sample in samples]),
        ref_logprobs=joined(sample.ref_logprobs for sample in samples),
        proximal_logprobs=joined(group.proximal_logprobs for group in groups),
        values=joined(group.values for group in groups),
        returns=joined(group.returns for group in groups),
        shares=_shares_of(groups, device),
        computed=computed_tokens(samples),
    )


def _shares_of(groups: Sequence[LearningGroup], device: torch.device) -> Tensor | None:
    if all(group.shares is None for group in groups):
        return None
    rows = [torch.ones(len(g.samples.loss_mask)) if g.shares is None else g.shares for g in groups]
    return to_device(torch.cat(rows), device)


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """Groups of one forward and backward pass, all of one shard."""

    shard: int
    divisor: float
    """What the groups add to the divisor that turns the summed loss of an update into the mean that the algorithm
    names."""
    num_tokens: float
    for_policy: Tokens | None
    """Groups with a gradient; the others only count towards the divisor. None: no group has one."""
    for_critic: Tokens | None
    """Groups with any token left; None: there is no critic or no such group."""


def shares_passes(device: torch.device) -> bool:
    """Whether a forward pass that waits for no other groups computes those that are there together: on GPUs. On CPUs it
    computes one at a time, so that no bit depends on which are there (docs/decisions/065)."""
    return device.type == "cuda"


class MicroBatches:
    """Splits groups into micro-batches.

    Args:
        shards: the shards of this replica, of `num_shards` in all.
        num_groups: groups per micro-batch, which is padded.
        max_tokens: tokens per micro-batch, which is packed; None: `num_groups` decides.
        has_critic: there is a critic, which also learns from groups without a gradient for the policy.
        is_gathered: all groups of an optimizer step have arrived before its first micro-batch.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        device: torch.device,
        shards: Sequence[int],
        *,
        num_shards: int,
        num_groups: int,
        max_tokens: int | None,
        max_completion_tokens: int,
        has_critic: bool,
        is_gathered: bool,
    ) -> None:
        self._algorithm, self._device, self._shards, self._num_shards = algorithm, device, shards, num_shards
        self._num_groups, self._max_tokens, self._max_completion_tokens = num_groups, max_tokens, max_completion_tokens
        self._has_critic, self._is_gathered = has_critic, is_gathered
        self._pack: Pack = pack_groups if max_tokens is None else pack_without_padding
        self.shared_out: dict[int, int] = {}
        """Index of a group -> its shard, for groups that were balanced by tokens in this step."""
        has_bonus = algorithm.entropy_coef or algorithm.entropy_target is not None
        has_penalty = (algorithm.kl_coef and algorithm.kl_in == "loss") or has_bonus or algorithm.router_aux_coef
        is_custom = algorithm.policy_loss not in BUILTIN_POLICY_LOSSES  # may learn from more than advantages
        self.uses_all_groups = bool(has_penalty) or is_custom
        """Whether the policy also learns from groups without any advantage."""

    def shard_of(self, index: int) -> int:
        """The shard of the group with this index."""
        return self.shared_out.get(index, index % self._num_shards)

    def of(self, groups: Iterable[LearningGroup]) -> Iterator[MicroBatch]:
        """The micro-batches of an optimizer step, yielded while groups still arrive."""
        if self._max_tokens is not None:
            yield from self._by_tokens(groups, self._max_tokens)
            return
        waiting: dict[int, list[LearningGroup]] = {shard: [] for shard in self._shards}
        for group in groups:
            shard = self.shard_of(group.index)
            waiting[shard].append(group)
            if len(waiting[shard]) == self._num_groups:
                yield self._micro_batch(shard, waiting[shard])
                waiting[shard] = []
        for shard, rest in waiting.items():
            if rest:
                yield self._micro_batch(shard, rest)

    def by_token(
        self, groups: Sequence[SampleGroup], forward: Callable[[CompletionBatch], Tensor]
    ) -> dict[int, Tensor]:
        """Index of a group -> values of `forward` for its tokens, [G, T], 0 outside the mask. Runs in micro-batches of
        one shard, so that numbers do not depend on the number of ranks.

        Args:
            forward: batch -> [B, T]
        """
        passes = [
            (samples, forward(batch)) for shard in self._shards for samples, batch in self.batches(groups, shard)
        ]  # all are launched before the first is waited for
        rows_of: dict[int, list[Tensor]] = {}
        for samples, rows in passes:
            for sample, row in zip(samples, rows.cpu().split([len(s.loss_mask) for s in samples]), strict=True):
                masked = fit_width(row, sample.completion_ids.shape[1]) * sample.loss_mask
                rows_of.setdefault(sample.index, []).append(masked)
        return {index: rows[0] if len(rows) == 1 else torch.cat(rows) for index, rows in rows_of.items()}

    def batches(
        self, groups: Sequence[SampleGroup], shard: int
    ) -> Iterator[tuple[Sequence[SampleGroup], CompletionBatch]]:
        """Splits a shard's groups into lists to compute together; yields each list with the batch on the device."""
        for samples in self._cut([group for group in groups if self.shard_of(group.index) == shard]):
            yield samples, self._pack(samples).to(self._device)

    def _cut(self, mine: Sequence[SampleGroup]) -> list[Sequence[SampleGroup]]:
        """Splits groups, or subsets of them, in order, into lists to compute together."""
        if self._max_tokens is None:
            return [mine[start : start + self._num_groups] for start in range(0, len(mine), self._num_groups)]
        subsets = [group.subset(rows) for group in mine for rows in split(group, self._max_tokens)]
        return list(filled_up(subsets, num_tokens_of, self._max_tokens))

    def _by_tokens(self, groups: Iterable[LearningGroup], limit: int) -> Iterator[MicroBatch]:
        """Packed micro-batches: balanced if all groups of the step have arrived, otherwise filled in order of
        arrival."""
        waiting: dict[int, list[LearningGroup]] = {shard: [] for shard in self._shards}
        for group in groups:
            shard, subsets = self.shard_of(group.index), [group.subset(rows) for rows in split(group.samples, limit)]
            waiting[shard] += subsets
            if not self._is_gathered:
                *full, waiting[shard] = filled_up(waiting[shard], self._num_computed, limit)
                for batch in full:
                    yield self._micro_batch(shard, batch)
        for shard, rest in waiting.items():
            if rest:
                for items in bins_within([self._num_computed(subset) for subset in rest], limit):
                    yield self._micro_batch(shard, [rest[item] for item in items])

    def _num_computed(self, group: LearningGroup) -> int:
        """Tokens that the models compute for a group; 0 for one that only counts towards the divisor."""
        is_computed = self._is_useful(group) or (self._has_critic and bool(group.samples.loss_mask.any()))
        return num_tokens_of(group.samples) if is_computed else 0

    def _is_useful(self, group: LearningGroup) -> bool:
        """Groups with zero advantages have no gradient for the policy, except from a penalty in the loss."""
        if not group.samples.loss_mask.any():
            return False
        return self.uses_all_groups or bool((group.advantages != 0).any())

    def _micro_batch(self, shard: int, groups: Sequence[LearningGroup]) -> MicroBatch:
        name, limit = self._algorithm.aggregation, self._max_completion_tokens
        masks = [group.samples.loss_mask for group in groups]
        not_empty = [group for group, mask in zip(groups, masks, strict=True) if mask.any()]
        useful = [group for group in not_empty if self._is_useful(group)]
        for_policy, for_critic = tokens_of(useful, self._device, self._pack), None
        if self._has_critic:
            is_same = len(useful) == len(not_empty)
            for_critic = for_policy if is_same else tokens_of(not_empty, self._device, self._pack)
        return MicroBatch(
            shard=shard,
            divisor=sum(_divisor(name, group, limit) for group in groups),
            num_tokens=sum(float(mask.sum()) for mask in masks),
            for_policy=for_policy,
            for_critic=for_critic,
        )


def _divisor(aggregation: str, group: LearningGroup, max_completion_tokens: int) -> float:
    """What a group adds to the divisor. The rows of an episode are one sequence, of which each is a share."""
    mask = group.samples.loss_mask
    divisor = aggregation_divisor(aggregation, mask, max_completion_tokens=max_completion_tokens)
    if group.shares is None or aggregation in ("token_mean", "token_sum"):
        return divisor
    has_tokens = (mask != 0).any(1)
    return divisor / max(1.0, float(has_tokens.sum())) * float(group.shares[has_tokens].double().sum())


def num_tokens_of(group: SampleGroup) -> int:
    """Number of tokens of the group in a packed row."""
    return num_computed_tokens(group)


def split(group: SampleGroup, limit: int) -> list[slice]:
    """Splits the group's rows, in order, into subsets of at most `limit` tokens, each including the prompt; a longer
    sequence is a subset of its own. A row whose shared tokens are in another subset computes them again."""
    if group.shared is None:
        prompt_length, lengths = len(group.prompt.token_ids), computed_parts(group)[1].tolist()

        def size(first: int, end: int) -> int:
            return prompt_length + sum(lengths[first:end])
    else:

        def size(first: int, end: int) -> int:
            return num_computed_tokens(group.subset(slice(first, end)))

    subsets, first = [], 0
    for row in range(1, len(group.loss_mask)):
        if size(first, row + 1) > limit:
            subsets.append(slice(first, row))
            first = row
    return [*subsets, slice(first, len(group.loss_mask))]


def filled_up(items: Iterable[T], size_of: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Splits the items, in order, into lists that end where the next item would exceed `limit`; no list is empty."""
    waiting: list[T] = []
    filled = 0
    for item in items:
        size = size_of(item)
        if waiting and filled + size > limit:
            yield waiting
            waiting, filled = [], 0
        waiting.append(item)
        filled += size
    if waiting:
        yield waiting


def bins_within(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Distributes items over as few balanced bins as `limit` allows, the fullest first; a larger item is alone."""
    alone = [[item] for item, size in enumerate(sizes) if size > limit]
    others = [item for item, size in enumerate(sizes) if size <= limit]
    num_bins = max(1, -(-sum(sizes[item] for item in others) // limit))
    while True:
        numbers = balanced([sizes[item] for item in others], num_bins)
        bins = [[item for item, n in zip(others, numbers, strict=True) if n == number] for number in range(num_bins)]
        if all(sum(sizes[item] for item in items) <= limit for items in bins):
            filled = [items for items in bins if items]
            return alone + sorted(filled, key=lambda items: -sum(sizes[item] for item in items))
        num_bins += 1
