"""The rows of one `BatchedEnv` spread over several processes of this machine, to use its cores.

Commands go over a socket, tensors through shared memory (`shared_block`). Children are fresh interpreters started by
`subprocess` (not `multiprocessing`: the calling program's main module is not run again, and daemonic processes may have
them too). They end with their parent, whatever ends it. The numbers are those of the same environment in one process.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from rlinf_envs import errors
from rlinf_envs.described import Described
from rlinf_envs.errors import EnvCrashedError, EnvError
from rlinf_envs.protocol import ActionSpec, FieldSpec, Observation, RowSnapshot, StepResult
from rlinf_envs.seeding import checked_seeds
from rlinf_envs.shared_block import BlockShape, SharedBlock
from rlinf_envs.spec import EnvSpec

_CLOSE_PATIENCE_S = 5.0  # a simulator that does not close in this time is killed


@dataclasses.dataclass(kw_only=True, slots=True)
class _Part:
    """One child and the rows it holds."""

    rows: range
    process: subprocess.Popen[bytes]
    connection: Connection
    lifeline_fd: int
    """Our end of a pipe that is never written to; closing it ends the child."""
    memory_fd: int
    block: SharedBlock | None = None

    @property
    def where(self) -> str:
        rows = f"env {self.rows[0]}" if len(self.rows) == 1 else f"envs {self.rows[0]}..{self.rows[-1]}"
        return f"the process of {rows} (pid {self.process.pid})"


class SubprocessVector(Described):
    """`spec.num_envs` rows in `spec.num_processes` processes, in order and as evenly as it goes.

    `timeout_s` bounds every answer, making included; a child that exceeds it is reported and all are ended.
    """

    def __init__(self, spec: EnvSpec, *, timeout_s: float = 300.0) -> None:
        self._timeout_s = timeout_s
        self._parts: list[_Part] = []
        self._closed = False
        self._is_reset = False
        self._num_envs = spec.num_envs
        sizes = [len(rows) for rows in np.array_split(np.arange(spec.num_envs), spec.num_processes)]
        starts = np.cumsum([0, *sizes]).tolist()
        # Ends the children when this object is collected or the interpreter exits without close().
        self._finalizer = weakref.finalize(self, _end, self._parts)
        try:
            for start, size in zip(starts, sizes, strict=False):
                self._parts.append(_started(range(start, start + size)))
            part_specs = [dataclasses.replace(spec, num_envs=size, num_processes=1) for size in sizes]
            self._take_specs(self._call("make", [(part_spec,) for part_spec in part_specs]))
            self._share(num_actions=1)
        except BaseException:
            self.close()
            raise

    def reset(self, seeds: Sequence[int]) -> Observation:
        self._require_open()
        values = checked_seeds(seeds, self.num_envs)
        texts = self._call("reset", [(values[part.rows.start : part.rows.stop],) for part in self._parts])
        self._is_reset = True
        return self._joined("observation", texts)

    def step(self, actions: Tensor) -> StepResult:
        self._require_reset("step")
        checked = self._action_spec.checked(actions, self.num_envs)
        for part, block in self._blocks():
            block["actions"][:, 0] = checked[part.rows.start : part.rows.stop]
        return self._result(self._call("step"), num_actions=None)

    def step_chunk(self, actions: Tensor) -> StepResult:
        self._require_reset("step_chunk")
        checked = self._action_spec.checked(actions, self.num_envs, chunk=True)
        num_actions = checked.shape[1]
        if num_actions > self._blocks()[0][1].shape.num_actions:
            self._share(num_actions)
        for part, block in self._blocks():
            block["actions"][:, :num_actions] = checked[part.rows.start : part.rows.stop]
        return self._result(self._call("step_chunk", [(num_actions,)] * len(self._parts)), num_actions=num_actions)

    def snapshot(self) -> tuple[RowSnapshot, ...]:
        self._require_reset("snapshot")
        rows = [row for part_rows in self._call("snapshot") for row in part_rows]
        return tuple(
            RowSnapshot(seed=seed, episode_index=index, actions=torch.from_numpy(actions))
            for seed, index, actions in rows
        )

    def restore(self, rows: Sequence[RowSnapshot]) -> Observation:
        self._require_open()
        if len(rows) != self.num_envs:
            raise EnvError(f"restore got {len(rows)} rows for {self.num_envs} environments")
        plain = [(row.seed, row.episode_index, row.actions.numpy()) for row in rows]
        texts = self._call("restore", [(plain[part.rows.start : part.rows.stop],) for part in self._parts])
        self._is_reset = True
        return self._joined("observation", texts)

    def render(self) -> Tensor:
        self._require_reset("render")
        return torch.from_numpy(np.concatenate(self._call("render")))

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._finalizer()

    def _take_specs(self, told: list[dict[str, Any]]) -> None:
        first = told[0]
        self._action_spec = ActionSpec(
            kind=first["kind"],
            shape=first["low"].shape,
            low=torch.from_numpy(first["low"]),
            high=torch.from_numpy(first["high"]),
        )
        self._observation_spec = {
            name: FieldSpec(shape=shape, dtype=dtype) for name, (shape, dtype) in first["observation_spec"].items()
        }
        self._max_episode_steps = first["max_episode_steps"]
        self._notes = tuple(dict.fromkeys(note for part in told for note in part["notes"]))

    def _share(self, num_actions: int) -> None:
        for part in self._parts:
            shape = BlockShape(
                num_rows=len(part.rows),
                num_actions=num_actions,
                action_spec=self._action_spec,
                observation_spec=self._observation_spec,
            )
            part.block = SharedBlock(part.memory_fd, shape)
        self._call("share", [(num_actions,)] * len(self._parts))

    def _blocks(self) -> list[tuple[_Part, SharedBlock]]:
        return [(part, part.block) for part in self._parts if part.block is not None]

    def _call(self, command: str, arguments: Sequence[tuple[Any, ...]] | None = None) -> list[Any]:
        """Send one command to every child, wait for all answers; the first error (by row) is raised after that."""
        try:
            answers = self._exchanged(command, arguments or [()] * len(self._parts))
        except BaseException:  # Ctrl-C too: an answer left unread would be taken for the next command's
            self.close()
            raise
        return [self._checked_answer(part, answers[part.rows.start]) for part in self._parts]

    def _exchanged(self, command: str, arguments: Sequence[tuple[Any, ...]]) -> dict[int, tuple[Any, ...]]:
        """Every child's answer, by its first row."""
        for part, part_arguments in zip(self._parts, arguments, strict=True):
            try:
                part.connection.send((command, part_arguments))
            except OSError:
                self._fail_dead(part, command)
        waiting = {part.connection: part for part in self._parts}
        answers: dict[int, tuple[Any, ...]] = {}
        deadline = time.monotonic() + self._timeout_s
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                names = ", ".join(part.where for part in waiting.values())
                first_row = min(part.rows.start for part in waiting.values())
                raise EnvCrashedError(first_row, f"{names} gave no answer to {command} in {self._timeout_s:g} s; ended")
            for connection in ready:
                assert isinstance(connection, Connection), "wait gives back what it was given"
                part = waiting.pop(connection)
                try:
                    answers[part.rows.start] = connection.recv()
                except (EOFError, OSError):
                    self._fail_dead(part, command)
        return answers

    def _checked_answer(self, part: _Part, answer: tuple[Any, ...]) -> Any:
        if answer[0] == "done":
            return answer[1]
        self._is_reset = False
        if answer[0] == "refused":
            raise getattr(errors, answer[1])(answer[2])
        _, env_index, problem, trace = answer
        raise EnvCrashedError(part.rows.start + env_index, f"{problem}\nin {part.where}:\n{trace.rstrip()}")

    def _fail_dead(self, part: _Part, command: str) -> NoReturn:
        try:
            status = part.process.wait(_CLOSE_PATIENCE_S)
        except subprocess.TimeoutExpired:
            status = None  # it closed its socket and lives: nothing we can talk to any more
        ended = (
            f"was killed by {signal.Signals(-status).name}" if status and status < 0 else f"ended with code {status}"
        )
        raise EnvCrashedError(part.rows.start, f"{part.where} {ended} during {command}; its stderr may tell more")

    def _result(self, told: list[Any], *, num_actions: int | None) -> StepResult:
        blocks = [block for _, block in self._blocks()]
        episodes = tuple(
            dataclasses.replace(end, env_index=part.rows.start + end.env_index)
            for part, (_, _, ends) in zip(self._parts, told, strict=True)
            for end in ends
        )
        rewards = np.concatenate([block["rewards"][:, : num_actions or 1] for block in blocks])
        observation = self._joined("observation", [texts for texts, _, _ in told])
        return StepResult(
            observation=observation,
            rewards=torch.from_numpy(rewards if num_actions else rewards[:, 0].copy()),
            terminated=torch.from_numpy(np.concatenate([block["terminated"] for block in blocks])),
            truncated=torch.from_numpy(np.concatenate([block["truncated"] for block in blocks])),
            num_steps=torch.from_numpy(np.concatenate([block["num_steps"] for block in blocks])),
            final_observation=self._final(told) if episodes else observation,
            episodes=episodes,
        )

    def _final(self, told: list[Any]) -> Observation:
        # A child in which nothing ended has not written its final observation: it is its observation.
        parts = ["final_observation" if ends else "observation" for _, _, ends in told]
        return self._joined(parts, [texts for _, texts, _ in told])

    def _joined(self, part: str | list[str], texts: list[dict[str, list[str]]]) -> Observation:
        """Copies of the children's rows, one after the other; `part` may differ from child to child."""
        blocks = [block for _, block in self._blocks()]
        parts = [part] * len(blocks) if isinstance(part, str) else part
        fields = [block.fields(name) for block, name in zip(blocks, parts, strict=True)]
        observation: Observation = {}
        for name, spec in self._observation_spec.items():
            if spec.dtype == "text":
                observation[name] = [text for child_texts in texts for text in child_texts[name]]
            else:
                observation[name] = torch.from_numpy(np.concatenate([child[name] for child in fields]))
        return observation

    def _require_open(self) -> None:
        if self._closed:
            raise EnvError("this environment is closed (or a process of it died); make a new one")

    def _require_reset(self, doing: str) -> None:
        self._require_open()
        if not self._is_reset:
            raise EnvError(f"{doing} before reset (or after a failure); call reset(seeds) first")


def _started(rows: range) -> _Part:
    """A child that waits for its first command."""
    ours, theirs = socket.socketpair()
    lifeline_read, lifeline_write = os.pipe()
    memory_fd = os.memfd_create("rlinf_envs", os.MFD_CLOEXEC)
    in_main_thread = threading.current_thread() is threading.main_thread()
    code = (
        "from rlinf_envs.subprocess_child import serve; "
        f"serve({theirs.fileno()}, {lifeline_read}, {memory_fd}, dies_with_thread={in_main_thread})"
    )
    paths = [path or os.getcwd() for path in sys.path]
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.DEVNULL,
        pass_fds=(theirs.fileno(), lifeline_read, memory_fd),
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
    )
    theirs.close()
    os.close(lifeline_read)
    return _Part(
        rows=rows,
        process=process,
        connection=Connection(ours.detach()),
        lifeline_fd=lifeline_write,
        memory_fd=memory_fd,
    )


def _end(parts: list[_Part]) -> None:
    """Ask every child to close, give them some time together, then end what is left."""
    for part in parts:
        try:
            part.connection.send(("close", ()))
        except OSError:
            continue  # it is gone already
    deadline = time.monotonic() + _CLOSE_PATIENCE_S
    for part in parts:
        try:
            part.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            part.process.kill()
            part.process.wait()
        part.connection.close()
        os.close(part.lifeline_fd)
        os.close(part.memory_fd)
    parts.clear()
