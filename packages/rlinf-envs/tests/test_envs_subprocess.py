"""Rows in several processes: the same numbers, no remains, and a cause when something breaks.

Children are new interpreters that import torch (a second or so each), so the tests share them where they can.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import mmap
import os
import re
import signal
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from rlinf_envs import (
    ActionSpec,
    EnvCrashedError,
    EnvError,
    EnvSpec,
    FieldSpec,
    Observation,
    Replayable,
    SupportsBegin,
    has_expert,
    make_env,
    tensor_field,
)
from rlinf_envs.core.patience import Patience
from rlinf_envs.core.shared_block import BlockShape, SharedBlock
from rlinf_envs.core.simulator_process import SimulatorProcess
from rlinf_envs.core.subprocess_child import CommandedEnv
from rlinf_envs.core.subprocess_env import SubprocessVector
from rlinf_envs.testing import check_env, sample_actions

MODULE = '''
import os, signal, time
import gymnasium as gym
import numpy as np

class Quirky(gym.Env):
    """Sees a picture, a text and a number; does what its action says."""
    action_space = gym.spaces.Discrete(6)
    render_mode = "rgb_array"
    def __init__(self, broken=False, side=3):
        if broken:
            raise OSError("the simulator's licence has expired")
        self.observation_space = gym.spaces.Dict({
            "front": gym.spaces.Box(0, 255, (side, side, 3), np.uint8),
            "task": gym.spaces.Text(9),
            "place": gym.spaces.Box(-9, 9, (2,), np.float32),
        })
    def _observation(self):
        pixels = np.full(self.observation_space["front"].shape, int(abs(self.place[0] * 100)) % 256, np.uint8)
        return {"front": pixels, "task": f"go {self.place[1]:.2f}", "place": self.place.astype(np.float32)}
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = self.np_random.uniform(-1, 1, 2)
        return self._observation(), {}
    def step(self, action):
        if action == 3:
            raise LookupError("no such joint")
        if action == 4:
            os.kill(os.getpid(), signal.SIGSEGV)
        if action == 5:
            time.sleep(60)
        self.place = self.place + 0.3 * (action - 1)
        return self._observation(), float(self.place[0]), abs(self.place[0]) > 1, False, {}
    def expert_actions(self, num_actions):
        return [(int(abs(self.place[0]) * 100) + time) % 3 for time in range(num_actions)]
    def render(self):
        return self._observation()["front"]
'''

GOOD_ACTIONS = ActionSpec(kind="discrete", shape=(), low=torch.tensor(0), high=torch.tensor(2))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("quirky")
    (path / "rlinf_envs_quirky.py").write_text(MODULE)
    sys.path.insert(0, str(path))
    yield path
    sys.path.remove(str(path))


def quirky(num_processes: int, *, num_envs: int = 5, **options: int) -> EnvSpec:
    return EnvSpec(
        kind="import",
        id="rlinf_envs_quirky:Quirky",
        num_envs=num_envs,
        num_processes=num_processes,
        max_episode_steps=6,
        options=options,
    )


@pytest.fixture(scope="module")
def pair(folder: Path) -> Iterator[SubprocessVector]:
    env = SubprocessVector(quirky(2), timeout_s=60)
    yield env
    env.close()


def good_actions(num_steps: int, num_envs: int = 5) -> torch.Tensor:
    return sample_actions(GOOD_ACTIONS, (num_steps, num_envs), torch.Generator().manual_seed(0))


def children(env: SubprocessVector) -> list[SimulatorProcess]:
    """Returns the child processes of a vector, by rows."""
    return [part for part in env._parts if isinstance(part, SimulatorProcess)]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pids: list[int], patience_s: float = 10.0) -> list[int]:
    deadline = time.monotonic() + patience_s
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return [pid for pid in pids if is_running(pid)]


def test_the_same_numbers_as_in_one_process(pair: SubprocessVector) -> None:
    alone = make_env(quirky(0))
    assert pair.num_envs == alone.num_envs
    assert pair.observation_spec == alone.observation_spec
    assert pair.max_episode_steps == alone.max_episode_steps
    assert torch.equal(pair.action_spec.high, alone.action_spec.high)
    seeds = [3, 1, 4, 1, 5]
    got, expected = pair.reset(seeds), alone.reset(seeds)
    num_ends = 0
    for step, actions in enumerate(good_actions(30)):
        for name in expected:
            same = got[name] == expected[name]
            assert same if isinstance(same, bool) else bool(same.all()), f"{name} differs before step {step}"
        result, reference = pair.step(actions), alone.step(actions)
        assert torch.equal(result.rewards, reference.rewards)
        assert torch.equal(result.terminated, reference.terminated)
        assert torch.equal(result.truncated, reference.truncated)
        assert result.episodes == reference.episodes
        assert result.final_observation["instruction"] == reference.final_observation["instruction"]
        finals = [tensor_field(r.final_observation, "image.front") for r in (result, reference)]
        assert torch.equal(*finals)
        num_ends += len(result.episodes)
        got, expected = result.observation, reference.observation
    assert num_ends > 10
    assert torch.equal(pair.render(), alone.render())


def test_an_expert_is_asked_in_any_rows(pair: SubprocessVector) -> None:
    alone = make_env(quirky(0))
    assert has_expert(pair) and has_expert(alone)
    rows = [4, 0, 3]
    for env in (pair, alone):
        env.reset([7, 8, 9, 10, 11])
    answers = pair.expert_actions(rows, 2)
    assert answers.shape == (3, 2) and answers.dtype == torch.int64
    assert torch.equal(answers, alone.expert_actions(rows, 2))
    for position, row in enumerate(rows):
        assert torch.equal(answers[position], alone.expert_actions([row], 2)[0])
    assert len({tuple(one) for one in answers.tolist()}) > 1


def test_results_are_copies(pair: SubprocessVector) -> None:
    first = pair.reset([0] * 5)
    state = tensor_field(first, "state").clone()
    result = pair.step(torch.zeros(5, dtype=torch.int64))
    rewards = result.rewards.clone()
    pair.step(torch.full((5,), 2))
    assert torch.equal(tensor_field(first, "state"), state)
    assert torch.equal(result.rewards, rewards)


def test_a_raising_environment_is_named_with_its_traceback(pair: SubprocessVector) -> None:
    pair.reset([0] * 5)
    with pytest.raises(EnvCrashedError) as caught:
        pair.step(torch.tensor([1, 1, 1, 1, 3]))
    text = str(caught.value)
    assert text.startswith("env 4: step 0 of its episode failed: LookupError: no such joint")
    assert f"the process of envs 3..4 (pid {children(pair)[1].pid})" in text
    assert 'raise LookupError("no such joint")' in text
    with pytest.raises(EnvError, match="after a failure"):
        pair.step(torch.ones(5, dtype=torch.int64))
    pair.reset([0] * 5)  # the processes live on


def test_mistakes_are_told_before_anything_is_sent(pair: SubprocessVector) -> None:
    pair.reset([0] * 5)
    with pytest.raises(ValueError, match=r"actions\[4\]=9 is not in 0..5"):
        pair.step(torch.tensor([1, 1, 1, 1, 9]))
    with pytest.raises(EnvError, match=r"seeds\[2\]=-1"):
        pair.reset([0, 0, -1, 0, 0])
    with pytest.raises(EnvError, match="got 1 rows for 5"):
        pair.restore(pair.snapshot()[:1])


def test_rows_begin_one_by_one_though_a_process_is_killed(folder: Path) -> None:
    messages: list[str] = []
    pair, alone = SubprocessVector(quirky(2), timeout_s=60, on_replaced=messages.append), make_env(quirky(0))
    assert isinstance(alone, SupportsBegin)
    script: list[dict[int, int]] = [{0: 5, 3: 6}, {}, {4: 7}, {1: 9}, {}, {3: 2}, {}, {}]
    for step, (seeds, actions) in enumerate(zip(script, good_actions(len(script)), strict=True)):
        if step in (3, 5):  # before its row begins an episode, while another of its rows is in the middle of one
            os.kill(children(pair)[step // 5].pid, signal.SIGKILL)
        begun = [env.begin(seeds, alone=step == 0) for env in (pair, alone) if seeds]
        assert all(torch.equal(tensor_field(first, "state"), tensor_field(begun[1], "state")) for first in begun[:1])
        result, reference = pair.step(actions), alone.step(actions)
        assert torch.equal(result.rewards, reference.rewards)
        assert torch.equal(result.num_steps, reference.num_steps)
        assert result.episodes == reference.episodes
        assert torch.equal(*(tensor_field(r.final_observation, "state") for r in (result, reference)))
    assert len(messages) == 2
    pair.close()


@pytest.mark.slow
def test_conformance_in_two_processes() -> None:
    spec = EnvSpec(kind="gymnasium", id="CartPole-v1", num_envs=3, num_processes=2)
    check_env(lambda: make_env(spec), num_steps=30)


def test_snapshot_and_long_chunks_cross_over(pair: SubprocessVector) -> None:
    alone = make_env(quirky(0))
    actions = good_actions(12)
    for env in (pair, alone):
        env.reset(range(5))
    for count in (2, 12, 3):  # longer than the block holds, then shorter
        chunk = actions[:count].transpose(0, 1)
        result, reference = pair.step_chunk(chunk), alone.step_chunk(chunk)
        assert torch.equal(result.rewards, reference.rewards)
        assert torch.equal(result.num_steps, reference.num_steps)
        assert result.episodes == reference.episodes
    rows = pair.snapshot()
    expected = pair.step(actions[0])
    pair.restore(rows)
    again = pair.step(actions[0])
    assert torch.equal(again.rewards, expected.rewards)


def test_a_process_that_dies_again_and_again_ends_it_with_its_signal(folder: Path) -> None:
    messages: list[str] = []
    env = SubprocessVector(quirky(2, num_envs=2), timeout_s=60, on_replaced=messages.append)
    pids = [part.pid for part in children(env)]
    env.reset([0, 0])
    env.step(torch.tensor([1, 1]))
    with pytest.raises(EnvCrashedError) as caught:
        env.step(torch.tensor([1, 4]))
    text = str(caught.value)
    assert text.startswith("env 1: the process of env 1 (pid ")
    assert "was killed by SIGSEGV (its stderr may tell more) during step, 3 times in a row" in text
    assert "env 1 after 1 actions of episode 0 (seed 0)" in text
    assert len(messages) == 2
    assert wait_until_gone([*pids, *(int(pid) for line in messages for pid in re.findall(r"pid (\d+)", line))]) == []
    with pytest.raises(EnvError, match="make a new one"):
        env.reset([0, 0])


@pytest.mark.slow
def test_a_process_that_hangs_again_and_again_ends_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlinf_envs.core.simulator_process._CLOSE_PATIENCE_S", 0.2)
    messages: list[str] = []
    env = SubprocessVector(dataclasses.replace(quirky(1, num_envs=1), hang_limit_s=0.2), on_replaced=messages.append)
    (pid,) = [part.pid for part in children(env)]
    env.reset([0])
    with pytest.raises(EnvCrashedError, match=r"process of env 0 .* gave no answer to step in 0.8 s, 3 times in a row"):
        env.step(torch.tensor([5]))
    assert [re.findall(r"in ([\d.]+) s", line) for line in messages] == [["0.2"], ["0.4"]]
    assert wait_until_gone([pid]) == []


@pytest.mark.slow
def test_a_lost_process_is_replaced_and_nothing_changes(folder: Path) -> None:
    """Killed or stopped before a reset, a step, a chunk and a picture: the numbers are those without."""
    messages: list[str] = []
    lost: list[str] = []
    env, alone = SubprocessVector(quirky(2, num_envs=3), on_replaced=messages.append), make_env(quirky(0, num_envs=3))
    actions = good_actions(14, 3)

    def lose(part: int) -> None:
        pid, is_killed = children(env)[part].pid, len(lost) % 2 == 0
        lost.append(f"(pid {pid}) {'was killed by SIGKILL' if is_killed else 'gave no answer to'}")
        os.kill(pid, signal.SIGKILL if is_killed else signal.SIGSTOP)

    env._patience = Patience(longest_s=60, limit_s=0.7)
    lose(1)
    for each in (env, alone):
        each.reset([5, 6, 7])
    for step in range(8):
        if step in (3, 6):
            lose(step % 2)
        result, reference = env.step(actions[step]), alone.step(actions[step])
        assert torch.equal(result.rewards, reference.rewards)
        assert result.episodes == reference.episodes
        assert result.observation["instruction"] == reference.observation["instruction"]
        assert torch.equal(tensor_field(result.observation, "state"), tensor_field(reference.observation, "state"))
    lose(0)
    lose(1)
    result, reference = (each.step_chunk(actions[8:].transpose(0, 1)) for each in (env, alone))
    assert torch.equal(result.rewards, reference.rewards)
    assert result.episodes == reference.episodes
    lose(1)
    assert torch.equal(env.render(), alone.render())
    assert isinstance(alone, Replayable)
    for got, expected in zip(env.snapshot(), alone.snapshot(), strict=True):
        assert (got.seed, got.episode_index) == (expected.seed, expected.episode_index)
        assert torch.equal(got.actions, expected.actions)
    assert all("begun again in a new process" in line for line in messages)
    assert all(any(loss in line for line in messages) for loss in lost)
    env.close()


def test_what_cannot_return_is_not_replaced(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env = SubprocessVector(quirky(1, num_envs=1), timeout_s=60)
    env._replaceable = False
    env.reset([0])
    os.kill(children(env)[0].pid, signal.SIGKILL)
    with pytest.raises(EnvCrashedError, match="was killed by SIGKILL"):
        env.step(torch.tensor([1]))


def test_patience_is_learned() -> None:
    patience = Patience(longest_s=300)
    assert patience.limit_s("step", 4, num_losses=0) == 300
    patience.took("step", 4, 8.0)
    patience.took("step", 1, 0.5)
    assert patience.limit_s("step", 3, num_losses=0) == 20 * 3 * 2.0
    assert patience.limit_s("step", 3, num_losses=1) == 240
    assert patience.limit_s("step", 9, num_losses=0) == 300
    patience.took("reset", 1, 0.001)
    assert patience.limit_s("reset", 1, num_losses=0) == 20
    assert Patience(longest_s=300, limit_s=2).limit_s("step", 9, num_losses=1) == 4
    assert Patience(longest_s=300, limit_s=2).limit_s(None, 1, num_losses=0) == 300


def test_patience_with_starts_and_returns() -> None:
    """A simulator that is stopped while it is started again, or brought back, is noticed too."""
    patience, fixed = Patience(longest_s=300), Patience(longest_s=300, limit_s=2)
    assert patience.limit_s("make", 1, num_losses=0) == 300
    for each in (patience, fixed):
        each.took("make", 1, 7.0)
        assert each.limit_s("make", 1, num_losses=0) == 28
        assert each.limit_s("make", 1, num_losses=1) == 56
    patience.took("step", 1, 0.5)
    patience.took("reset", 1, 0.1)
    assert patience.limit_of_return_s(2, 8, num_losses=0) == 20 + 20 * 8 * 0.5
    assert fixed.limit_of_return_s(2, 8, num_losses=0) == 6
    assert fixed.limit_of_return_s(2, 8, num_losses=1) == 12


def test_an_interrupted_call_ends_the_children(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their answers would be taken for those to the next command."""
    env = SubprocessVector(quirky(1, num_envs=1), timeout_s=60)
    (pid,) = [part.pid for part in children(env)]

    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("rlinf_envs.core.subprocess_env.wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        env.reset([0])
    monkeypatch.undo()
    assert wait_until_gone([pid]) == []
    with pytest.raises(EnvError, match="closed"):
        env.reset([0])


def test_what_cannot_be_made_is_told_as_in_one_process(folder: Path) -> None:
    with pytest.raises(EnvError, match="no environment 'CartPol-v1'"):
        SubprocessVector(EnvSpec(kind="gymnasium", id="CartPol-v1", num_envs=1, num_processes=1))
    with pytest.raises(EnvCrashedError, match="make failed: OSError: the simulator's licence"):
        SubprocessVector(quirky(1, broken=True))


def test_nothing_is_left_when_it_is_collected(folder: Path) -> None:
    env = SubprocessVector(quirky(1, num_envs=1), timeout_s=60)
    (part,) = children(env)
    pid, files = part.pid, [part.connection.fileno(), part._child.lifeline_fd, part.memory_fd]
    opened = [os.fstat(fd).st_ino for fd in files]
    del env, part
    gc.collect()
    assert wait_until_gone([pid]) == []
    for fd, inode in zip(files, opened, strict=True):  # closed, or its number used again for something else
        assert not os.path.exists(f"/proc/self/fd/{fd}") or os.fstat(fd).st_ino != inode


@pytest.mark.parametrize("in_thread", [False, True])
def test_children_die_with_a_killed_parent_even_while_busy(folder: Path, in_thread: bool) -> None:
    program = f"""
import sys, threading, torch
sys.path.insert(0, {str(folder)!r})
from rlinf_envs import EnvSpec
from rlinf_envs.core.subprocess_env import SubprocessVector
def use():
    env = SubprocessVector({quirky(1, num_envs=1)!r})
    env.reset([0])
    print("pids", *[part.pid for part in env._parts], flush=True)
    env.step(torch.tensor([5]))  # sleeps for a minute
if {in_thread}:
    threading.Thread(target=use).start()
else:
    use()
"""
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout:
        pids = [int(pid) for pid in re.findall(r"\d+", parent.stdout.readline())]
    assert len(pids) == 1
    time.sleep(0.2)  # let the child go to sleep in its step
    assert is_running(pids[0])
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert wait_until_gone(pids) == []


def test_a_finished_thread_does_not_take_its_children_along(folder: Path) -> None:
    import threading

    vectors: list[SubprocessVector] = []
    maker = threading.Thread(target=lambda: vectors.append(SubprocessVector(quirky(1, num_envs=1), timeout_s=60)))
    maker.start()
    maker.join()
    time.sleep(0.1)
    assert tensor_field(vectors[0].reset([0]), "state").shape == (1, 2)
    vectors[0].close()


def test_shared_block_is_seen_by_both_sides_and_grows() -> None:
    fd = os.memfd_create("test")
    spec = ActionSpec(kind="continuous", shape=(3,), low=-torch.ones(3), high=torch.ones(3))
    fields = {"image.a": FieldSpec(shape=(5, 5, 3), dtype="uint8"), "instruction": FieldSpec(shape=(), dtype="text")}

    def shape(num_actions: int) -> BlockShape:
        return BlockShape(num_rows=2, num_actions=num_actions, action_spec=spec, observation_spec=fields)

    ours, theirs = SharedBlock(fd, shape(1)), SharedBlock(fd, shape(1))
    for number, name in enumerate(ours.shape.arrays()):
        ours[name][...] = number % 2 if ours[name].dtype == np.bool_ else number
    for number, name in enumerate(ours.shape.arrays()):  # all written before any is read: none may overlap another
        assert (theirs[name] == (number % 2 if ours[name].dtype == np.bool_ else number)).all(), name
    assert list(ours.fields("observation")) == ["image.a"]
    size = os.fstat(fd).st_size
    SharedBlock(fd, shape(50))["actions"][:] = 1.0
    assert os.fstat(fd).st_size > size
    os.close(fd)


class LentMemory:
    """Room for `num_tensors` in a file in memory, none of which is given twice."""

    def __init__(self, num_tensors: int) -> None:
        self.fd = os.memfd_create("lent")
        os.ftruncate(self.fd, 1 << 20)
        self.mapped = torch.from_numpy(np.ndarray((1 << 20,), np.uint8, buffer=mmap.mmap(self.fd, 0)))
        self.num_left, self.used = num_tensors, 0

    def empty(self, shape: Sequence[int]) -> torch.Tensor | None:
        if not self.num_left:
            return None
        self.num_left -= 1
        first, self.used = self.used, self.used + math.prod(shape)
        return self.mapped[first : self.used].view(*shape)

    def offset(self, tensor: torch.Tensor) -> int:
        return tensor.data_ptr() - self.mapped.data_ptr()

    def holds(self, tensor: torch.Tensor) -> bool:
        return 0 <= self.offset(tensor) < self.used


def test_pictures_lie_in_the_callers_memory_while_there_is_room(folder: Path) -> None:
    """A lost process writes there again; what was shown stays; without room they are shown as ever."""
    memory, alone = LentMemory(num_tensors=1 + 2 * 16), make_env(quirky(0))  # a reset's, and those of 16 steps
    env = SubprocessVector(quirky(2), pictures=memory)
    lent: list[bool] = []
    pairs: list[tuple[Observation, Observation]] = []
    got, expected = env.reset(range(5)), alone.reset(range(5))
    for step, actions in enumerate(good_actions(20)):
        if step == 7:
            os.kill(children(env)[1].pid, signal.SIGKILL)
        pairs.append((got, expected))
        result, reference = env.step(actions), alone.step(actions)
        pairs.append((result.final_observation, reference.final_observation))
        got, expected = result.observation, reference.observation
    assert any(pairs[i][0] is not pairs[i + 1][0] for i in range(1, 31, 2)), "episodes ended in lent memory"
    for one, other in pairs:
        pictures = tensor_field(one, "image.front")
        assert torch.equal(pictures, tensor_field(other, "image.front"))
        lent.append(memory.holds(pictures))
    assert lent == [True] * 33 + [False] * 7
    env.close()


def test_a_child_copies_pictures_once(folder: Path) -> None:
    """Counted in bytes that numpy takes: the environment's own picture of each row and nothing beside."""
    memory, side, num_rows = LentMemory(num_tensors=1), 200, 4
    child = CommandedEnv(os.memfd_create("block"), memory.fd)
    child.make(quirky(0, num_envs=num_rows, side=side))
    child.share(1)
    place = memory.empty((num_rows, side, side, 3))
    assert place is not None
    places = {("observation", "image.front"): memory.offset(place)}
    child.reset({}, [1] * num_rows)  # whatever is imported or made but once
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    child.reset(places, list(range(num_rows)))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (peak - before) / (side * side * 3) == pytest.approx(num_rows, abs=0.5)
    alone = make_env(quirky(0, num_envs=num_rows, side=side)).reset(range(num_rows))
    assert torch.equal(place, tensor_field(alone, "image.front"))
