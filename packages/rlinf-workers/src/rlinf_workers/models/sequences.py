"""Pads prompt groups into one batch for a training forward pass, with each prompt once for all its completions.

Legend: P prompts (one a group), G completions or rows of each, B of all, L prompt width, T completion width.

The completions of a group share their prompt, so its keys and values are computed once, the completions attend to them,
and the gradient flows back through them. The result equals that of whole sequences, with (L + G * T) instead of G * (L
+ T) positions per group. What rows share besides the prompt is computed for each; packed.py computes it once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlinf_workers.models.cache_argument import as_cache
from rlinf_workers.models.pictures import (
    has_rope_positions,
    padded_places,
    padded_positions,
    picture_places,
    rope_offset,
    rope_positions,
    seen,
)
from rlinf_workers.models.placement import to_device
from rlinf_workers.roles.records.language import SampleGroup
from rlinf_workers.roles.records.pictures import Pictures


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceBatch:
    """Several groups: prompts padded on the left, completions on the right.

    Example: one group, G = 2, prompt [7, 8], completions [5, 2] and [5, 9, 2]:
        prompt_ids = [[7, 8]], completion_ids = [[5, 2, 0], [5, 9, 2]], loss_mask = [[1, 1, 0], [1, 1, 1]]
    """

    prompt_ids: Tensor
    """[P, L] int64"""
    prompt_mask: Tensor
    """[P, L] int64, 0 on padding."""
    completion_ids: Tensor
    """[B, T] int64; the completions of the first prompt, then those of the second, ..."""
    loss_mask: Tensor
    """[B, T] float32"""
    group_sizes: tuple[int, ...] = ()
    """[P], completions of each prompt; empty: all have equally many."""
    pictures: tuple[Pictures | None, ...] = ()
    """[P], those of each prompt; empty: all are text alone."""
    row_pictures: tuple[Pictures | None, ...] = ()
    """[B], those of each completion; empty: all are text alone."""
    prompt_positions: Tensor | None = None
    """[3, P, L] int64, where some pictures are at positions in time, rows and columns."""
    row_positions: Tensor | None = None
    """[3, B, T] int64, likewise."""

    @property
    def repeats(self) -> int | Tensor:
        """How often `repeat_interleave` has to repeat each prompt: G, or [P] int64 if the groups differ in size."""
        if len(set(self.group_sizes)) < 2:
            return len(self.completion_ids) // len(self.prompt_ids)
        return torch.tensor(self.group_sizes, device=self.prompt_ids.device)

    def to(self, device: torch.device) -> SequenceBatch:
        names = ["prompt_ids", "prompt_mask", "completion_ids", "loss_mask"]
        names += [] if self.prompt_positions is None else ["prompt_positions", "row_positions"]
        return replace(self, **{name: to_device(getattr(self, name), device) for name in names})


PAD_ID = 0
"""Fills masked places; any token would do."""


def pack_groups(groups: Sequence[SampleGroup]) -> SequenceBatch:
    """Pads to the longest prompt and the longest completion among the groups.

    Raises: ValueError for groups that say what sampling left, which padded batches do not carry.
    """
    if any(group.kept_tokens is not None for group in groups):
        raise ValueError("tokens were not drawn from all (top_p, top_k, min_p); set actor.max_tokens_per_micro_batch")
    prompt_width = max(len(group.prompt.token_ids) for group in groups)
    completion_width = max(1, *(int(group.extents.max()) for group in groups))
    prompt_ids, prompt_mask = pad_left([group.prompt.token_ids for group in groups], prompt_width, PAD_ID)
    pictures = tuple(group.prompt.pictures for group in groups)
    rows = [(group, row) for group in groups for row in range(len(group.completion_ids))]
    row_pictures: tuple[Pictures | None, ...] = ()
    if any(group.placed_pictures for group in groups):
        extents = torch.cat([group.extents for group in groups]).tolist()
        row_pictures = tuple(
            group.pictures_of_row(row, end=extent) for (group, row), extent in zip(rows, extents, strict=True)
        )
    prompt_positions = row_positions = None
    if has_rope_positions([*pictures, *row_pictures]):
        prompt_positions = padded_positions(pictures, prompt_mask)
        if prompt_positions.dim() == 2:
            prompt_positions = prompt_positions.expand(3, -1, -1)
        starts = [len(group.prompt.token_ids) + rope_offset(group.prompt.pictures) for group, _ in rows]
        own = [rope_positions(one, completion_width) for one in row_pictures or (None,) * len(rows)]
        row_positions = torch.stack([start + one for start, one in zip(starts, own, strict=True)], 1)
    return SequenceBatch(
        prompt_ids=prompt_ids,
        prompt_mask=prompt_mask,
        completion_ids=torch.cat([fit_width(group.computed_ids, completion_width, PAD_ID) for group in groups]),
        loss_mask=torch.cat([fit_width(group.loss_mask, completion_width, 0.0) for group in groups]),
        group_sizes=tuple(len(group.completion_ids) for group in groups),
        pictures=pictures,
        row_pictures=row_pictures,
        prompt_positions=prompt_positions,
        row_positions=row_positions,
    )


def pad_left(rows: Sequence[Tensor], width: int, pad_id: int) -> tuple[Tensor, Tensor]:
    """Token ids [len(rows), width] with padding before each row, and their mask, int64, 0 on padding."""
    token_ids = [pad(row, (width - len(row), 0), value=pad_id) for row in rows]
    mask = [pad(torch.ones_like(row), (width - len(row), 0)) for row in rows]
    return torch.stack(token_ids), torch.stack(mask)


def completion_logits(model: Any, batch: SequenceBatch) -> Tensor:
    """The head's outputs before each completion token, [B, T, V]; a critic's head has V = 1."""
    return _before_completions(lambda **arguments: model(**arguments).logits, model, batch)


def completion_states(model: Any, batch: SequenceBatch) -> Tensor:
    """The head's inputs before each completion token, [B, T, H]."""

    def states(logits_to_keep: int = 0, **arguments: Any) -> Tensor:
        return model.base_model(**arguments).last_hidden_state[:, -logits_to_keep:]

    return _before_completions(states, model, batch)


def _before_completions(outputs: Callable[..., Tensor], model: Any, batch: SequenceBatch) -> Tensor:
    """The model's outputs before each completion token.

    Args:
        outputs: calls the model with the arguments of a transformers model.
    """
    from transformers import DynamicCache

    repeats, (width, num_tokens) = batch.repeats, (batch.prompt_ids.shape[1], batch.completion_ids.shape[1])
    # Without left padding no mask beyond causality is needed, and attention takes its fast path.
    mask = None if bool(batch.prompt_mask.all()) else batch.prompt_mask
    cache: Any = DynamicCache(config=model.config)  # it repeats by a tensor too
    places = _positions(mask, width)
    if batch.prompt_positions is not None:
        places["position_ids"] = batch.prompt_positions
    with seen(model, batch.pictures, padded_places(batch.pictures, batch.prompt_mask)) as pictures:
        prompts = outputs(
            input_ids=batch.prompt_ids, **as_cache(cache), logits_to_keep=1, use_cache=True, **places, **pictures
        )
    all_outputs = prompts.repeat_interleave(repeats, 0)
    if num_tokens > 1:
        cache.batch_repeat_interleave(repeats)
        if mask is not None:
            mask = torch.cat([mask.repeat_interleave(repeats, 0), torch.ones_like(batch.completion_ids[:, 1:])], 1)
        places = _positions(mask, num_tokens - 1)
        if batch.row_positions is not None:
            places["position_ids"] = batch.row_positions[:, :, :-1]
        is_picture = [picture_places(one, num_tokens - 1) for one in batch.row_pictures]
        with seen(model, batch.row_pictures, torch.stack(is_picture) if is_picture else None) as pictures:
            completions = outputs(
                input_ids=batch.completion_ids[:, :-1], **as_cache(cache), use_cache=True, **places, **pictures
            )
        all_outputs = torch.cat([all_outputs, completions], 1)
    return all_outputs


def num_calls(batch: SequenceBatch) -> int:
    """How often `completion_logits` calls the model."""
    return 1 + (batch.completion_ids.shape[1] > 1)


def _positions(mask: Tensor | None, num_queries: int) -> dict[str, Tensor]:
    """Arguments for a batch with left padding: the mask over all keys, and the positions of the last ones."""
    if mask is None:
        return {}
    return {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp_(min=0)[:, -num_queries:]}


def fit_width(rows: Tensor, width: int, value: float = 0.0) -> Tensor:
    """Truncates or pads the last dimension to `width`."""
    return pad(rows[:, :width], (0, max(0, width - rows.shape[1])), value=value)
