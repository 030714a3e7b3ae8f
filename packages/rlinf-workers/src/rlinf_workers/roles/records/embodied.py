"""Items of embodied flows. Legend: n environments of a group, T chunks of a segment, K actions of a chunk, A dimensions
of an action, D numbers or tokens of an action with a log-probability each. Fields are what the policy reads of an
observation, [n, *shape of the field] each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlinf_comm import record
from rlinf_envs import RowSnapshot

record(RowSnapshot)

MAX_TEXT_BYTES = 512
"""Width of a text field, so that the texts of all steps stack; an instruction has a sentence or two."""


def text_tensor(texts: Sequence[str]) -> Tensor:
    """[n, MAX_TEXT_BYTES] uint8: each text in UTF-8, filled up with zeros.

    Raises: ValueError for one that is too long.
    """
    rows = torch.zeros(len(texts), MAX_TEXT_BYTES, dtype=torch.uint8)
    for row, text in zip(rows, texts, strict=True):
        encoded = text.encode()
        if len(encoded) > MAX_TEXT_BYTES:
            raise ValueError(f"a text of {len(encoded)} bytes is longer than {MAX_TEXT_BYTES}: {text[:60]!r}...")
        row[: len(encoded)] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8) if encoded else 0
    return rows


def texts_of(rows: Tensor) -> list[str]:
    """The inverse of `text_tensor`."""
    return [row.numpy().tobytes().rstrip(b"\0").decode() for row in rows.cpu()]


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class GroupObservation:
    """What one environment group shows after a chunk of actions (or a reset). Sent by env to policy."""

    group: int
    """Key of all items of this group; its environments always sit in the same process."""
    time: int
    """Chunks executed since the segment began; 0 right after the reset."""
    fields: dict[str, Tensor]
    """[n, ...] each, what to act on next."""
    final_fields: dict[str, Tensor] | None
    """[n, ...] each; where an episode has just ended its true last observation, elsewhere equal to `fields`. None: no
    episode has ended."""
    rewards: Tensor
    """[n, K] float32, of the actions of the chunk before, 0 for those that were not executed; zeros at time 0."""
    num_executed: Tensor
    """[n] int64, actions of the chunk before up to the end of an episode; zeros at time 0."""
    terminated: Tensor
    """[n] bool"""
    truncated: Tensor
    """[n] bool"""
    is_last: bool
    """The segment ends here: nobody waits for actions."""


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class Action:
    """What the policy answers to a GroupObservation."""

    group: int
    time: int
    actions: Tensor
    """[n, K, A] float32, unclipped, the environment clips to its bounds; or int64, each discrete dimension from 0 on.
    Executed one after the other; where an episode ends inside the chunk, its environment ignores the rest."""


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class Trajectory:
    """One segment of one environment group, T chunks. Sent by policy to actor."""

    group: int
    fields: dict[str, Tensor]
    """[T, n, ...] each, as the environment shows them"""
    actions: Tensor
    """[T, n, K, A] float32, or int64 for discrete actions"""
    extras: dict[str, Tensor]
    """[T, n, ...] each, what the policy keeps of its answers beside the actions"""
    rollout_logprobs: Tensor
    """[T, n, K, D] float32, nats"""
    values: Tensor
    """[T, n] float32, or [T, n, K] for a policy with a value of each action"""
    next_values: Tensor
    """[T, n] float32, value of the true successor (the final observation where an episode ended)."""
    rewards: Tensor
    """[T, n, K] float32, 0 for actions that were not executed"""
    num_executed: Tensor
    """[T, n] int64, actions of each chunk up to the end of an episode"""
    terminated: Tensor
    """[T, n] bool"""
    truncated: Tensor
    """[T, n] bool"""
    policy_version: int


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class GroupEpisodes:
    """Where the environments of one group stand between two training steps. Sent by env to the driver."""

    group: int
    rows: tuple[RowSnapshot, ...]
    """Of each environment; replaying its actions leads there."""


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class DemonstratedBatch:
    """One shard of a batch of demonstrated chunks, for an SFT warm-up. Fed by the driver. B rows."""

    step: int
    """Counts the optimizer steps of the SFT warm-up."""
    shard: int
    fields: dict[str, Tensor]
    """[B, ...] each, what was shown before the chunk"""
    actions: Tensor
    """[B, K, A] float32, or int64 for discrete actions"""
