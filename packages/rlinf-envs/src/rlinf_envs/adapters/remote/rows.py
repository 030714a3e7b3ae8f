"""Rows that a simulator server steps, as a `BatchedEnv`.

The server executes whole chunks of actions and returns raw observations; they are read here, by the code that reads
those of a local Gymnasium environment, so the numbers are the same.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from rlinf_envs.adapters.gymnasium.reading import ObservationReader, action_spec
from rlinf_envs.adapters.remote.connection import ServerConnection
from rlinf_envs.core.described import Described
from rlinf_envs.core.episodes import EndRule, RunningEpisode, require_envs
from rlinf_envs.core.picture_memory import Places
from rlinf_envs.core.protocol import EpisodeEnd, Observation, RowSnapshot, StepResult
from rlinf_envs.core.row_history import RowHistories
from rlinf_envs.core.seeding import checked_begin, checked_seeds, episode_seed
from rlinf_envs.core.vector import SingleObservation, nothing_observed, stacked
from rlinf_envs.errors import EnvCrashedError, EnvError


class RemoteRows(Described):
    """The environments of one connection, which it owns.

    Args:
        described: the answer to `make`.

    Raises: EnvError for environments that cannot be read; SimulatorLost, from every method, if the connection breaks.
    """

    def __init__(
        self,
        connection: ServerConnection,
        num_envs: int,
        described: Mapping[str, Any],
        *,
        ignore_terminations: bool,
        picture_layout: str | None,
    ) -> None:
        require_envs(num_envs)
        self._connection = connection
        self._num_envs = num_envs
        self._rows: list[RunningEpisode | None] | None = None
        """None: no reset yet; a row is None while it rests."""
        self._begun: set[int] = set()
        """Rows that `begin` began, which rest after their episodes."""
        self._places: Places | None = None
        self._max_episode_steps = described["max_episode_steps"]
        EndRule(max_episode_steps=self._max_episode_steps, ignore_terminations=ignore_terminations)  # checks them
        space = _space(described["observation_space"])
        self._readers = [ObservationReader(space, picture_layout) for _ in range(num_envs)]
        self._observation_spec = self._readers[0].spec
        self._action_spec = action_spec(_space(described["action_space"]))
        self._histories = RowHistories(self._action_spec)

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(note for reader in self._readers for note in reader.notes))

    def reset(self, seeds: Sequence[int]) -> Observation:
        values = checked_seeds(seeds, self.num_envs)
        self._rows = None
        answer = self._connection.call("reset", seeds=values)
        observation = self._stacked(self._read_all(answer["observations"]), "observation")
        self._rows, self._begun = [RunningEpisode(seed, 0) for seed in values], set()
        self._histories.reset(values)
        return observation

    def begin(self, seeds: Mapping[int, int], *, alone: bool = False) -> Observation:
        values = checked_begin(seeds, self.num_envs)
        resting: list[RunningEpisode | None] = [None] * self.num_envs
        alone |= self._rows is None
        rows = resting if alone or self._rows is None else self._rows
        self._rows = None
        if alone:
            self._begun = set()
            self._histories.rest(self.num_envs)
        answer = self._connection.call("begin", rows=list(values), seeds=list(values.values()), alone=alone)
        read = [self._read(index, each) for index, each in zip(values, answer["observations"], strict=True)]
        observation = stacked(self._observation_spec, read, "begun", None) if values else {}
        for index, seed in values.items():
            rows[index] = RunningEpisode(seed, 0)
        self._begun |= set(values)
        self._histories.begin(values)
        self._rows = rows
        return observation

    def step(self, actions: Tensor) -> StepResult:
        self._require_rows("step")
        return self._moved(self._action_spec.checked(actions, self.num_envs)[:, None], is_chunk=False)

    def step_chunk(self, actions: Tensor) -> StepResult:
        self._require_rows("step_chunk")
        return self._moved(self._action_spec.checked(actions, self.num_envs, chunk=True), is_chunk=True)

    def snapshot(self) -> tuple[RowSnapshot, ...]:
        self._require_rows("snapshot")
        return self._histories.snapshot()

    def restore(self, rows: Sequence[RowSnapshot]) -> Observation:
        if len(rows) != self.num_envs:
            raise EnvError(f"restore got {len(rows)} rows for {self.num_envs} environments")
        checked_seeds([row.seed for row in rows], self.num_envs)
        self._rows = None
        answer = self._connection.call(
            "restore",
            seeds=[None if row.rests else episode_seed(row.seed, row.episode_index) for row in rows],
            actions=[row.actions.numpy() for row in rows],
        )
        running = [None if row.rests else RunningEpisode(row.seed, row.episode_index) for row in rows]
        for row, rewards, successes in zip(running, answer["rewards"], answer["successes"], strict=True):
            for reward, success in zip(rewards, successes, strict=True):
                assert row is not None, "a row at rest has no actions"
                row.add(float(reward), None if success < 0 else bool(success))
        observation = self._stacked(self._read_all(answer["observations"]), "observation")
        self._rows = running
        self._begun = {index for index, row in enumerate(rows) if row.follows == "rest" and not row.rests}
        self._histories.restore(rows)
        return observation

    def render(self) -> Tensor:
        self._require_rows("render")
        return torch.from_numpy(np.array(self._connection.call("render")))

    def show_in(self, places: Places | None) -> None:
        self._places = places

    def close(self) -> None:
        self._rows = None
        self._connection.close()

    def _moved(self, actions: np.ndarray, *, is_chunk: bool) -> StepResult:
        """Executes actions [N, C, *shape]."""
        rows = self._require_rows("step")
        self._rows = None  # after a failure only a reset continues
        following = [
            None if row is None or index in self._begun else episode_seed(row.row_seed, row.episode_index + 1)
            for index, row in enumerate(rows)
        ]
        answer = self._connection.call("step_chunk", actions=actions, next_seeds=following)
        ends = self._count(rows, answer)
        observed = self._read_all(answer["observations"])
        observation = self._stacked(observed, "observation")
        final = list(observed)
        for index, raw in answer["finals"]:
            final[index] = self._read(index, raw)
        rewards = answer["rewards"].astype(np.float32)
        result = StepResult(
            observation=observation,
            rewards=torch.from_numpy(rewards if is_chunk else rewards[:, 0].copy()),
            terminated=torch.from_numpy(answer["terminated"].copy()),
            truncated=torch.from_numpy(answer["truncated"].copy()),
            final_observation=self._stacked(final, "final_observation") if ends else observation,
            num_steps=torch.from_numpy(answer["num_steps"].copy()),
            episodes=ends,
        )
        self._rows = rows
        self._histories.add(actions, result)
        return result

    def _count(self, rows: list[RunningEpisode | None], answer: Mapping[str, Any]) -> tuple[EpisodeEnd, ...]:
        """Adds a chunk to the episodes, begins the next ones in `rows`, and returns those that ended."""
        ends: list[EpisodeEnd] = []
        for index, row in enumerate(rows):
            if row is None:
                continue
            for position in range(int(answer["num_steps"][index])):
                reward, success = float(answer["rewards"][index, position]), int(answer["successes"][index, position])
                if not np.isfinite(reward):
                    text = f"step {row.num_actions} of its episode failed: the reward is {reward}"
                    raise EnvCrashedError(index, f"{text}; a reward must be a finite number")
                row.add(reward, None if success < 0 else bool(success))
            if answer["terminated"][index] or answer["truncated"][index]:
                ends.append(row.end(index))
                follower = RunningEpisode(row.row_seed, row.episode_index + 1)
                rows[index] = None if index in self._begun else follower
        return tuple(ends)

    def _read_all(self, observations: Sequence[Any]) -> list[SingleObservation]:
        return [self._read(index, observation) for index, observation in enumerate(observations)]

    def _read(self, index: int, observation: Any) -> SingleObservation:
        if observation is None:
            return nothing_observed(self._observation_spec)
        try:
            return self._readers[index].read(observation)
        except EnvError as error:
            raise EnvCrashedError(index, f"observe() failed: {error}") from error

    def _stacked(self, rows: Sequence[SingleObservation], part: str) -> Observation:
        return stacked(self._observation_spec, rows, part, self._places)

    def _require_rows(self, doing: str) -> list[RunningEpisode | None]:
        if self._rows is None:
            raise EnvError(f"{doing} before reset (or after a failure); call reset(seeds) first")
        return self._rows


def _space(described: Mapping[str, Any]) -> spaces.Space:
    """Returns the space of a description (`remote.SPACES`). Raises: EnvError for another kind."""
    kind = described["kind"]
    if kind == "Box":
        return spaces.Box(described["low"], described["high"], dtype=np.dtype(described["dtype"]).type)
    if kind == "Discrete":
        return spaces.Discrete(described["n"], start=described["start"])
    if kind == "MultiDiscrete":
        return spaces.MultiDiscrete(described["nvec"], start=described["start"])
    if kind == "MultiBinary":
        return spaces.MultiBinary(described["shape"])
    if kind == "Text":
        return spaces.Text(described["max_length"])
    if kind == "Dict":
        parts = OrderedDict((name, _space(part)) for name, part in described["parts"])  # other dicts would be sorted
        return spaces.Dict(parts)
    raise EnvError(f"the server has a space of kind {kind!r}, which this client does not know")
