"""A `BatchedEnv` over N single environments in this process: auto-reset, episode records, chunks, snapshots.

Adapters (Gymnasium, ManiSkill) implement one environment; everything they share is here. Differs from Gymnasium's
vector environments: the next episode begins *in the same step*, the true last observation is kept, and the seeds of
later episodes are a function of the first ones (`seeding`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, TypeGuard, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from rlinf_envs.core.described import Described
from rlinf_envs.core.episodes import EndRule, RunningEpisode, Watchable, require_envs
from rlinf_envs.core.picture_memory import Places
from rlinf_envs.core.protocol import (
    PICTURE,
    ActionSpec,
    BatchedEnv,
    EpisodeEnd,
    FieldSpec,
    Observation,
    RowSnapshot,
    StepResult,
)
from rlinf_envs.core.seeding import checked_begin, checked_seeds, episode_seed
from rlinf_envs.core.success_classifier import Verdict
from rlinf_envs.errors import EnvCrashedError, EnvError

SingleObservation = Mapping[str, "np.ndarray | str"]
"""One row of an observation: arrays of exactly the spec's shape and dtype, text as str. Arrays are copied into the
batch, so they may be views with any strides, of a buffer that the row's next observation does not overwrite."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SingleStep:
    """Result of one action in one environment."""

    reward: float
    terminated: bool
    truncated: bool
    success: bool | None
    """Whether the task counts as solved right now; None if the environment does not define success."""
    task: str | None = None
    """The task of the episode, if the environment has several."""
    reward_components: Mapping[str, float] = field(default_factory=dict)
    """Name -> value of what the reward consists of, as far as the environment reports it."""


class SingleEnv(Protocol):
    """One environment without auto-reset. After `reset(seed)`, earlier episodes must have no influence.

    `observe()` returns the current observation and renders its images, without side effects. It is called only for
    observations that are returned, not after every action of a chunk.
    """

    @property
    def action_spec(self) -> ActionSpec: ...

    @property
    def observation_spec(self) -> Mapping[str, FieldSpec]: ...

    @property
    def notes(self) -> tuple[str, ...]: ...

    def reset(self, seed: int) -> None: ...

    def step(self, action: np.ndarray) -> SingleStep: ...

    def observe(self) -> SingleObservation: ...

    def render(self) -> np.ndarray: ...

    def close(self) -> None: ...


@runtime_checkable
class SingleExpert(Protocol):
    """One environment with an expert."""

    def expert_actions(self, num_actions: int) -> np.ndarray:
        """[C, *action shape], as `SupportsExpert.expert_actions` of this row."""
        ...


@dataclass(slots=True)
class _Row(RunningEpisode):
    """A running episode with its actions so far."""

    actions: list[np.ndarray] = field(default_factory=list)
    follows: Literal["next", "rest"] = "next"
    """As in `RowSnapshot`."""


@dataclass(slots=True)
class _Outcome:
    """Result of one row in one call."""

    rewards: np.ndarray
    """[C] float32"""
    num_steps: int
    terminated: bool
    truncated: bool
    final_observation: SingleObservation | None
    """The last observation of an episode that ended."""
    end: EpisodeEnd | None


class InProcessVector(Described, Watchable):
    """`num_envs` environments from one factory, stepped one after the other in this process.

    `max_episode_steps` and `ignore_terminations` as in `EndRule`. `ends_for_good`: steps after `terminated` are
    undefined, as in Gymnasium.
    """

    def __init__(
        self,
        make: Callable[[], SingleEnv],
        num_envs: int,
        *,
        max_episode_steps: int | None = None,
        ignore_terminations: bool = False,
        ends_for_good: bool = False,
    ) -> None:
        require_envs(num_envs)
        self._ends_for_good = ends_for_good
        self._ends = EndRule(max_episode_steps=max_episode_steps, ignore_terminations=ignore_terminations)
        self._max_episode_steps = max_episode_steps
        self._places: Places | None = None
        self._sees_success: Verdict | None = None
        self._seen: dict[int, SingleObservation] = {}
        """Row -> its present observation, if a classifier has seen it."""
        self._rows: list[_Row | None] | None = None
        """None: no reset yet; a row is None while it rests."""
        self._envs: list[SingleEnv] = []
        try:
            for _ in range(num_envs):
                self._envs.append(make())
        except BaseException:
            self.close()
            raise
        self._num_envs = num_envs
        self._action_spec = self._envs[0].action_spec
        self._observation_spec = dict(self._envs[0].observation_spec)

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(note for env in self._envs for note in env.notes))

    @property
    def own_limit(self) -> int | None:
        """Time limit of the environments in actions; None: unknown."""
        return getattr(self._envs[0], "own_limit", None)

    def reset(self, seeds: Sequence[int]) -> Observation:
        self._require_open()
        values = checked_seeds(seeds, self.num_envs)
        self._rows = None  # after a failed reset there is nothing to step
        rows: list[_Row | None] = [self._begin(index, seed, 0) for index, seed in enumerate(values)]
        observation = self._batched("observation", self._observed(rows))
        self._rows = rows
        return observation

    def begin(self, seeds: Mapping[int, int], *, alone: bool = False) -> Observation:
        self._require_open()
        values = checked_begin(seeds, self.num_envs)
        rows: list[_Row | None] = [None] * self.num_envs if alone or self._rows is None else self._rows
        self._rows = None
        for index, seed in values.items():
            rows[index] = self._begin(index, seed, 0, follows="rest")
        observation = self._batched("begun", [self._observe(index) for index in values]) if values else {}
        self._rows = rows
        return observation

    def step(self, actions: Tensor) -> StepResult:
        rows = self._require_rows("step")
        checked = self._action_spec.checked(actions, self.num_envs)
        outcomes = [self._advance(index, row, checked[index : index + 1]) for index, row in enumerate(rows)]
        return self._result(outcomes, chunk=False)

    def step_chunk(self, actions: Tensor) -> StepResult:
        rows = self._require_rows("step_chunk")
        checked = self._action_spec.checked(actions, self.num_envs, chunk=True)
        return self._result([self._advance(index, row, checked[index]) for index, row in enumerate(rows)], chunk=True)

    def snapshot(self) -> tuple[RowSnapshot, ...]:
        return tuple(
            RowSnapshot(
                seed=row.row_seed,
                episode_index=row.episode_index,
                actions=self._actions_tensor(row.actions),
                follows=row.follows,
            )
            if row is not None
            else RowSnapshot(seed=0, episode_index=0, actions=self._actions_tensor([]), rests=True)
            for row in self._require_rows("snapshot")
        )

    def restore(self, rows: Sequence[RowSnapshot]) -> Observation:
        self._require_open()
        if len(rows) != self.num_envs:
            raise EnvError(f"restore got {len(rows)} rows for {self.num_envs} environments")
        checked_seeds([snapshot.seed for snapshot in rows], self.num_envs)
        self._rows = None
        replayed = [None if snapshot.rests else self._replayed(index, snapshot) for index, snapshot in enumerate(rows)]
        observation = self._batched("observation", self._observed(replayed))
        self._rows = replayed
        return observation

    def render(self) -> Tensor:
        self._require_rows("render")
        return torch.from_numpy(np.stack([env.render() for env in self._envs]))

    @property
    def has_expert(self) -> bool:
        """Whether `expert_actions` works."""
        return isinstance(self._envs[0], SingleExpert)

    def expert_actions(self, rows: Sequence[int], num_actions: int) -> Tensor:
        running = self._require_rows("expert_actions")
        return torch.from_numpy(np.stack([self._asked(index, running[index], num_actions) for index in rows]))

    def reward_by(self, sees_success: Verdict) -> None:
        """From now on, the reward of an action is 1 if `sees_success` is true of the observation after it, else 0, and
        episodes end with it. Rows for which steps after their own end are undefined end there, too."""
        self._sees_success = sees_success

    def show_in(self, places: Places | None) -> None:
        self._places = places

    def single(self, env_index: int) -> SingleEnv:
        """The environment of one row."""
        self._require_open()
        return self._envs[env_index]

    def render_row(self, env_index: int) -> np.ndarray:
        self._require_open()
        return self._envs[env_index].render()

    def close(self) -> None:
        envs, self._envs = self._envs, []
        self._rows = None
        for env in envs:
            env.close()

    def _begin(self, index: int, seed: int, episode_index: int, follows: Literal["next", "rest"] = "next") -> _Row:
        actual_seed = episode_seed(seed, episode_index)
        self._seen.pop(index, None)
        try:
            self._envs[index].reset(actual_seed)
        except Exception as error:
            raise self._crash(index, f"reset(seed={actual_seed})", error) from error
        row = _Row(row_seed=seed, episode_index=episode_index, follows=follows)
        self._tell_watcher(index, row)
        return row

    def _move(self, index: int, row: _Row, action: np.ndarray) -> tuple[float, bool, bool]:
        """Steps one row by one action, without auto-reset; returns reward, terminated, truncated."""
        self._seen.pop(index, None)
        try:
            step = self._envs[index].step(action)
            if self._sees_success is not None:
                step = self._classified(index, step, self._sees_success)
            if not np.isfinite(step.reward):
                raise EnvError(f"the reward is {step.reward}; a reward must be a finite number")
        except Exception as error:
            raise self._crash(index, f"step {row.num_actions} of its episode", error, row) from error
        row.actions.append(action)
        row.add(float(step.reward), step.success, step.task)
        row.reward_components = step.reward_components
        if step.terminated and row.ended_at is None:
            row.ended_at = row.num_actions
        self._tell_watcher(index, row)
        return float(step.reward), *self._ends.of(row, terminated=step.terminated, truncated=step.truncated)

    def _classified(self, index: int, step: SingleStep, sees_success: Verdict) -> SingleStep:
        observation = self._seen[index] = self._envs[index].observe()
        verdict = sees_success(observation)
        ends = verdict or (self._ends_for_good and step.terminated)
        return replace(step, reward=float(verdict), terminated=ends, reward_components={"environment": step.reward})

    def _advance(self, index: int, row: _Row | None, actions: np.ndarray) -> _Outcome:
        """Executes up to C actions [C, *shape] in one row, none in a row at rest; begins the next episode if this one
        ends and another follows it."""
        rewards = np.zeros(len(actions), dtype=np.float32)
        num_steps, terminated, truncated = 0, False, False
        while row is not None and num_steps < len(actions) and not (terminated or truncated):
            rewards[num_steps], terminated, truncated = self._move(index, row, actions[num_steps])
            num_steps += 1
        outcome = _Outcome(
            rewards=rewards,
            num_steps=num_steps,
            terminated=terminated,
            truncated=truncated,
            final_observation=None,
            end=None,
        )
        if row is not None and (terminated or truncated):
            outcome.final_observation = self._observe(index)
            outcome.end = row.end(index)
            assert self._rows is not None, "a row moved before the reset"
            follows = row.follows == "next"
            self._rows[index] = self._begin(index, row.row_seed, row.episode_index + 1) if follows else None
        return outcome

    def _asked(self, index: int, row: _Row | None, num_actions: int) -> np.ndarray:
        """[C, *action shape]"""
        env = self._envs[index]
        if not isinstance(env, SingleExpert):
            raise EnvError(f"a {type(env).__name__} has no expert (rlinf_envs.SupportsExpert)")
        if row is None:
            raise EnvError(f"expert_actions: env {index} has no episode")
        try:
            actions = self._action_spec.checked(np.asarray(env.expert_actions(num_actions))[None], 1, chunk=True)[0]
            if len(actions) != num_actions:
                raise EnvError(f"it named {len(actions)} actions, and {num_actions} were asked for")
        except Exception as error:
            raise self._crash(index, "expert_actions", error, row) from error
        return actions

    def _observe(self, index: int) -> SingleObservation:
        if (seen := self._seen.get(index)) is not None:
            return seen
        try:
            return self._envs[index].observe()
        except Exception as error:
            raise self._crash(index, "observe()", error) from error

    def _observed(self, rows: Sequence[_Row | None]) -> list[SingleObservation]:
        spec = self._observation_spec
        return [nothing_observed(spec) if row is None else self._observe(index) for index, row in enumerate(rows)]

    def _replayed(self, index: int, snapshot: RowSnapshot) -> _Row:
        row = self._begin(index, snapshot.seed, snapshot.episode_index, snapshot.follows)
        for position, action in enumerate(self._checked_history(index, snapshot.actions)):
            _, terminated, truncated = self._move(index, row, action)
            if terminated or truncated:
                raise EnvError(
                    f"restore: the episode of env {index} ended at action {position} of "
                    f"{len(snapshot.actions)}; the snapshot was taken from another environment or with other options"
                )
        return row

    def _checked_history(self, index: int, actions: Tensor) -> np.ndarray:
        if len(actions) == 0:
            return np.zeros((0, *self._action_spec.shape), dtype=np.float32)
        try:
            return self._action_spec.checked(actions[None], 1, chunk=True)[0]
        except ValueError as error:
            raise EnvError(f"restore: snapshot of env {index}: {error}") from error

    def _actions_tensor(self, actions: list[np.ndarray]) -> Tensor:
        if not actions:
            return torch.zeros((0, *self._action_spec.shape), dtype=self._action_spec.dtype)
        return torch.from_numpy(np.stack(actions))

    def _result(self, outcomes: list[_Outcome], *, chunk: bool) -> StepResult:
        rows = self._observed(self._require_rows("step"))
        observation = self._batched("observation", rows)
        ends = tuple(outcome.end for outcome in outcomes if outcome.end is not None)
        final = [outcome.final_observation or row for outcome, row in zip(outcomes, rows, strict=True)]
        rewards = np.stack([outcome.rewards for outcome in outcomes])
        return StepResult(
            observation=observation,
            rewards=torch.from_numpy(rewards if chunk else rewards[:, 0].copy()),
            terminated=torch.tensor([outcome.terminated for outcome in outcomes]),
            truncated=torch.tensor([outcome.truncated for outcome in outcomes]),
            final_observation=self._batched("final_observation", final) if ends else observation,
            num_steps=torch.tensor([outcome.num_steps for outcome in outcomes]),
            episodes=ends,
        )

    def _batched(self, part: str, rows: Sequence[SingleObservation]) -> Observation:
        try:
            return stacked(self._observation_spec, rows, part, self._places)
        except EnvCrashedError:
            self._rows = None
            raise

    def _crash(self, index: int, doing: str, error: Exception, row: _Row | None = None) -> EnvCrashedError:
        self._rows = None  # some rows have moved, some have not: only a reset continues
        text = f"{doing} failed: {type(error).__name__}: {error}"
        if row is not None and row.ended_at is not None:
            text += (
                f"; the environment had ended the episode after {row.ended_at} actions, and ignore_terminations=True "
                "goes on: leave it out"
            )
        return EnvCrashedError(index, text)

    def _require_open(self) -> None:
        if not self._envs:
            raise EnvError("this environment is closed; make a new one")

    def _require_rows(self, doing: str) -> list[_Row | None]:
        self._require_open()
        if self._rows is None:
            raise EnvError(f"{doing} before reset (or after a failure); call reset(seeds) first")
        return self._rows


def observes_rows(env: BatchedEnv) -> TypeGuard[InProcessVector]:
    """Whether rows can be observed after every action, as `InProcessVector.reward_by` needs it."""
    return isinstance(env, InProcessVector)


def nothing_observed(spec: Mapping[str, FieldSpec]) -> SingleObservation:
    """The observation of a row at rest."""
    return {name: "" if of.dtype == "text" else np.zeros(of.shape, of.dtype) for name, of in spec.items()}


def stacked(
    spec: Mapping[str, FieldSpec], rows: Sequence[SingleObservation], part: str, places: Places | None
) -> Observation:
    """Stacks the observations of all rows, with images written into their places.

    Args:
        part: "observation" or "final_observation", for `places`.

    Raises: EnvCrashedError that names the row whose observation does not match `spec`.
    """
    batch: Observation = {}
    for name, field_spec in spec.items():
        if field_spec.dtype == "text":
            batch[name] = [str(row[name]) for row in rows]
            continue
        arrays = [np.asarray(row[name]) for row in rows]
        for index, array in enumerate(arrays):
            if array.shape != field_spec.shape:
                shapes = f"{list(array.shape)}; its observation_space says {list(field_spec.shape)}"
                raise EnvCrashedError(index, f"its observation {name!r} has the shape {shapes}")
        place = places(part, name) if places is not None and name.startswith(PICTURE) else None
        if place is not None:
            np.stack(arrays, out=place.numpy())
            batch[name] = place
            continue
        array = np.stack(arrays)
        if field_spec.dtype == "float32" and not np.isfinite(array).all():
            index = int(np.argwhere(~np.isfinite(array))[0][0])
            raise EnvCrashedError(index, f"its observation {name!r} holds a number that is not finite")
        batch[name] = torch.from_numpy(array)
    return batch
