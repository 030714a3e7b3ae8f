"""The child of a `SubprocessVector`: simulates some rows and executes commands until its parent exits."""

from __future__ import annotations

import ctypes
import faulthandler
import fcntl
import mmap
import os
import select
import signal
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlinf_envs.core.env_spec import EnvSpec
from rlinf_envs.core.factory import make_in_process
from rlinf_envs.core.picture_memory import ShowsInPlaces
from rlinf_envs.core.protocol import (
    BatchedEnv,
    Observation,
    Replayable,
    RowSnapshot,
    StepResult,
    begins_rows,
    has_expert,
)
from rlinf_envs.core.shared_block import BlockShape, SharedBlock
from rlinf_envs.core.simulator_process import SimulatorLost
from rlinf_envs.errors import EnvCrashedError, EnvError

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def serve(
    commands_fd: int, lifeline_fd: int, memory_fd: int, pictures_fd: int | None, *, dies_with_thread: bool
) -> None:
    """Main function of the child. `lifeline_fd` is the read end of a pipe into which the parent never writes."""
    _die_with_parent(lifeline_fd, dies_with_thread=dies_with_thread)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent handles it
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # `rlinf explain` prints the stack of a child that hangs
    torch.set_num_threads(1)  # a child uses one core; rows are too small to gain from more
    connection = Connection(commands_fd)
    child = CommandedEnv(memory_fd, pictures_fd)
    while True:
        try:
            command, arguments = connection.recv()
        except EOFError:
            return
        connection.send(answered(child, command, arguments))
        if command == "close":
            return


def _die_with_parent(lifeline_fd: int, *, dies_with_thread: bool) -> None:
    """Makes the kernel end this process when the parent's end of the lifeline closes, even inside a simulator's loop.

    The kernel signals a hang-up on a file with an owner by SIGIO, which terminates by default. PR_SET_PDEATHSIG also
    works if forked children of the parent keep the pipe open, but it follows the *thread* that started this process, so
    it is used only if that was the main thread.
    """
    if dies_with_thread:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline_fd, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline_fd, fcntl.F_SETFL, fcntl.fcntl(lifeline_fd, fcntl.F_GETFL) | os.O_ASYNC)
    poll = select.poll()
    poll.register(lifeline_fd, select.POLLIN)
    if poll.poll(0):  # the parent exited before the signal was set up
        os._exit(1)


def answered(child: CommandedEnv, command: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns ("done", result), or the data from which `subprocess_env` raises the same error in the parent. Raises:
    SimulatorLost."""
    try:
        return ("done", getattr(child, command)(*arguments))
    except SimulatorLost:
        raise
    except EnvCrashedError as error:
        return ("crashed", error.env_index, error.problem, error.trace or traceback.format_exc())
    except EnvError as error:
        return ("refused", type(error).__name__, str(error))
    except Exception as error:  # noqa: BLE001 the parent raises it
        return ("crashed", 0, f"{command} failed: {type(error).__name__}: {error}", traceback.format_exc())


class CommandedEnv:
    """One method per command. Arguments and results are plain values; tensors go through the shared block, and images
    to `places`, the offsets of this child's rows in the parent's image memory by part of the result and field."""

    def __init__(self, memory_fd: int, pictures_fd: int | None) -> None:
        self._memory_fd = memory_fd
        self._pictures = mmap.mmap(pictures_fd, 0) if pictures_fd is not None else None
        self._places: dict[tuple[str, str], Tensor] = {}
        self._env: BatchedEnv | None = None
        self._block: SharedBlock | None = None

    @property
    def env(self) -> BatchedEnv:
        assert self._env is not None, "a command came before make"
        return self._env

    @property
    def block(self) -> SharedBlock:
        assert self._block is not None, "a command came before share"
        return self._block

    def make(self, spec: EnvSpec) -> dict[str, Any]:
        self._env = self._created(spec)
        if isinstance(self._env, ShowsInPlaces):
            self._env.show_in(lambda part, name: self._places.get((part, name)))
        bounds = self._env.action_spec
        return {
            "kind": bounds.kind,
            "low": bounds.low.numpy(),
            "high": bounds.high.numpy(),
            "observation_spec": {
                name: (field.shape, field.dtype) for name, field in self._env.observation_spec.items()
            },
            "max_episode_steps": self._env.max_episode_steps,
            "notes": self._env.notes,
            "is_replayable": isinstance(self._env, Replayable),
            "begins_rows": begins_rows(self._env),
            "has_expert": has_expert(self._env),
        }

    def _created(self, spec: EnvSpec) -> BatchedEnv:
        return make_in_process(spec)

    def share(self, num_actions: int) -> None:
        """Maps the block again, with space for chunks of `num_actions`."""
        shape = BlockShape(
            num_rows=self.env.num_envs,
            num_actions=num_actions,
            action_spec=self.env.action_spec,
            observation_spec=self.env.observation_spec,
        )
        self._block = SharedBlock(self._memory_fd, shape)

    def reset(self, places: Mapping[tuple[str, str], int], seeds: list[int]) -> dict[str, list[str]]:
        self._take_places(places)
        return self._shared(self.env.reset(seeds), "observation")

    def begin(self, seeds: Mapping[int, int], alone: bool) -> dict[str, list[str]]:
        """Writes the rows that begin into the block, and returns the texts of all rows, which of the others are
        empty."""
        if not begins_rows(self.env):
            raise EnvError(f"rows of a {type(self.env).__name__} cannot begin episodes one by one")
        self._places = {}
        arrays = self.block.fields("observation")
        texts = {
            name: [""] * self.env.num_envs for name, spec in self.env.observation_spec.items() if spec.dtype == "text"
        }
        for name, value in self.env.begin(seeds, alone=alone).items():
            if isinstance(value, Tensor):
                arrays[name][list(seeds)] = value.numpy()
            else:
                first = dict(zip(seeds, value, strict=True))
                texts[name] = [first.get(row, "") for row in range(self.env.num_envs)]
        return texts

    def step(self, places: Mapping[tuple[str, str], int]) -> tuple[Any, ...]:
        self._take_places(places)
        return self._report(self.env.step(torch.from_numpy(self.block["actions"][:, 0].copy())))

    def step_chunk(self, places: Mapping[tuple[str, str], int], num_actions: int) -> tuple[Any, ...]:
        self._take_places(places)
        return self._report(self.env.step_chunk(torch.from_numpy(self.block["actions"][:, :num_actions].copy())))

    def restore(self, places: Mapping[tuple[str, str], int], rows: Sequence[tuple[Any, ...]]) -> dict[str, list[str]]:
        self._take_places(places)
        snapshots = [
            RowSnapshot(seed=seed, episode_index=index, actions=torch.from_numpy(actions), follows=follows, rests=rests)
            for seed, index, actions, follows, rests in rows
        ]
        return self._shared(self._replayable().restore(snapshots), "observation")

    def expert_actions(self, rows: list[int], num_actions: int) -> Any:
        if not has_expert(self.env):
            raise EnvError(f"a {type(self.env).__name__} has no expert (rlinf_envs.SupportsExpert)")
        return self.env.expert_actions(rows, num_actions).numpy() if rows else None

    def render(self) -> Any:
        return self.env.render().numpy()

    def close(self) -> None:
        if self._env is not None:
            self._env.close()

    def _replayable(self) -> Replayable:
        if not isinstance(self.env, Replayable):
            raise EnvError(f"a {type(self.env).__name__} offers no snapshots (rlinf_envs.core.protocol.Replayable)")
        return self.env

    def _take_places(self, places: Mapping[tuple[str, str], int]) -> None:
        """Sets the places of the current command; the parent does not reuse their memory before the answer."""
        self._places = {
            (part, name): torch.from_numpy(
                np.ndarray(self.block[f"{part}/{name}"].shape, np.uint8, buffer=self._pictures, offset=offset)
            )
            for (part, name), offset in places.items()
        }

    def _shared(self, observation: Observation, part: str) -> dict[str, list[str]]:
        """Writes an observation's tensors into the block and its images into their places, unless the environment wrote
        them there itself; returns its texts."""
        texts: dict[str, list[str]] = {}
        arrays = self.block.fields(part)
        for name, value in observation.items():
            place = self._places.get((part, name))
            if not isinstance(value, Tensor):
                texts[name] = value
            elif place is None:
                arrays[name][...] = value.numpy()
            elif value is not place:
                place.copy_(value)
        return texts

    def _report(self, result: StepResult) -> tuple[Any, ...]:
        """Writes a result into the block and returns the rest: texts, final texts, episodes."""
        rewards = result.rewards.numpy().reshape(self.env.num_envs, -1)
        self.block["rewards"][:, : rewards.shape[1]] = rewards
        for name in ("terminated", "truncated", "num_steps"):
            self.block[name][...] = getattr(result, name).numpy()
        texts = self._shared(result.observation, "observation")
        final_texts = self._shared(result.final_observation, "final_observation") if result.episodes else texts
        return texts, final_texts, result.episodes
