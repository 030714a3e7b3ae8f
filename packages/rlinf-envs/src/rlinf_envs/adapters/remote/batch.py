"""A batch that a simulator server simulates at once (`rlinf_envs.remote.ServedBatch`), as a `BatchedEnv`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlinf_envs.adapters.remote.connection import ServerConnection
from rlinf_envs.core.described import Described
from rlinf_envs.core.protocol import (
    ActionSpec,
    EpisodeEnd,
    FieldSpec,
    Observation,
    RowSnapshot,
    StepResult,
    observation_problem,
)
from rlinf_envs.core.row_history import RowHistories
from rlinf_envs.core.seeding import checked_begin, checked_seeds
from rlinf_envs.errors import EnvError


class RemoteBatch(Described):
    """The batch of one connection, which it owns.

    Args:
        described: `ServedBatch.description`.

    Raises: SimulatorLost, from every method, if the connection breaks.
    """

    def __init__(self, connection: ServerConnection, num_envs: int, described: Mapping[str, Any]) -> None:
        self._connection = connection
        self._num_envs = num_envs
        bounds = described["actions"]
        low, high = (torch.from_numpy(np.array(bounds[name])) for name in ("low", "high"))
        self._action_spec = ActionSpec(kind=bounds["kind"], shape=tuple(low.shape), low=low, high=high)
        self._observation_spec = {
            name: FieldSpec(shape=tuple(shape), dtype=dtype, texts=tuple(texts))
            for name, (shape, dtype, texts) in described["fields"].items()
        }
        self._max_episode_steps = described["max_episode_steps"]
        self._notes = tuple(described["notes"])
        self.begins_rows = bool(described["begins_rows"])
        """Whether `begin` works."""
        self._histories = RowHistories(self._action_spec)
        self._is_reset = False

    def reset(self, seeds: Sequence[int]) -> Observation:
        values = checked_seeds(seeds, self.num_envs)
        self._is_reset = False
        observation = self._observation(self._connection.call("reset", seeds=values))
        self._histories.reset(values)
        self._is_reset = True
        return observation

    def begin(self, seeds: Mapping[int, int], *, alone: bool = False) -> Observation:
        values = checked_begin(seeds, self.num_envs)
        alone |= not self._is_reset
        self._is_reset = False
        begun = self._connection.call("begin", rows=list(values), seeds=list(values.values()), alone=alone)
        if alone:
            self._histories.rest(self.num_envs)
        self._histories.begin(values)
        self._is_reset = True
        return self._observation(begun, len(values)) if values else {}

    def step(self, actions: Tensor) -> StepResult:
        self._require_reset("step")
        checked = self._action_spec.checked(actions, self.num_envs)
        return self._moved("step", checked, checked[:, None])

    def step_chunk(self, actions: Tensor) -> StepResult:
        self._require_reset("step_chunk")
        checked = self._action_spec.checked(actions, self.num_envs, chunk=True)
        return self._moved("step_chunk", checked, checked)

    def render(self) -> Tensor:
        self._require_reset("render")
        return torch.from_numpy(np.array(self._connection.call("render")))

    def close(self) -> None:
        self._is_reset = False
        self._connection.close()

    def _moved(self, name: str, actions: np.ndarray, chunk: np.ndarray) -> StepResult:
        self._is_reset = False  # after a failure only a reset continues
        answer = self._connection.call(name, actions=actions)
        observation, final = self._observation(answer["observation"]), answer["final_observation"]
        parts = ("rewards", "terminated", "truncated", "num_steps")
        tensors = {part: torch.from_numpy(np.array(answer[part])) for part in parts}
        result = StepResult(
            observation=observation,
            final_observation=observation if final is None else self._observation(final),
            episodes=tuple(EpisodeEnd(**end) for end in answer["episodes"]),
            **tensors,
        )
        self._histories.add(chunk, result)
        self._is_reset = True
        return result

    def _observation(self, fields: Mapping[str, Any], num_rows: int | None = None) -> Observation:
        observation: Observation = {
            name: torch.from_numpy(np.array(value)) if isinstance(value, np.ndarray) else list(value)
            for name, value in fields.items()
        }
        num_rows = self.num_envs if num_rows is None else num_rows
        if (problem := observation_problem(observation, self._observation_spec, num_rows)) is not None:
            raise EnvError(f"an observation of the batch at {self._connection.address}{problem}")
        return observation

    def _require_reset(self, doing: str) -> None:
        if not self._is_reset:
            raise EnvError(f"{doing} before reset (or after a failure); call reset(seeds) first")


class ReplayableRemoteBatch(RemoteBatch):
    """A batch that can return to the middle of episodes."""

    def snapshot(self) -> tuple[RowSnapshot, ...]:
        self._require_reset("snapshot")
        return self._histories.snapshot()

    def restore(self, rows: Sequence[RowSnapshot]) -> Observation:
        if len(rows) != self.num_envs:
            raise EnvError(f"restore got {len(rows)} rows for {self.num_envs} environments")
        self._is_reset = False
        sent = [
            {
                "seed": row.seed,
                "episode_index": row.episode_index,
                "actions": row.actions.numpy(),
                "follows": row.follows,
                "rests": row.rests,
            }
            for row in rows
        ]
        observation = self._observation(self._connection.call("restore", rows=sent))
        self._histories.restore(rows)
        self._is_reset = True
        return observation
