"""The protocol of batched environments and its records.

A batched environment has N independent rows. `reset` begins the first episode of every row; `step` moves every row by
one action and begins the next episode of rows whose episode ended (auto-reset), so the caller can act on every
observation it gets. Rows do not depend on each other: the same seeds and actions give the same numbers in one process
and in many.

Letters in shapes: N rows, C actions in a chunk, A action numbers, D state numbers, H x W pixels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeGuard, runtime_checkable

import numpy as np
import torch
from torch import Tensor

Observation = dict[str, Tensor | list[str]]
"""One entry per observation field:
"state" [N, D] float32; "image.<camera>" [N, H, W, C] uint8; "instruction" a list of N strings. Treat as read-only."""


PICTURE = "image."
"""Prefix of the names of image fields, followed by the camera's name."""


def tensor_field(observation: Observation, name: str) -> Tensor:
    """Returns the tensor field `name` of an observation; KeyError that lists the fields, TypeError for a text field."""
    if name not in observation:
        raise KeyError(f"observation has no field {name!r}; it has {', '.join(sorted(observation))}")
    value = observation[name]
    if not isinstance(value, Tensor):
        raise TypeError(f"observation field {name!r} is text, not a tensor")
    return value


def observation_problem(observation: Observation, spec: Mapping[str, FieldSpec], num_envs: int) -> str | None:
    """Describes how an observation deviates from `spec`; None: it does not."""
    if set(observation) != set(spec):
        return f" has fields {sorted(observation)}; the spec says {sorted(spec)}"
    for name, field in spec.items():
        value = observation[name]
        if field.dtype == "text":
            if not (isinstance(value, list) and len(value) == num_envs and all(isinstance(t, str) for t in value)):
                return f"[{name!r}] must be a list of {num_envs} strings"
            continue
        if not isinstance(value, Tensor):
            return f"[{name!r}] is a {type(value).__name__}, not a tensor"
        shape, dtype = (num_envs, *field.shape), getattr(torch, field.dtype)
        if value.shape != shape or value.dtype != dtype:
            return f"[{name!r}] is {list(value.shape)} {value.dtype}; the spec says {list(shape)} {dtype}"
        if not bool(value.isfinite().all()):
            return f"[{name!r}] holds a number that is not finite"
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldSpec:
    """One field of an observation, without the row dimension.

    Example: the state of PushCube is FieldSpec(shape=(35,), dtype="float32").
    """

    shape: tuple[int, ...]
    """Shape of one row; () for "text"."""
    dtype: Literal["float32", "uint8", "text"]
    texts: tuple[str, ...] = ()
    """All possible values of a "text" field; () if unknown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ActionSpec:
    """The action of one row.

    Example: ActionSpec(kind="discrete", shape=(), low=tensor(0), high=tensor(1)) is a choice between 0 and 1.
    """

    kind: Literal["continuous", "discrete"]
    """continuous: float32, clipped to low..high by the environment; discrete: int64, out of range is an error."""
    shape: tuple[int, ...]
    """Shape of one row's action: (A,) for continuous, () or (A,) for discrete."""
    low: Tensor
    """[*shape] smallest allowed value, inclusive; float32 (may be -inf) or int64."""
    high: Tensor
    """[*shape] largest allowed value, inclusive."""

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.kind == "continuous" else torch.int64

    def checked(self, actions: Tensor | np.ndarray, num_envs: int, *, chunk: bool = False) -> np.ndarray:
        """Returns `actions` [N, *shape] (with `chunk` [N, C, *shape]) as a valid array, continuous ones clipped.

        Raises ValueError naming the row for a wrong shape, a number that is not finite, or a choice out of range.
        """
        array = actions.detach().cpu().numpy() if isinstance(actions, Tensor) else np.asarray(actions)
        lead = 2 if chunk else 1
        shape_wanted = f"[{num_envs}{', C' if chunk else ''}{''.join(f', {n}' for n in self.shape)}]"
        if (
            array.ndim < lead
            or array.shape[0] != num_envs
            or array.shape[lead:] != self.shape
            or 0 in array.shape[:lead]
        ):
            raise ValueError(f"actions have shape {list(array.shape)}; this environment takes {shape_wanted}")
        low, high = self.low.numpy(), self.high.numpy()
        if self.kind == "continuous":
            array = array.astype(np.float32)
            self._raise_at_first(~np.isfinite(array), array, "is not finite")
            return np.clip(array, low, high)
        if not np.issubdtype(array.dtype, np.integer):
            raise ValueError(f"actions are {array.dtype}; a discrete action is an integer (torch.int64)")
        array = array.astype(np.int64)
        self._raise_at_first((array < low) | (array > high), array, f"is not in {low.tolist()}..{high.tolist()}")
        return array

    @staticmethod
    def _raise_at_first(bad: np.ndarray, array: np.ndarray, reason: str) -> None:
        if bad.any():
            where = tuple(int(i) for i in np.argwhere(bad)[0])
            raise ValueError(f"actions{list(where)}={array[where]} {reason} (the first index is the environment)")


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeEnd:
    """One finished episode."""

    env_index: int
    """Row, 0..N-1."""
    episode_index: int
    """Number of episodes that this row finished before it since the last `reset`."""
    seed: int
    """The episode's seed: episode_seed(seed of the row's reset, episode_index)."""
    return_: float
    """Sum of the episode's rewards, undiscounted, accumulated in float64."""
    length: int
    """Number of actions of the episode."""
    success_once: bool | None
    """Whether the task counted as solved after any step; None if the environment does not define success."""
    success_at_end: bool | None
    """Whether it counted as solved after the last step; None as above."""
    task: str | None = None
    """The task, if the environment has several."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """Result of `step` or `step_chunk`.

    Example: N = 2, the episode of row 1 ran into its time limit:
        terminated = [False, False], truncated = [False, True]; observation row 1 is the first of its next episode,
        final_observation row 1 the last of the finished one, final_observation row 0 equals observation row 0.
    """

    observation: Observation
    """The observation to act on next."""
    rewards: Tensor
    """[N] float32 from `step`, [N, C] from `step_chunk` (0.0 for actions that were not executed)."""
    terminated: Tensor
    """[N] bool: the task itself ended the episode (solved or failed); there is no value beyond it."""
    truncated: Tensor
    """[N] bool: only the time limit ended it; never together with terminated."""
    final_observation: Observation
    """Same shapes as `observation`: the true last observation where an episode ended, else the same row again."""
    num_steps: Tensor
    """[N] int64: actions executed; 1 from `step`, 1..C from `step_chunk`."""
    episodes: tuple[EpisodeEnd, ...]
    """The episodes that ended, by env_index."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowSnapshot:
    """State of one row: its current episode and the actions so far, which suffice to restore it (see `Replayable`)."""

    seed: int
    """The seed of the row's last `reset`."""
    episode_index: int
    """The current episode, from 0."""
    actions: Tensor
    """[t, *action shape] float32 or int64: the actions of the current episode so far, as executed (clipped)."""
    rewards: Tensor | None = None
    """[t] float32: the rewards of these actions, which `restore` does not need; None: they were not kept."""
    follows: Literal["next", "rest"] = "next"
    """Whether the next episode follows the current one, or the row rests after it, because `SupportsBegin.begin` began
    it."""
    rests: bool = False
    """Whether the row has no episode; the other fields then mean nothing."""


@runtime_checkable
class BatchedEnv(Protocol):
    """N environments that are stepped together. `rlinf_envs.testing.check_env` checks an implementation."""

    @property
    def num_envs(self) -> int: ...

    @property
    def action_spec(self) -> ActionSpec: ...

    @property
    def observation_spec(self) -> Mapping[str, FieldSpec]: ...

    @property
    def max_episode_steps(self) -> int | None:
        """Time limit of an episode in actions; None: unlimited."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """One sentence per fall-back in effect, for the run's manifest."""
        ...

    def reset(self, seeds: Sequence[int]) -> Observation:
        """Begins the first episode of every row with its seed (0 <= seed < 2**32). Earlier episodes have no influence:
        the same seeds and actions give the same numbers as in a new object."""
        ...

    def step(self, actions: Tensor) -> StepResult:
        """Executes actions [N, *action shape]; rows whose episode ends begin the next one, with seed `episode_seed(seed
        of the row's reset, number of episodes the row has finished)`."""
        ...

    def step_chunk(self, actions: Tensor) -> StepResult:
        """Executes actions [N, C, *action shape] in order. If a row's episode ends inside the chunk, the remaining
        actions are *not* executed (they were chosen for the old episode): their rewards are 0.0, `num_steps` counts the
        executed actions, and the observation is the first one of the next episode."""
        ...

    def render(self) -> Tensor:
        """Renders every row, [N, H, W, 3] uint8; RenderingUnavailableError if that is not possible."""
        ...

    def close(self) -> None:
        """Releases all resources. May be called more than once."""
        ...


@runtime_checkable
class Replayable(BatchedEnv, Protocol):
    """A batched environment whose state can be saved and restored, in the same or another process.

    No simulator state is saved: an episode is a pure function of its seed and actions, so a snapshot holds those, and
    `restore` replays the current episode. `make_env` returns replayable environments, except custom BatchedEnvs without
    snapshots.
    """

    def snapshot(self) -> tuple[RowSnapshot, ...]:
        """Returns the state of each row, which is small: the actions of its current episode."""
        ...

    def restore(self, rows: Sequence[RowSnapshot]) -> Observation:
        """Restores a snapshot and returns the current observation; everything after is as if nothing had happened
        since."""
        ...


@runtime_checkable
class SupportsBegin(BatchedEnv, Protocol):
    """A batched environment whose rows can begin episodes at different times, each with a seed that the caller chooses.
    `make_env` returns such environments, except custom BatchedEnvs without `begin`."""

    def begin(self, seeds: Mapping[int, int], *, alone: bool = False) -> Observation:
        """Begins an episode in some rows, in place of the one that they have.

        A row that `begin` began rests when its episode has ended, until the next `begin` or `reset`. Rows that have
        never begun an episode rest, too. A row at rest executes no actions: it is not simulated where rows are
        simulated one by one, its reward is 0.0, `num_steps` is 0, and its observation means nothing.

        Args:
            seeds: row -> seed of its episode, as for `reset`.
            alone: the other rows rest from now on; False: they do not change.

        Returns: the first observations of these rows alone, in the order of `seeds`; {} if there are none.
        """
        ...


def begins_rows(env: BatchedEnv) -> TypeGuard[SupportsBegin]:
    """Whether `begin` works. A wrapper has the method in any case; its attribute `begins_rows` says whether what is
    behind it can begin rows."""
    return isinstance(env, SupportsBegin) and bool(getattr(env, "begins_rows", True))


@runtime_checkable
class SupportsExpert(BatchedEnv, Protocol):
    """A batched environment with an expert who names actions in the present states of its rows: a scripted one, another
    policy, or a person."""

    def expert_actions(self, rows: Sequence[int], num_actions: int) -> Tensor:
        """Names what the expert would do next in these rows, which do not change: everything after is as if nobody had
        asked.

        Args:
            rows: some rows, none of which rests.
            num_actions: consecutive actions in each row, C. What the expert would do after the end of the task repeats
                the last action before it; the time limit ends nothing.

        Returns: [len(rows), C, *action shape], within the bounds of the action spec.
        """
        ...


def has_expert(env: BatchedEnv) -> TypeGuard[SupportsExpert]:
    """Whether `expert_actions` works. Wrappers and vectors have the method in any case; their attribute `has_expert`
    says whether what is behind them has an expert."""
    return isinstance(env, SupportsExpert) and bool(getattr(env, "has_expert", True))
