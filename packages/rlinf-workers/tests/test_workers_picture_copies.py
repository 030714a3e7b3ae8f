"""Pixels from a simulator's buffer to the policy's batch, with every copy on the way counted in bytes.

Counted are what numpy takes (a copy needs memory), what operations of torch write, what the channel copies, and what
lies in the pool. Env and policy run in one thread, so that nothing escapes the counters. What a simulator's process
copies is counted in test_envs_subprocess.py, MuJoCo's pictures in test_envs_metaworld.py.
"""

import os
import tracemalloc
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rlinf_comm import Channel
from rlinf_comm.testing import assert_bitwise_equal
from rlinf_envs import ActionSpec, EnvSpec, FieldSpec, episode_seed
from rlinf_workers.policies.base import PolicySettings
from rlinf_workers.policies.cnn.policy import CnnActorCritic
from rlinf_workers.roles.embodied.environment import Environment, EnvironmentSettings, training_seeds
from rlinf_workers.roles.embodied.rollout import EmbodiedRollout
from rlinf_workers.roles.picture_pool import PicturePool
from rlinf_workers.roles.records.embodied import Action

SIDE, NUM_ENVS, NUM_STEPS = 160, 3, 6
PICTURE_BYTES = SIDE * SIDE * 3
BATCH_BYTES = NUM_ENVS * PICTURE_BYTES
NUM_BATCHES = 9
"""A reset and six steps, and the last pictures of the episodes that end after the third and the sixth."""

SIMULATOR = '''
import gymnasium as gym
import numpy as np

class Camera(gym.Env):
    """Draws into its own two buffers by turns, rows from below, and shows a view."""
    action_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
    observation_space = gym.spaces.Box(0, 255, (160, 160, 3), np.uint8)

    def __init__(self):
        self.buffers = np.zeros((2, 160, 160, 3), np.uint8)
        self.pattern = np.arange(160 * 160 * 3).reshape(160, 160, 3).astype(np.uint8)

    def draw(self):
        self.time += 1
        buffer = self.buffers[self.time % 2]
        np.add(self.pattern, np.uint8((self.shade + 31 * self.time) % 256), out=buffer)
        return buffer[::-1]

    def reset(self, *, seed=None, options=None):
        self.shade, self.time = seed % 251, 0
        return self.draw(), {}

    def step(self, action):
        return self.draw(), 0.0, False, False, {}
'''

SPEC = EnvSpec(kind="import", id="simulator_of_pixels:Camera", num_envs=NUM_ENVS, max_episode_steps=NUM_STEPS // 2)
POLICY = PolicySettings(
    name=f"{__name__}:Looks",
    fields={"image.main": FieldSpec(shape=(SIDE, SIDE, 3), dtype="uint8")},
    actions=ActionSpec(kind="continuous", shape=(2,), low=-torch.ones(2), high=torch.ones(2)),
    options={"hidden_size": 8},
)
SEEN: list[torch.Tensor] = []


class Looks(CnnActorCritic):
    """Keeps the tensors that it is shown."""

    def act(self, fields, noise):
        SEEN.append(fields["image.main"])
        return super().act(fields, noise)


@dataclass
class Copied:
    """Bytes, by who copied them."""

    numpy: int = 0
    """The most that was taken at one time."""
    torch: int = 0
    channel: int = 0


class TorchCopies(TorchDispatchMode):
    """Counts uint8 results of operations that are no views of their arguments, and copies into place."""

    def __init__(self, copied):
        super().__init__()
        self.copied = copied

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        addresses = {value.untyped_storage().data_ptr() for value in args if isinstance(value, torch.Tensor)}
        if isinstance(result, torch.Tensor) and result.dtype == torch.uint8:
            is_view = result.untyped_storage().data_ptr() in addresses and func is not torch.ops.aten.copy_.default
            self.copied.torch += 0 if is_view else result.nbytes
        return result


class Partner:
    """The policy's side of both ports: what is put goes through a channel to the policy of a rollout."""

    def __init__(self, rollout, copied):
        self.rollout, self.copied, self.waiting = rollout, copied, []
        self.channel = Channel.create("observations")

    def put_many(self, items):
        for _, observation in items:
            self.channel.put(observation)
            (item,) = self.channel.take()
            self.copied.channel += item.nbytes
            answer, _ = self.rollout._answer(item.value, True)
            if not item.value.is_last:
                self.waiting.append(Action(group=0, time=item.value.time, actions=answer.actions))

    def next_chunk(self, at_most):
        taken, self.waiting = self.waiting[:at_most], self.waiting[at_most:]
        return taken


@pytest.fixture
def run(make_worker, tmp_path, monkeypatch):
    """Runs a segment: what was copied, what the policy saw, and the pool that it lies in."""
    (tmp_path / "simulator_of_pixels.py").write_text(SIMULATOR)
    monkeypatch.syspath_prepend(str(tmp_path))
    rollout = make_worker(EmbodiedRollout, POLICY)
    settings = EnvironmentSettings(
        spec=SPEC, num_groups=1, num_steps=NUM_STEPS, reads=("image.main",), num_eval_episodes=1, eval_seed=0
    )

    def run(num_processes=0, *, has_pool=True):
        if not has_pool:
            monkeypatch.setattr(Environment, "_picture_pool", lambda self: None)
        spec = replace(SPEC, num_processes=num_processes)
        worker = make_worker(Environment, replace(settings, spec=spec))
        if worker._threads is not None:
            worker._threads.shutdown()
            worker._threads = None  # its groups are stepped by this thread
        for _ in range(2):  # what is imported or made but once is not counted
            SEEN.clear()
            copied = Copied()
            partner = Partner(rollout, copied)
            tracemalloc.start()
            with torch.no_grad(), TorchCopies(copied):
                worker.interact(partner, partner)
            copied.numpy = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        worker.close()
        return copied, list(SEEN), worker._pictures

    yield run
    SEEN.clear()


def drawn():
    """What the simulator draws, batch by batch."""
    pattern = np.arange(SIDE * SIDE * 3).reshape(SIDE, SIDE, 3).astype(np.uint8)[::-1]
    seeds = training_seeds(0, 0, 0, NUM_ENVS)
    for episode, time in ((0, 1), (0, 2), (0, 3), (1, 1), (0, 4), (1, 2), (1, 3), (2, 1), (1, 4)):
        shades = [(episode_seed(seed, episode) % 251 + 31 * time) % 256 for seed in seeds]
        yield torch.from_numpy(np.stack([pattern + np.uint8(shade) for shade in shades]))


@pytest.mark.parametrize("num_processes", [0, 2])
def test_a_picture_is_copied_once_on_its_way_to_the_policy(run, num_processes):
    """Into the pool, where the policy reads it; and what it saw is as it was, however long it is kept."""
    copied, seen, pool = run(num_processes)
    assert copied.numpy < PICTURE_BYTES, "Python's own objects"
    assert copied.torch == 0
    assert copied.channel < PICTURE_BYTES, "all but the pictures"
    assert len(seen) == NUM_BATCHES
    assert all(0 <= pool.offset(pictures) < os.fstat(pool.fd).st_size for pictures in seen)
    assert pool._pool.stats().used_bytes == NUM_BATCHES * BATCH_BYTES
    for pictures, expected in zip(seen, drawn(), strict=True):
        assert_bitwise_equal(pictures, expected)


def test_the_counters_see_the_copies_that_a_pool_saves(run):
    """Without one the rows are stacked, and the channel copies the stack."""
    copied, seen, pool = run(has_pool=False)
    assert pool is None
    assert copied.numpy > BATCH_BYTES
    assert NUM_BATCHES * BATCH_BYTES < copied.channel < (NUM_BATCHES + 1) * BATCH_BYTES
    for pictures, expected in zip(seen, drawn(), strict=True):
        assert_bitwise_equal(pictures, expected)


def test_a_pool_without_room_says_so_once_and_gives_what_comes_back():
    notes = []
    pool = PicturePool(notes.append, capacity_bytes=3 << 12)
    held = [tensor for tensor in (pool.empty((1 << 12,)), pool.empty((1 << 12,))) if tensor is not None]
    assert len(held) == 2
    assert [pool.empty((2 << 12,)), pool.empty((1 << 20,))] == [None, None]
    assert len(notes) == 1
    assert "pictures are copied into their channel, because their pool is full" in notes[0]
    address = held.pop().data_ptr()
    again = pool.empty((1 << 12,))
    assert again is not None
    assert again.data_ptr() == address
