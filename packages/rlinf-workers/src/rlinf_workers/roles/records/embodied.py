"""Items of embodied flows. Legend: n environments of a group, T chunks of a segment, K actions of a chunk, A dimensions
of an action, D numbers or tokens of an action with a log-probability each. Fields are what the policy reads of an
observation, [n, *shape of the field] each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rlinf_comm import record
from rlinf_envs import RowSnapshot

record(RowSnapshot)

MAX_TEXT_BYTES = 512
"""Width of a text field, so that the texts of all steps can be stacked; an instruction has a sentence or two."""


def text_tensor(texts: Sequence[str]) -> Tensor:
    """[n, MAX_TEXT_BYTES] uint8: each text in UTF-8, padded with zeros.

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
class ExpertAnswer:
    """What an expert would do in some environments of a group, m of n."""

    rows: Tensor
    """[m] int64"""
    actions: Tensor
    """[m, K, A], numbered as in `Action`"""
    acts: Tensor
    """[m] bool: to be executed in place of the policy's actions."""


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class GroupObservation:
    """The observation of one environment group after a chunk of actions or a reset. Sent by env to policy."""

    group: int
    """Key of all items of this group; its environments stay in one process."""
    time: int
    """Chunks executed since the segment began; 0 right after the reset."""
    fields: dict[str, Tensor]
    """[n, ...] each, the observation to act on next."""
    final_fields: dict[str, Tensor] | None
    """[n, ...] each: the true final observation of rows whose episode has just ended; other rows equal `fields`. None:
    no episode has ended."""
    rewards: Tensor
    """[n, K] float32, rewards of the previous chunk, 0 for actions that were not executed; zeros at time 0."""
    num_executed: Tensor
    """[n] int64, executed actions of the previous chunk, up to the end of an episode; zeros at time 0."""
    terminated: Tensor
    """[n] bool"""
    truncated: Tensor
    """[n] bool"""
    is_last: bool
    """The segment ends here: no actions are expected."""
    episodes: Tensor | None = None
    """[n] int64, the number in the step of the episode that a row acts in next, -1: none, it rests. The results are
    those of the episodes that the observation before this one named. None: rows have segments."""
    returns: Tensor | None = None
    """[n] float64, of the episodes that have just ended; None with segments."""
    expert: ExpertAnswer | None = None
    """The answers of an expert to `fields`; None: nobody asked one."""


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class Action:
    """The policy's response to a GroupObservation."""

    group: int
    time: int
    actions: Tensor
    """[n, K, A] float32, unclipped (the environment clips to its bounds); or int64, each discrete dimension counted
    from 0. Executed one after the other; if an episode ends inside the chunk, its environment ignores the rest."""


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class Trajectory:
    """One segment of one environment group, or one whole episode (n = 1); T chunks. Sent by policy to actor."""

    group: int
    """The environment group; of a whole episode its start, which it shares with those it is compared with."""
    fields: dict[str, Tensor]
    """[T, n, ...] each, as observed"""
    actions: Tensor
    """[T, n, K, A] float32, or int64 for discrete actions"""
    extras: dict[str, Tensor]
    """[T, n, ...] each, other outputs of the policy that training needs"""
    rollout_logprobs: Tensor
    """[T, n, K, D] float32, nats"""
    values: Tensor
    """[T, n] float32, or [T, n, K] for a policy with a value per action"""
    next_values: Tensor
    """[T, n] float32, value of the true successor (the final observation if an episode ended)."""
    rewards: Tensor
    """[T, n, K] float32, 0 for actions that were not executed"""
    num_executed: Tensor
    """[T, n] int64, executed actions of each chunk, up to the end of an episode"""
    terminated: Tensor
    """[T, n] bool"""
    truncated: Tensor
    """[T, n] bool"""
    policy_version: int
    """Version of the weights that chose all actions and estimated all values; counts optimizer steps from 0."""
    episode: int | None = None
    """Number of a whole episode in its step; None: a segment."""
    return_: float = 0.0
    """Of a whole episode, as the environment added it up."""


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class Transitions:
    """One segment of one environment group, T chunks, for an off-policy actor. Sent by policy to actor."""

    group: int
    fields: dict[str, Tensor]
    """[T, n, ...] each, what is learned from in the observation before a chunk (`SoftPolicy.observe`)"""
    next_fields: dict[str, Tensor]
    """[T, n, ...] each, the same after it; of the final observation if an episode ended"""
    actions: Tensor
    """[T, n, K, A] float32, learned actions"""
    rewards: Tensor
    """[T, n] float32, summed over the executed actions of a chunk"""
    terminated: Tensor
    """[T, n] bool: the task ended with the chunk. An episode that its time limit ended is False here."""
    policy_version: int
    """Version of the weights that acted; counts optimizer steps of the policy from 0."""


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class LabelledSegment:
    """The observations of one segment of one environment group that an expert answered, m of them in the order of time.
    Sent by policy to actor."""

    group: int
    fields: dict[str, Tensor]
    """[m, ...] each"""
    actions: Tensor
    """[m, K, A], the expert's, as in `Action`"""
    policy_version: int
    """Version of the weights that acted; counts optimizer steps from 0."""


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class GroupEpisodes:
    """The episodes of one group's environments after a training step. Sent by env to the driver."""

    group: int
    rows: tuple[RowSnapshot, ...] = ()
    """The state of each environment; replaying its actions restores it. Empty if the next segment begins with a
    reset."""
    episodes: dict[str, Tensor] = field(default_factory=dict)
    """The episodes of the segment (`rlinf_envs.pack_episodes`), `env_index` counted within the group, or the start of a
    whole episode; empty if none are kept."""


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class DemonstratedBatch:
    """One shard of a batch of demonstrated chunks, for an SFT warm-up. Fed by the driver. B rows."""

    step: int
    """Index of the optimizer step within the SFT warm-up."""
    shard: int
    fields: dict[str, Tensor]
    """[B, ...] each, the observation before the chunk"""
    actions: Tensor
    """[B, K, A] float32, or int64 for discrete actions"""
