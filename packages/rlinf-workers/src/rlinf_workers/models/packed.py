"""Packs groups into one row of tokens without padding, with each prompt once for all its completions.

    [prompt | completion 1 | completion 2 | ...] of the first group, [prompt | ...] of the next, ...

Layers and head compute only these tokens; attention keeps sequences apart (packed_attention.py). The last token of a
completion is left out, because no output after it is needed. The tokens that a row of an episode shares with an earlier
one are there once, in the earlier row, and the gradient of all rows flows back through them. Outputs are scattered to
[B, T] with zeros in between, so a loss does not depend on how its batch was computed.

Several ranks can compute one row together (sequence_parallel.py): `own_part` has the tokens of one of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlinf_workers.collectives import RankGroup
from rlinf_workers.models.packed_attention import PackedAttention, attention_of, attention_of_sequences, packed
from rlinf_workers.models.pictures import has_rope_positions, picture_places, rope_offset, rope_positions, seen
from rlinf_workers.models.placement import to_device
from rlinf_workers.models.sequence_parallel import ExchangedAttention, RowShare, ranks_of_rows
from rlinf_workers.models.sequences import PAD_ID, fit_width
from rlinf_workers.roles.records.language import Example, SampleGroup
from rlinf_workers.roles.records.pictures import Pictures

Batch = TypeVar("Batch")


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptIds:
    """The tokens that top_p, top_k and min_p left for each of M tokens."""

    ids: Tensor
    """[S] int32, those of the first token, then those of the second, and so on."""
    counts: Tensor
    """[M] int32"""

    def of(self, is_chosen: Tensor) -> KeptIds:
        """Those of some tokens, [M] bool."""
        chosen = is_chosen.repeat_interleave(self.counts.long())
        return KeptIds(ids=self.ids[chosen], counts=self.counts[is_chosen])

    def to(self, device: torch.device) -> KeptIds:
        return KeptIds(ids=to_device(self.ids, device), counts=to_device(self.counts, device))


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedBatch:
    """N tokens of groups; B completions or rows of at most T tokens, of which M in all have a loss.

    Example: prompt [7, 8] with completions [5, 9] and [4, 2, 3]:
        token_ids = [7, 8, 5, 4, 2], position_ids = [0, 1, 2, 2, 3], answers_at = [1, 2, 1, 3, 4]
    """

    token_ids: Tensor
    """[N] int64"""
    position_ids: Tensor
    """[N] int64, from 0 in each sequence; [3, N] where pictures are at positions in time, rows and columns."""
    attention: PackedAttention | ExchangedAttention
    answers_at: Tensor
    """[M] int64, the row position whose state predicts each token with a loss."""
    ids: Tensor
    """[M] int64, the tokens with a loss."""
    completion_ids: Tensor
    """[B, T] int64"""
    loss_mask: Tensor
    """[B, T] float32, 1 on the M tokens."""
    experts: Tensor | None = None
    """[N, layers, k] uint8 or int16, the experts that the engine chose (router_replay.py); None: they are not known."""
    kept_tokens: KeptIds | None = None
    """What sampling left for the M tokens with a loss; None: all tokens."""
    pictures: tuple[Pictures | None, ...] = ()
    """Those of the segments of the row, in their order; empty: all are text alone."""
    picture_places: Tensor | None = None
    """[N] bool, where there are pictures: their tokens."""
    picture_parts: tuple[slice, ...] = ()
    """Of each picture, those of its tokens that this rank has; empty: all of them."""
    share: RowShare | None = None
    """Where several ranks compute the row together; N and M then count this rank's tokens. None: the whole row."""

    def spread(self, values: Tensor) -> Tensor:
        """[M] -> [B, T], 0 outside the mask; with the values of all ranks."""
        zeros = values.new_zeros(self.loss_mask.shape)
        spread = zeros.masked_scatter(self.loss_mask != 0, values)
        return spread if self.share is None else self.share.joined(spread)

    def to(self, device: torch.device) -> PackedBatch:
        names = ["token_ids", "position_ids", "attention", "answers_at", "ids", "completion_ids", "loss_mask"]
        names += [name for name in ("experts", "kept_tokens", "picture_places") if getattr(self, name) is not None]
        values = {name: getattr(self, name) for name in names}
        return replace(
            self,
            **{
                key: to_device(one, device) if isinstance(one, Tensor) else one.to(device)
                for key, one in values.items()
            },
        )


def own_part(batch: Batch) -> Batch:
    """What this rank computes of a row that ranks share (`shared_rows`); the whole batch if they share none.

    Raises: ValueError for padded completions, which cannot be shared.
    """
    if (ranks := ranks_of_rows()) is None:
        return batch
    if not isinstance(batch, PackedBatch):
        raise ValueError("ranks share packed rows alone; set actor.max_tokens_per_micro_batch")
    return part_of_rank(batch, ranks)


def part_of_rank(batch: PackedBatch, ranks: RankGroup, multiple: int = 1) -> PackedBatch:
    """What this one of the ranks computes of a whole row.

    Args:
        multiple: each rank's number of tokens, padding included, is a multiple of it.
    """
    assert isinstance(batch.attention, PackedAttention), "a row is shared once"
    share = RowShare(ranks, len(batch.token_ids), multiple)
    places = batch.answers_at - share.first
    is_own = (places >= 0) & (places < share.num_own)
    own = is_own.nonzero()[:, 0]  # waits for the device, once
    loss_mask = torch.zeros_like(batch.loss_mask)
    return replace(
        batch,
        token_ids=share.own(batch.token_ids),
        position_ids=share.own(batch.position_ids.T).T,
        attention=share.attention(batch.attention),
        answers_at=places[own],
        ids=batch.ids[own],
        loss_mask=loss_mask.masked_scatter(batch.loss_mask != 0, is_own.to(loss_mask.dtype)),
        experts=None if batch.experts is None else share.own(batch.experts),
        kept_tokens=None if batch.kept_tokens is None else batch.kept_tokens.of(is_own),
        share=share,
        **_own_pictures(batch, share),
    )


def _own_pictures(batch: PackedBatch, share: RowShare) -> dict[str, Any]:
    """The fields about pictures of a rank's part: those of which it has tokens. Their tower computes them whole, and on
    each rank that has some; the model uses the features of the rank's tokens alone."""
    if batch.picture_places is None:
        return {}
    there, parts, places = [], [], batch.picture_places.nonzero()[:, 0]
    for picture in (one for pictures in batch.pictures if pictures is not None for one in pictures.pictures):
        own, places = places[: picture.num_tokens] - share.first, places[picture.num_tokens :]
        if own.any() and own[-1] >= 0 and own[0] < share.num_own:
            there.append(picture)
            parts.append(slice(int((own < 0).sum()), int((own < share.num_own).sum())))
    return {
        "pictures": (Pictures(pictures=tuple(there), begins=(0,) * len(there)),) if there else (),
        "picture_places": share.own(batch.picture_places),
        "picture_parts": tuple(parts),
    }


def computed_parts(group: SampleGroup) -> tuple[Tensor, Tensor]:
    """[R] int64 each: the first token of each row that is computed for it, and the number of tokens from there on. The
    last one with a loss is left out, unless a later row shares it."""
    ends = (group.extents - 1).clamp(min=0)
    if group.shared is None or group.shared_with is None:
        return torch.zeros_like(ends), ends
    is_read = group.extents > 0
    for row in reversed(range(len(ends))):  # a row shares with an earlier one
        other = int(group.shared_with[row])
        if other >= 0 and is_read[row]:
            ends[other], is_read[other] = max(int(ends[other]), int(group.shared[row])), True
    return group.shared, (ends - group.shared).clamp(min=0)


def num_computed_tokens(group: SampleGroup) -> int:
    """Tokens of a packed group: those of its prompt, and those that are computed for its rows."""
    return len(group.prompt.token_ids) + int(computed_parts(group)[1].sum())


def computed_tokens(groups: Iterable[SampleGroup]) -> tuple[int, int]:
    """Tokens of packed groups, and the sum over them of the tokens that each attends to, itself included."""
    tokens = attended = 0
    for group in groups:
        begins, lengths = computed_parts(group)
        prompt = len(group.prompt.token_ids)
        of_rows = lengths * (prompt + begins) + lengths * (lengths + 1) // 2
        tokens += prompt + int(lengths.sum())
        attended += prompt * (prompt + 1) // 2 + int(of_rows.sum())
    return tokens, attended


def pack_without_padding(groups: Sequence[SampleGroup]) -> PackedBatch:
    """Packs groups one after the other. They may differ in size; a completion without tokens takes no space."""
    width = max(1, *(int(group.extents.max()) for group in groups))
    loss_mask = torch.cat([fit_width(group.loss_mask, width) for group in groups])
    completion_ids = torch.cat([fit_width(group.completion_ids, width, PAD_ID) for group in groups])
    parts = [computed_parts(group) for group in groups]
    begins, lengths = (torch.cat(column) for column in zip(*parts, strict=True))  # [B] each
    prompt_lengths = torch.tensor([len(group.prompt.token_ids) for group in groups])
    sizes = torch.tensor([len(group.completion_ids) for group in groups])
    prompts = torch.arange(len(groups)).repeat_interleave(sizes)  # [B]

    # Segments of the row: each prompt, followed by its completions.
    is_completion = torch.ones(len(groups) + len(lengths), dtype=torch.bool)
    is_completion[(sizes + 1).cumsum(0) - (sizes + 1)] = False
    of_segment = torch.empty(len(is_completion), dtype=torch.int64)
    of_segment[~is_completion], of_segment[is_completion] = prompt_lengths, lengths
    start = of_segment.cumsum(0) - of_segment
    first_position = torch.zeros_like(start)
    first_position[is_completion] = prompt_lengths[prompts] + begins
    positions = torch.arange(int(of_segment.sum())) + (first_position - start).repeat_interleave(of_segment)
    pictures: tuple[Pictures | None, ...] = ()
    places_of_pictures = None
    if any(group.has_pictures for group in groups):
        segments = [one for group in groups for one in _segments_with_pictures(group)]
        pictures = tuple(one.pictures for one in segments)
        places_of_pictures = torch.cat([one.places for one in segments])
        if has_rope_positions(pictures):
            positions = torch.cat([one.positions for one in segments], 1)

    prompt_starts, starts = start[~is_completion], start[is_completion]
    tokens, experts, numbers = [], [], torch.arange(width)
    is_computed = (numbers >= begins[:, None]) & (numbers < (begins + lengths)[:, None])
    for group, ids, computed in zip(
        groups, completion_ids.split(sizes.tolist()), is_computed.split(sizes.tolist()), strict=True
    ):
        tokens += [group.prompt.token_ids, ids[computed]]
        if group.prompt_experts is not None and group.experts is not None:
            num_recorded = min(width, group.experts.shape[1])
            experts += [group.prompt_experts, group.experts[:, :num_recorded][computed[:, :num_recorded]]]
    places = _places(groups, starts, begins, width)
    before = torch.cat([(prompt_starts + prompt_lengths - 1)[prompts, None], places[:, :-1]], 1)
    shared = {row: places[row, :begin] for row, begin in enumerate(begins.tolist()) if begin}
    return PackedBatch(
        token_ids=torch.cat(tokens),
        position_ids=positions,
        attention=attention_of(prompt_lengths, prompt_starts, lengths, starts, prompts, shared),
        answers_at=before[loss_mask != 0],
        ids=completion_ids[loss_mask != 0],
        completion_ids=completion_ids,
        loss_mask=loss_mask,
        experts=torch.cat(experts) if len(experts) == len(tokens) else None,
        kept_tokens=_kept_of(groups),
        pictures=pictures,
        picture_places=places_of_pictures,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Segment:
    """A prompt, or what is computed for a row: n tokens."""

    pictures: Pictures | None
    positions: Tensor
    """[3, n]"""
    places: Tensor
    """[n] bool"""


def _segments_with_pictures(group: SampleGroup) -> Iterator[_Segment]:
    """The prompt of a group and its rows, as `pack_without_padding` orders them."""
    pictures, length = group.prompt.pictures, len(group.prompt.token_ids)
    yield _Segment(
        pictures=pictures, positions=rope_positions(pictures, length), places=picture_places(pictures, length)
    )
    after = length + rope_offset(pictures)
    for row, (begin, count) in enumerate(torch.stack(computed_parts(group), 1).tolist()):
        end = begin + count
        before_end = group.pictures_of_row(row, end=end)
        yield _Segment(
            pictures=group.pictures_of_row(row, begin, end),
            positions=after + rope_positions(before_end, end)[:, begin:],
            places=picture_places(before_end, end)[begin:],
        )


def _kept_of(groups: Sequence[SampleGroup]) -> KeptIds | None:
    """Raises: ValueError if some groups say what sampling left, and others do not."""
    kept_tokens = [group.kept_tokens for group in groups if group.kept_tokens is not None]
    if not kept_tokens:
        return None
    if len(kept_tokens) != len(groups):
        raise ValueError("only some groups say which tokens sampling left, and their log-probabilities differ in kind")
    parts = []
    for group, one in zip(groups, kept_tokens, strict=True):
        is_sampled = one.counts > 0
        has_loss = fit_width(group.loss_mask, one.counts.shape[1]) != 0  # less where an overlong filter masked rows
        parts.append(KeptIds(ids=one.ids, counts=one.counts[is_sampled]).of(has_loss[is_sampled]))
    return KeptIds(ids=torch.cat([part.ids for part in parts]), counts=torch.cat([part.counts for part in parts]))


def _places(groups: Sequence[SampleGroup], starts: Tensor, begins: Tensor, width: int) -> Tensor:
    """[B, width], where each token of each row is in the packed row; arbitrary for those that are not computed."""
    places = (starts - begins)[:, None] + torch.arange(width)
    first = 0
    for group in groups:
        size = len(group.loss_mask)
        for row, begin in enumerate(begins[first : first + size].tolist()):
            if begin:
                assert group.shared_with is not None, "a row that begins later shares the tokens before"
                places[first + row, :begin] = places[first + int(group.shared_with[row]), :begin]
        first += size
    return places


def pack_examples(examples: Sequence[Example]) -> PackedBatch:
    """The examples one after the other, without the last token of each. Row b of the completions has the tokens of
    example b that have a loss, without those between them."""
    lengths = torch.tensor([len(example.token_ids) - 1 for example in examples])
    starts = lengths.cumsum(0) - lengths
    learned = [example.loss_mask[1:] != 0 for example in examples]
    ids = [example.token_ids[1:][mask] for example, mask in zip(examples, learned, strict=True)]
    position_ids = torch.arange(int(lengths.sum())) - starts.repeat_interleave(lengths)
    pictures: tuple[Pictures | None, ...] = ()
    places_of_pictures = None
    if any(example.pictures for example in examples):
        pictures = tuple(example.pictures for example in examples)
        pairs = list(zip(pictures, lengths.tolist(), strict=True))
        places_of_pictures = torch.cat([picture_places(one, length) for one, length in pairs])
        if has_rope_positions(pictures):
            position_ids = torch.cat([rope_positions(one, length) for one, length in pairs], 1)
    return PackedBatch(
        token_ids=torch.cat([example.token_ids[:-1] for example in examples]),
        position_ids=position_ids,
        attention=attention_of_sequences(lengths, starts),
        answers_at=torch.cat(learned).nonzero()[:, 0],
        ids=torch.cat(ids),
        completion_ids=pad_sequence(ids, batch_first=True),
        loss_mask=pad_sequence([torch.ones(int(mask.sum())) for mask in learned], batch_first=True),
        pictures=pictures,
        picture_places=places_of_pictures,
    )


def packed_logits(model: Any, batch: PackedBatch) -> Tensor:
    """The head's outputs before each completion token, [M, V]."""
    return _call(model, model, batch, logits_to_keep=batch.answers_at).logits[0]


def packed_states(model: Any, batch: PackedBatch) -> Tensor:
    """The head's inputs before each completion token, [M, H]."""
    return _call(model, model.base_model, batch).last_hidden_state[0, batch.answers_at]


def _call(model: Any, called: Any, batch: PackedBatch, **arguments: Any) -> Any:
    attention, positions = batch.attention, batch.position_ids
    num_layers = model.config.get_text_config().num_hidden_layers
    with packed(model), seen(model, batch.pictures, batch.picture_places, batch.picture_parts) as pictures:
        attention.num_calls = 0
        outputs = called(
            input_ids=batch.token_ids[None],
            position_ids=positions[None] if positions.dim() == 1 else positions[:, None],
            use_cache=False,
            attend=attention,
            **pictures,
            **arguments,
        )
    if attention.num_calls != num_layers:
        raise RuntimeError(
            f"{type(model).__name__}: {attention.num_calls} of {num_layers} layers kept the packed sequences apart; "
            "leave max_tokens_per_micro_batch out"
        )
    return outputs
