"""Items of embodied flows. Legend: n environments of a group, T steps of a segment, D numbers of a state,
A dimensions of an action."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rlinf_comm.records import record


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """What one environment group shows after a step (or a reset). Sent by env to policy."""

    group: int
    """Key of all items of this group; its environments always sit in the same process."""
    time: int
    """Steps taken since the segment began; 0 right after the reset."""
    state: Tensor
    """[n, D] float32, what to act on next."""
    final_state: Tensor | None
    """[n, D] float32; where an episode has just ended its true last observation, elsewhere equal to `state`.
    None: no episode has ended."""
    rewards: Tensor
    """[n] float32, of the action before; zeros at time 0."""
    terminated: Tensor
    """[n] bool"""
    truncated: Tensor
    """[n] bool"""
    is_last: bool
    """The segment ends here: nobody waits for an action."""


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class Action:
    """What the policy answers to an Observation."""

    group: int
    time: int
    actions: Tensor
    """[n, A] float32, unclipped, the environment clips to its bounds; or int64, each discrete dimension from 0 on."""


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class Trajectory:
    """One segment of one environment group, T steps. Sent by policy to actor."""

    group: int
    states: Tensor
    """[T, n, D] float32, raw"""
    actions: Tensor
    """[T, n, A] float32, or int64 for discrete actions"""
    rollout_logprobs: Tensor
    """[T, n] float32, nats"""
    values: Tensor
    """[T, n] float32"""
    next_values: Tensor
    """[T, n] float32, value of the true successor (the final observation where an episode ended)."""
    rewards: Tensor
    """[T, n] float32"""
    terminated: Tensor
    """[T, n] bool"""
    truncated: Tensor
    """[T, n] bool"""
    policy_version: int
