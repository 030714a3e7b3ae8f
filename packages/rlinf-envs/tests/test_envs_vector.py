"""The rules every environment shares, on an environment small enough to know its numbers by heart."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch
from torch import Tensor

from rlinf_envs import ActionSpec, EnvCrashedError, EnvError, FieldSpec, RowSnapshot, episode_seed, tensor_field
from rlinf_envs.core.vector import InProcessVector, SingleStep


class Counter:
    """Counts from its seed by the action (1, 2 or 3); solved at every multiple of 10, ends there."""

    action_spec = ActionSpec(kind="discrete", shape=(), low=torch.tensor(1), high=torch.tensor(3))
    observation_spec: Mapping[str, FieldSpec] = {
        "state": FieldSpec(shape=(1,), dtype="float32"),
        "instruction": FieldSpec(shape=(), dtype="text"),
    }
    notes = ("counts",)

    def __init__(self) -> None:
        self.closed = 0
        self.observed = 0
        self.count = 0

    def reset(self, seed: int) -> None:
        self.count = seed % 10

    def step(self, action: np.ndarray) -> SingleStep:
        self.count += int(action)
        solved = self.count % 10 == 0
        return SingleStep(reward=float(action), terminated=solved, truncated=False, success=solved)

    def observe(self) -> dict[str, np.ndarray | str]:
        self.observed += 1
        return {"state": np.array([self.count], dtype=np.float32), "instruction": f"from {self.count}"}

    def render(self) -> np.ndarray:
        return np.full((2, 2, 3), self.count, dtype=np.uint8)

    def close(self) -> None:
        self.closed += 1


def counters(num_envs: int = 2, **options: int | bool) -> InProcessVector:
    return InProcessVector(Counter, num_envs, **options)  # type: ignore[arg-type]


def actions(*values: int) -> Tensor:
    return torch.tensor(values)


def test_reset_batches_rows_in_order() -> None:
    observation = counters(3).reset([4, 1, 2])
    assert tensor_field(observation, "state").tolist() == [[4.0], [1.0], [2.0]]
    assert observation["instruction"] == ["from 4", "from 1", "from 2"]


def test_end_keeps_the_last_observation_and_begins_the_next_episode() -> None:
    env = counters()
    env.reset([7, 2])
    result = env.step(actions(3, 1))
    assert result.rewards.tolist() == [3.0, 1.0]
    assert result.terminated.tolist() == [True, False]
    assert result.truncated.tolist() == [False, False]
    assert tensor_field(result.final_observation, "state").tolist() == [[10.0], [3.0]]
    assert tensor_field(result.observation, "state").tolist() == [[episode_seed(7, 1) % 10], [3.0]]
    (end,) = result.episodes
    assert (end.env_index, end.episode_index, end.seed, end.return_, end.length) == (0, 0, 7, 3.0, 1)
    assert end.success_once is True
    assert end.success_at_end is True


def test_rows_begin_one_by_one_and_rest_after_their_episodes() -> None:
    env = counters(3)
    assert tensor_field(env.begin({2: 7, 0: 2}), "state").tolist() == [[7.0], [2.0]]
    result = env.step(actions(1, 1, 3))
    assert result.num_steps.tolist() == [1, 0, 1]
    assert result.rewards.tolist() == [1.0, 0.0, 3.0]
    assert [(end.env_index, end.seed, end.return_) for end in result.episodes] == [(2, 7, 3.0)]
    assert tensor_field(result.final_observation, "state").tolist() == [[3.0], [0.0], [10.0]]
    assert env.step(actions(1, 1, 3)).num_steps.tolist() == [1, 0, 0]
    assert env.begin({1: 5})["instruction"] == ["from 5"]
    rows = env.snapshot()
    assert [row.rests for row in rows] == [False, False, True]
    expected = env.step(actions(3, 3, 3))
    other = counters(3)
    other.restore(rows)
    result = other.step(actions(3, 3, 3))
    assert result.rewards.tolist() == expected.rewards.tolist() == [3.0, 3.0, 0.0]
    env.begin({1: 5}, alone=True)
    assert env.step(actions(1, 1, 1)).num_steps.tolist() == [0, 1, 0]
    with pytest.raises(EnvError, match="begin got row 3; this environment has rows 0 to 2"):
        env.begin({3: 0})


def test_time_limit_truncates_and_termination_wins_over_it() -> None:
    env = counters(max_episode_steps=2)
    env.reset([1, 8])
    env.step(actions(1, 1))
    result = env.step(actions(1, 1))
    assert result.truncated.tolist() == [True, False]
    assert result.terminated.tolist() == [False, True]
    assert [end.length for end in result.episodes] == [2, 2]
    assert [end.success_at_end for end in result.episodes] == [False, True]


def test_the_limit_counts_each_episode_anew() -> None:
    env = counters(1, max_episode_steps=2)
    env.reset([0])
    lengths = [end.length for _ in range(8) for end in env.step(actions(1)).episodes if not end.success_once]
    assert lengths
    assert set(lengths) == {2}


def test_ignore_terminations_goes_on_and_remembers_success() -> None:
    env = counters(1, ignore_terminations=True, max_episode_steps=3)
    env.reset([8])
    results = [env.step(actions(2)) for _ in range(3)]
    assert [bool(result.terminated) for result in results] == [False, False, False]
    assert [bool(result.truncated) for result in results] == [False, False, True]
    (end,) = results[-1].episodes
    assert end.success_once is True
    assert end.success_at_end is False


@pytest.mark.parametrize("ends_for_good", [False, True])
def test_a_classifier_gives_the_reward_and_ends_episodes(ends_for_good: bool) -> None:
    def classified() -> InProcessVector:
        env = counters(2, ends_for_good=ends_for_good)
        env.reward_by(lambda observation: np.asarray(observation["state"])[0] >= 12)
        return env

    env = classified()
    env.reset([7, 2])
    result = env.step_chunk(actions(3, 3, 3, 3, 3, 3).view(2, 3))  # to 10, which is solved, and 13; to 11
    assert result.rewards.tolist() == [[0.0, float(not ends_for_good), 0.0], [0.0, 0.0, 0.0]]
    assert result.num_steps.tolist() == [1 if ends_for_good else 2, 3]
    (end,) = result.episodes
    assert (end.success_once, end.success_at_end) == (True, ends_for_good)
    other = classified()
    other.restore(env.snapshot())
    assert other.step(actions(1, 1)).rewards.tolist() == env.step(actions(1, 1)).rewards.tolist() == [0.0, 1.0]


def test_chunk_leaves_out_what_is_left_after_an_end() -> None:
    env = counters(2)
    env.reset([7, 1])
    result = env.step_chunk(torch.tensor([[1, 2, 3, 3], [1, 1, 1, 1]]))
    assert result.rewards.tolist() == [[1.0, 2.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]]
    assert result.num_steps.tolist() == [2, 4]
    assert result.terminated.tolist() == [True, False]
    assert tensor_field(result.final_observation, "state").tolist() == [[10.0], [5.0]]
    assert tensor_field(result.observation, "state").tolist() == [[episode_seed(7, 1) % 10], [5.0]]


def test_restore_goes_where_the_snapshot_was_taken() -> None:
    env = counters(2, max_episode_steps=4)
    env.reset([1, 8])
    for _ in range(3):
        env.step(actions(1, 2))  # row 1 is in its second episode or later by now
    rows = env.snapshot()
    assert rows[0].actions.tolist() == [1, 1, 1]
    assert rows[1].episode_index >= 1
    expected = env.step(actions(1, 1))
    other = counters(2, max_episode_steps=4)
    assert tensor_field(other.restore(rows), "state")[0].tolist() == [4.0]
    assert other.step(actions(1, 1)).episodes == expected.episodes
    assert expected.episodes[0].return_ == 4.0


def test_restore_refuses_a_history_that_does_not_fit() -> None:
    env = counters(1)
    with pytest.raises(EnvError, match="ended at action 0 of 2"):
        env.restore([RowSnapshot(seed=8, episode_index=0, actions=torch.tensor([2, 1]))])
    with pytest.raises(EnvError, match="snapshot of env 0: actions"):
        env.restore([RowSnapshot(seed=8, episode_index=0, actions=torch.tensor([9]))])
    with pytest.raises(EnvError, match="2 rows for 1"):
        env.restore([RowSnapshot(seed=8, episode_index=0, actions=torch.tensor([]))] * 2)
    with pytest.raises(EnvError, match="before reset"):  # a failed restore leaves nothing to step
        env.step(actions(1))


def test_render_stacks_the_rows() -> None:
    env = counters(2)
    env.reset([3, 5])
    pictures = env.render()
    assert pictures.shape == (2, 2, 2, 3)
    assert pictures[:, 0, 0, 0].tolist() == [3, 5]


def test_notes_are_told_once() -> None:
    assert counters(3).notes == ("counts",)


def test_close_closes_each_once_and_ends_use() -> None:
    instances: list[Counter] = []

    def make() -> Counter:
        instances.append(Counter())
        return instances[-1]

    env = InProcessVector(make, 2)
    env.close()
    env.close()
    assert [counter.closed for counter in instances] == [1, 1]
    with pytest.raises(EnvError, match="closed"):
        env.reset([0, 0])


def test_those_already_made_are_closed_when_one_cannot_be_made() -> None:
    instances: list[Counter] = []

    def make() -> Counter:
        if instances:
            raise RuntimeError("no second one")
        instances.append(Counter())
        return instances[-1]

    with pytest.raises(RuntimeError, match="no second one"):
        InProcessVector(make, 2)
    assert instances[0].closed == 1


class Faulty(Counter):
    reward = 1.0
    state = 0.0
    has_moved = False

    def reset(self, seed: int) -> None:
        self.has_moved = False

    def step(self, action: np.ndarray) -> SingleStep:
        if action == 3:
            raise ZeroDivisionError("a bug of the simulator")
        self.has_moved = True
        return SingleStep(reward=self.reward, terminated=False, truncated=False, success=None)

    def observe(self) -> dict[str, np.ndarray | str]:
        return {"state": np.array([self.state if self.has_moved else 0.0], dtype=np.float32), "instruction": ""}


class BadReward(Faulty):
    reward = float("nan")


class BadState(Faulty):
    state = float("inf")


class Blind(Faulty):
    def observe(self) -> dict[str, np.ndarray | str]:
        if self.has_moved:
            raise ZeroDivisionError("a bug of the camera")
        return super().observe()


@pytest.mark.parametrize(
    ("make", "action", "text"),
    [
        (Faulty, 3, "env 1: step 0 of its episode failed: ZeroDivisionError: a bug"),
        (BadReward, 1, "env 0: .* the reward is nan"),
        (BadState, 1, "env 0: its observation 'state' holds a number that is not finite"),
        (Blind, 1, r"env 0: observe\(\) failed: ZeroDivisionError: a bug of the camera"),
    ],
)
def test_a_failing_environment_is_named(make: Callable[[], Faulty], action: int, text: str) -> None:
    env = InProcessVector(make, 2)
    env.reset([0, 0])
    with pytest.raises(EnvCrashedError, match=text):
        env.step(actions(1, action))
    with pytest.raises(EnvError, match="after a failure"):
        env.step(actions(1, 1))
    env.reset([0, 0])


def test_a_crash_can_be_sent_to_another_process() -> None:
    error = pickle.loads(pickle.dumps(EnvCrashedError(3, "broke")))  # noqa: S301  our own bytes
    assert (error.env_index, error.problem, str(error)) == (3, "broke", "env 3: broke")


def test_success_is_none_where_unknown() -> None:
    env = InProcessVector(Faulty, 1, max_episode_steps=1)
    env.reset([0])
    (end,) = env.step(actions(1)).episodes
    assert end.success_once is None
    assert end.success_at_end is None


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_envs": 0}, "num_envs=0"),
        ({"max_episode_steps": 0}, "max_episode_steps=0"),
        ({"ignore_terminations": True}, "needs a time limit"),
    ],
)
def test_wrong_options(options: dict[str, int], text: str) -> None:
    with pytest.raises(EnvError, match=text):
        counters(**options)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (torch.tensor([1]), r"shape \[1\]; this environment takes \[2\]"),
        (torch.tensor([[1], [1]]), r"shape \[2, 1\]"),
        (torch.tensor([1.0, 1.0]), "a discrete action is an integer"),
        (torch.tensor([1, 4]), r"actions\[1\]=4 is not in 1..3"),
    ],
)
def test_wrong_discrete_actions(wrong: Tensor, text: str) -> None:
    env = counters(2)
    env.reset([1, 1])
    with pytest.raises(ValueError, match=text):
        env.step(wrong)


def test_continuous_actions_are_clipped_and_must_be_finite() -> None:
    spec = ActionSpec(kind="continuous", shape=(2,), low=torch.tensor([-1.0, 0.0]), high=torch.tensor([1.0, torch.inf]))
    assert spec.checked(torch.tensor([[-5.0, -5.0], [5.0, 5.0]]), 2).tolist() == [[-1.0, 0.0], [1.0, 5.0]]
    with pytest.raises(ValueError, match=r"actions\[1, 0\]=nan is not finite"):
        spec.checked(torch.tensor([[0.0, 0.0], [torch.nan, 0.0]]), 2)
    with pytest.raises(ValueError, match=r"shape \[2, 0, 2\]; this environment takes \[2, C, 2\]"):
        spec.checked(torch.zeros(2, 0, 2), 2, chunk=True)


def test_tensor_field_says_what_there_is() -> None:
    observation = counters(1).reset([1])
    with pytest.raises(KeyError, match="it has instruction, state"):
        tensor_field(observation, "image.front")
    with pytest.raises(TypeError, match="text"):
        tensor_field(observation, "instruction")


def test_what_is_not_handed_out_is_not_observed() -> None:
    instances: list[Counter] = []

    def make() -> Counter:
        instances.append(Counter())
        return instances[-1]

    env = InProcessVector(make, 2, max_episode_steps=5)
    env.reset([1, 6])
    assert [row.observed for row in instances] == [1, 1]
    result = env.step_chunk(torch.tensor([[1, 1, 1], [3, 1, 3]]))  # row 1 ends at its second action
    assert result.num_steps.tolist() == [3, 2]
    assert [row.observed for row in instances] == [2, 3]
    env.restore(env.snapshot())
    assert [row.observed for row in instances] == [3, 4]
