"""The conformance suite finds what it is for: one broken environment for each rule."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlinf_envs import ActionSpec, ConformanceError, FieldSpec, Observation, StepResult
from rlinf_envs.core.vector import InProcessVector, SingleObservation, SingleStep
from rlinf_envs.testing import check_env, sample_actions


class Walk:
    """A number that starts by the seed and moves by the action; the episode ends beyond 3."""

    action_spec = ActionSpec(kind="continuous", shape=(1,), low=torch.tensor([-1.0]), high=torch.tensor([2.0]))
    observation_spec: Mapping[str, FieldSpec] = {"state": FieldSpec(shape=(2,), dtype="float32")}
    notes: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.place, self.pace = 0.0, 1.0

    def observe(self) -> SingleObservation:
        return {"state": np.array([self.place, self.pace], dtype=np.float32)}

    def reset(self, seed: int) -> None:
        self.place, self.pace = float(np.random.default_rng(seed).uniform(-1, 1)), 1.0

    def step(self, action: np.ndarray) -> SingleStep:
        self.place += self.pace * float(action[0])
        solved = self.place > 3
        return SingleStep(reward=self.place, terminated=solved, truncated=False, success=solved)

    def render(self) -> np.ndarray:
        return np.zeros((4, 4, 3), dtype=np.uint8)

    def close(self) -> None:
        pass


def walks() -> InProcessVector:
    return InProcessVector(Walk, 3, max_episode_steps=15)


def test_a_good_environment_passes() -> None:
    check_env(walks)


class WithExpert(Walk):
    def expert_actions(self, num_actions: int) -> np.ndarray:
        return np.full((num_actions, 1), 5.0)  # beyond the bounds, to which it is clipped


class MovesWhenAsked(WithExpert):
    def expert_actions(self, num_actions: int) -> np.ndarray:
        self.place += 0.01
        return super().expert_actions(num_actions)


class TooBrief(WithExpert):
    def expert_actions(self, num_actions: int) -> np.ndarray:
        return super().expert_actions(1)


def test_an_environment_with_an_expert_passes() -> None:
    check_env(lambda: InProcessVector(WithExpert, 3, max_episode_steps=15))


class KeepsItsPace(Walk):
    """A reset that forgets to reset."""

    def reset(self, seed: int) -> None:
        pace = self.pace
        super().reset(seed)
        self.pace = pace * 1.01


class Deaf(Walk):
    def reset(self, seed: int) -> None:
        super().reset(0)


_STEPS_OF_ALL = 0


class Gossip(Walk):
    """What one row does changes the others."""

    def step(self, action: np.ndarray) -> SingleStep:
        global _STEPS_OF_ALL
        _STEPS_OF_ALL += 1
        self.pace = 1.0 + 1e-6 * (_STEPS_OF_ALL % 7)
        return super().step(action)


class BadPicture(Walk):
    def render(self) -> np.ndarray:
        return np.zeros((4, 4), dtype=np.uint8)


class WideState(Walk):
    observation_spec: Mapping[str, FieldSpec] = {"state": FieldSpec(shape=(3,), dtype="float32")}


class OddField(Walk):
    observation_spec: Mapping[str, FieldSpec] = {"smell": FieldSpec(shape=(2,), dtype="float32")}


class Lying(InProcessVector):
    """A batch whose results are changed on their way out."""

    def __init__(self, change: Callable[[StepResult], dict[str, Any]], *, in_chunks: bool = False) -> None:
        super().__init__(Walk, 3, max_episode_steps=15)
        self._change, self._in_chunks = change, in_chunks

    def step(self, actions: Tensor) -> StepResult:
        result = super().step(actions)
        return result if self._in_chunks else dataclasses.replace(result, **self._change(result))

    def step_chunk(self, actions: Tensor) -> StepResult:
        result = super().step_chunk(actions)
        return dataclasses.replace(result, **self._change(result)) if self._in_chunks else result


class Careless(InProcessVector):
    """Takes whatever it is given."""

    def __init__(self) -> None:
        super().__init__(Walk, 3, max_episode_steps=15)

    def reset(self, seeds: Sequence[int]) -> Observation:
        return super().reset((list(seeds) * 3)[: self.num_envs])


class Unclosable(InProcessVector):
    def __init__(self) -> None:
        super().__init__(Walk, 3, max_episode_steps=15)

    def close(self) -> None:
        pass


class Forgetful(InProcessVector):
    """Its snapshots lack the actions."""

    def __init__(self) -> None:
        super().__init__(Walk, 3, max_episode_steps=15)

    def snapshot(self) -> Any:
        return tuple(dataclasses.replace(row, actions=row.actions[:0]) for row in super().snapshot())


def changed_end(result: StepResult, **changes: Any) -> dict[str, Any]:
    return {"episodes": tuple(dataclasses.replace(end, **changes) for end in result.episodes)}


def of(single: type[Walk]) -> Callable[[], InProcessVector]:
    return lambda: InProcessVector(single, 3, max_episode_steps=15)


def lie(change: Callable[[StepResult], dict[str, Any]], *, in_chunks: bool = False) -> Callable[[], Lying]:
    return lambda: Lying(change, in_chunks=in_chunks)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (of(KeepsItsPace), "reset must forget what ran before: after reset, state"),
        (of(Deaf), "different seeds gave the same observations"),
        (of(Gossip), "rows must not depend on each other"),
        (of(BadPicture), r"render\(\) gave"),
        (of(MovesWhenAsked), "asking the expert must change nothing: at step 0"),
        (of(TooBrief), "it named 1 actions, and 2 were asked for"),
        (of(WideState), r"env 0: its observation 'state' has the shape \[2\]; its observation_space says \[3\]"),
        (of(OddField), "observation field 'smell'"),
        (lambda: InProcessVector(Walk, 1, max_episode_steps=100), "no episode ended in 4 steps"),
        (lie(lambda r: {"rewards": r.rewards.double()}), r"rewards is \[3\] torch.float64"),
        (lie(lambda r: {"terminated": r.terminated.long()}), "terminated is .*int64"),
        (lie(lambda r: {"truncated": r.truncated | r.terminated}), "both terminated and truncated"),
        (lie(lambda r: {"episodes": ()}), r"episodes tells of envs \[\]"),
        (lie(lambda r: {"num_steps": r.num_steps + 1}), "num_steps is"),
        (lie(lambda r: {"final_observation": {"state": r.final_observation["state"] + 1}}), "must equal observation"),  # type: ignore[operator]
        (lie(lambda r: changed_end(r, seed=5)), r"has seed 5; episode_seed\("),
        (lie(lambda r: changed_end(r, length=99)), "has length 99"),
        (lie(lambda r: changed_end(r, return_=1e6)), r"has return_ 1000000.0; its rewards add up"),
        (lie(lambda r: changed_end(r, episode_index=77)), "has episode_index 77"),
        (lie(lambda r: changed_end(r, success_once=False, success_at_end=True)), "success at the end, but not once"),
        (lie(lambda r: changed_end(r, success_once=None)), "only one kind of success"),
        (lie(lambda r: {"observation": r.final_observation}), "must begin like reset"),
        (lie(lambda r: {"rewards": r.rewards + 1}, in_chunks=True), "step_chunk of 1 actions, env 0: rewards"),
        (lie(lambda r: {"num_steps": r.num_steps * 0 + 1}, in_chunks=True), "num_steps is 1; step by step it was"),
        (lie(lambda r: {"rewards": r.rewards[:, 0]}, in_chunks=True), r"step_chunk: rewards \[3\]"),
        (Careless, "reset with a seed too few must raise"),
        (Unclosable, "reset after close must raise"),
        (Forgetful, "what follows a restore must be what followed the snapshot"),
    ],
)
def test_each_broken_rule_is_named(make: Callable[[], InProcessVector], text: str) -> None:
    with pytest.raises(ConformanceError, match=text):
        check_env(make, num_steps=4 if "in 4 steps" in text else 40)


def test_all_violations_are_told_together() -> None:
    with pytest.raises(ConformanceError) as caught:
        check_env(of(type("Both", (Deaf, BadPicture), {})))
    assert str(caught.value).startswith("2 rule(s) of BatchedEnv broken:\n- different seeds")
    assert "\n- render() gave" in str(caught.value)


def test_equal_seeds_may_be_meant() -> None:
    check_env(of(Deaf), seeds_matter=False)


def test_an_exception_is_a_finding_not_an_end() -> None:
    class Fragile(InProcessVector):
        def render(self) -> Tensor:
            raise KeyError("camera")

    with pytest.raises(ConformanceError, match="render: raised KeyError: 'camera'"):
        check_env(lambda: Fragile(Walk, 2, max_episode_steps=15))


def test_sampled_actions_stay_in_bounds() -> None:
    inf = torch.inf
    low, high = torch.tensor([-inf, 0.0, -inf, -3.0]), torch.tensor([inf, inf, 5.0, -2.0])
    spec = ActionSpec(kind="continuous", shape=(4,), low=low, high=high)
    sampled = sample_actions(spec, (1000,), torch.Generator().manual_seed(0))
    assert (sampled.amin(0) >= torch.tensor([-1.0, 0.0, 3.0, -3.0])).all()
    assert (sampled.amax(0) <= torch.tensor([1.0, 2.0, 5.0, -2.0])).all()
    choices = ActionSpec(kind="discrete", shape=(2,), low=torch.tensor([1, 0]), high=torch.tensor([3, 0]))
    sampled = sample_actions(choices, (1000,), torch.Generator().manual_seed(0))
    assert sampled.amin(0).tolist() == [1, 0]
    assert sampled.amax(0).tolist() == [3, 0]


class Strict(Walk):
    """Ends after three steps and takes no more."""

    def step(self, action: np.ndarray) -> SingleStep:
        if self.place > 3:
            raise RuntimeError("step() after terminated")
        return super().step(action)


def patient(maker: type[Walk], *, ends_for_good: bool) -> Callable[[], InProcessVector]:
    options: dict[str, Any] = {"max_episode_steps": 15, "ignore_terminations": True, "ends_for_good": ends_for_good}
    return lambda: InProcessVector(maker, 3, **options)


def test_steps_after_an_end_are_for_environments_that_define_them() -> None:
    check_env(patient(Walk, ends_for_good=False))
    with pytest.raises(
        ConformanceError, match=r"^1 rule.*\n- env \d was stepped after the end of its episode: action"
    ) as e:
        check_env(patient(Walk, ends_for_good=True))
    assert "make it without ignore_terminations" in str(e.value)
    with pytest.raises(
        ConformanceError, match=r"had ended the episode after \d+ actions, and ignore_terminations=True"
    ):
        check_env(patient(Strict, ends_for_good=True))
    check_env(lambda: InProcessVector(Strict, 3, max_episode_steps=15, ends_for_good=True))
