"""Spreads the rows of a `BatchedEnv` over several local processes, to use all cores and to survive crashes.

Commands go over a socket, tensors through shared memory (`shared_block`). Children are new interpreters started by
`subprocess`, because `multiprocessing` would run the main module again and does not allow children of daemonic
processes. They end with their parent, however it ends. The numbers are those of the same environment in one process.

A child that dies or hangs (`patience`) is replaced: a new process replays the current episodes of its rows and repeats
the command. An episode is a function of its seed and actions, so the caller gets the same results as without the crash.
"""

from __future__ import annotations

import dataclasses
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlinf_envs import errors
from rlinf_envs.core.described import Described
from rlinf_envs.core.env_spec import EnvSpec
from rlinf_envs.core.patience import Patience
from rlinf_envs.core.picture_memory import PictureMemory
from rlinf_envs.core.protocol import PICTURE, ActionSpec, FieldSpec, Observation, RowSnapshot, StepResult
from rlinf_envs.core.row_history import RowHistories
from rlinf_envs.core.seeding import checked_begin, checked_seeds
from rlinf_envs.core.shared_block import BlockShape, SharedBlock
from rlinf_envs.core.simulator_process import SimulatorHandle, SimulatorLost, SimulatorProcess, end_all
from rlinf_envs.errors import EnvCrashedError, EnvError

_MOST_LOSSES = 3
"""Number of losses at one position that end the environment, because the position must be the cause."""

_Arguments = Callable[[SimulatorHandle], tuple[Any, ...]]
_Places = dict[tuple[str, str], Tensor]
"""(part of the result, field) -> [N, H, W, C] uint8 in the caller's image memory; empty or complete."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Command:
    """A command that is sent to all children."""

    name: str
    arguments: _Arguments = lambda part: ()
    kind: str | None = None
    """Kind of work whose times it is compared with; None: too rare to compare."""
    amount: int = 1
    """Units of that kind of work."""
    goes_on: bool = True
    """Whether it depends on the state of the rows, so that a new child has to be restored first."""


class SubprocessVector(Described):
    """`spec.num_envs` rows in `spec.num_processes` processes, in order and distributed as evenly as possible.

    Args:
        timeout_s: limit of every answer, including creation; steps have shorter limits (`EnvSpec.hang_limit_s`).
        on_replaced: called with a sentence for every child that was replaced.
        pictures: memory into which the children write their rows of images, while it has space.
        simulator: what simulates a share of the rows; `spec.num_processes` may be 0 for one that is no child process.
    """

    def __init__(
        self,
        spec: EnvSpec,
        *,
        timeout_s: float = 300.0,
        on_replaced: Callable[[str], None] | None = None,
        pictures: PictureMemory | None = None,
        simulator: type[SimulatorHandle] = SimulatorProcess,
    ) -> None:
        self._patience = Patience(longest_s=timeout_s, limit_s=spec.hang_limit_s)
        self._on_replaced = on_replaced or (lambda text: None)
        self._pictures = pictures
        self._parts: list[SimulatorHandle] = []
        self._closed = False
        self._is_reset = False
        self._num_envs = spec.num_envs
        sizes = [len(rows) for rows in np.array_split(np.arange(spec.num_envs), max(1, spec.num_processes))]
        starts = np.cumsum([0, *sizes]).tolist()
        self._spec = spec
        # Ends the children when this object is collected or the interpreter exits without close().
        self._finalizer = weakref.finalize(self, end_all, self._parts)
        try:
            for start, size in zip(starts, sizes, strict=False):
                fd = None if pictures is None else pictures.fd
                self._parts.append(simulator(range(start, start + size), spec, pictures_fd=fd))
            self._replaceable = False
            self._take_specs(self._call(_Command(name="make", arguments=self._part_spec, kind="make")))
            self._share(num_actions=1)
        except BaseException:
            self.close()
            raise

    def reset(self, seeds: Sequence[int]) -> Observation:
        self._require_open()
        values = checked_seeds(seeds, self.num_envs)
        self._histories.reset(values)
        places = self._new_places("observation")
        texts = self._call(
            _Command(
                name="reset",
                arguments=lambda part: (self._offsets(places, part), values[part.rows.start : part.rows.stop]),
                kind="reset",
                goes_on=False,
            )
        )
        self._is_reset = True
        return self._joined("observation", texts, places)

    def begin(self, seeds: Mapping[int, int], *, alone: bool = False) -> Observation:
        self._require_open()
        values = checked_begin(seeds, self.num_envs)
        if alone or not self._is_reset:
            alone = True
            self._histories.rest(self.num_envs)
        command = _Command(
            name="begin",
            arguments=lambda part: ({row - part.rows.start: values[row] for row in values if row in part.rows}, alone),
            kind="reset",
        )
        texts = self._call(command)
        self._histories.begin(values)
        self._is_reset = True
        begun = self._joined("observation", texts, {}) if values else {}
        return {
            name: [value[row] for row in values] if isinstance(value, list) else value[list(values)]
            for name, value in begun.items()
        }

    def step(self, actions: Tensor) -> StepResult:
        self._require_reset("step")
        checked = self._action_spec.checked(actions, self.num_envs)[:, None]
        return self._moved(checked, is_chunk=False)

    def step_chunk(self, actions: Tensor) -> StepResult:
        self._require_reset("step_chunk")
        checked = self._action_spec.checked(actions, self.num_envs, chunk=True)
        num_actions = checked.shape[1]
        if num_actions > self._blocks()[0][1].shape.num_actions:
            self._share(num_actions)
        return self._moved(checked, is_chunk=True)

    def snapshot(self) -> tuple[RowSnapshot, ...]:
        self._require_reset("snapshot")
        if not self._replaceable:
            raise EnvError("this environment offers no snapshots (rlinf_envs.core.protocol.Replayable)")
        return self._histories.snapshot()

    def restore(self, rows: Sequence[RowSnapshot]) -> Observation:
        self._require_open()
        if len(rows) != self.num_envs:
            raise EnvError(f"restore got {len(rows)} rows for {self.num_envs} environments")
        self._is_reset = False
        self._histories.restore(rows)
        places = self._new_places("observation")
        texts = self._call(
            _Command(
                name="restore",
                arguments=lambda part: (self._offsets(places, part), self._part_history(part)),
                goes_on=False,
            )
        )
        self._is_reset = True
        return self._joined("observation", texts, places)

    def expert_actions(self, rows: Sequence[int], num_actions: int) -> Tensor:
        self._require_reset("expert_actions")
        command = _Command(
            name="expert_actions",
            arguments=lambda part: ([row - part.rows.start for row in rows if row in part.rows], num_actions),
            kind="expert_actions",
            amount=len(rows) * num_actions,
        )
        answers = [answer for answer in self._call(command) if answer is not None]
        order = [position for part in self._parts for position, row in enumerate(rows) if row in part.rows]
        actions = torch.empty(len(rows), num_actions, *self._action_spec.shape, dtype=self._action_spec.dtype)
        actions[order] = torch.from_numpy(np.concatenate(answers))
        return actions

    def render(self) -> Tensor:
        self._require_reset("render")
        return torch.from_numpy(np.concatenate(self._call(_Command(name="render", kind="render"))))

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._finalizer()

    def _moved(self, actions: np.ndarray, *, is_chunk: bool) -> StepResult:
        num_actions = actions.shape[1]
        for part, block in self._blocks():
            block["actions"][:, :num_actions] = actions[part.rows.start : part.rows.stop]
        places = self._new_places("observation", "final_observation")
        command = _Command(
            name="step_chunk" if is_chunk else "step",
            arguments=lambda part: (self._offsets(places, part), *([num_actions] if is_chunk else [])),
            kind="step",
            amount=num_actions,
        )
        result = self._result(self._call(command), places, num_actions=num_actions if is_chunk else None)
        self._histories.add(actions, result)
        return result

    def _new_places(self, *parts: str) -> _Places:
        """Allocates memory for the images of parts of a result. If it does not suffice for all, all go through the
        blocks."""
        if self._pictures is None:
            return {}
        places: _Places = {}
        shapes = {name: spec.shape for name, spec in self._observation_spec.items() if name.startswith(PICTURE)}
        for (name, shape), part in product(shapes.items(), parts):
            place = self._pictures.empty((self.num_envs, *shape))
            if place is None:
                return {}
            places[part, name] = place
        return places

    def _offsets(self, places: _Places, part: SimulatorHandle) -> dict[tuple[str, str], int]:
        """Returns the offsets of a child's rows in the file behind `places`."""
        if self._pictures is None:
            return {}
        return {key: self._pictures.offset(place[part.rows.start :]) for key, place in places.items()}

    def _part_spec(self, part: SimulatorHandle) -> tuple[Any, ...]:
        return (dataclasses.replace(self._spec, num_envs=len(part.rows), num_processes=0),)

    def _part_history(self, part: SimulatorHandle) -> list[tuple[Any, ...]]:
        rows = self._histories.snapshot()[part.rows.start : part.rows.stop]
        return [(row.seed, row.episode_index, row.actions.numpy(), row.follows, row.rests) for row in rows]

    def _take_specs(self, answers: list[dict[str, Any]]) -> None:
        first = answers[0]
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
        self._notes = tuple(dict.fromkeys(note for part in answers for note in part["notes"]))
        self._replaceable = first["is_replayable"]
        self.begins_rows: bool = first["begins_rows"]
        self.has_expert = bool(first.get("has_expert", False))
        """Whether `expert_actions` works; False for a server of simulators."""
        self._histories = RowHistories(self._action_spec)

    def _share(self, num_actions: int) -> None:
        for part in self._parts:
            shape = BlockShape(
                num_rows=len(part.rows),
                num_actions=num_actions,
                action_spec=self._action_spec,
                observation_spec=self._observation_spec,
            )
            part.block = SharedBlock(part.memory_fd, shape)
        self._call(_Command(name="share", arguments=self._share_arguments, kind="share"))

    def _share_arguments(self, part: SimulatorHandle) -> tuple[Any, ...]:
        assert part.block is not None, "the block is made before it is shared"
        return (part.block.shape.num_actions,)

    def _blocks(self) -> list[tuple[SimulatorHandle, SharedBlock]]:
        return [(part, part.block) for part in self._parts if part.block is not None]

    def _call(self, command: _Command) -> list[Any]:
        """Sends a command to every child, waits for all answers, then raises the first error (by row)."""
        try:
            answers = self._exchanged(command)
        except BaseException:  # also Ctrl-C: an unread answer would be taken for that of the next command
            self.close()
            raise
        return [self._checked_answer(part, answers[part.rows.start]) for part in self._parts]

    def _exchanged(self, command: _Command) -> dict[int, tuple[Any, ...]]:
        """Returns first row -> answer of each child. Lost children are replaced."""
        answers: dict[int, tuple[Any, ...]] = {}
        began_s = {part.rows.start: self._begun(part, command) for part in self._parts}
        while waiting := {part.connection: part for part in self._parts if part.rows.start not in answers}:
            limits = {part.rows.start: self._limit_s(part, command) for part in waiting.values()}
            left_s = min(began_s[first] + limit for first, limit in limits.items()) - time.monotonic()
            ready = wait(list(waiting), timeout=max(0.0, left_s))
            for connection in ready:
                assert isinstance(connection, Connection), "wait gives back what it was given"
                part = waiting[connection]
                try:
                    answers[part.rows.start] = part.receive(command.name)
                except SimulatorLost as lost:
                    began_s[part.rows.start] = self._begun_again(part, command, lost)
                    continue
                self._patience.took(command.kind, command.amount, time.monotonic() - began_s[part.rows.start])
                part.num_losses_here = 0
            for part in [] if ready else waiting.values():
                first = part.rows.start
                if time.monotonic() - began_s[first] >= limits[first]:
                    began_s[first] = self._begun_again(part, command, part.hung(command.name, limits[first]))
        return answers

    def _limit_s(self, part: SimulatorHandle, command: _Command) -> float:
        return self._patience.limit_s(command.kind, command.amount, num_losses=part.num_losses_here)

    def _begun(self, part: SimulatorHandle, command: _Command) -> float:
        """Sends a command to a child and returns the start time."""
        try:
            part.send(command.name, command.arguments(part))
        except SimulatorLost as lost:
            return self._begun_again(part, command, lost)
        return time.monotonic()

    def _begun_again(self, part: SimulatorHandle, command: _Command, lost: SimulatorLost) -> float:
        """Replaces a lost child, restores its state, sends it the command and returns the start time."""
        while True:
            part.num_losses_here += 1
            first = part.rows.start
            if not self._replaceable:
                raise EnvCrashedError(first, f"{lost}; ended")
            place = ", ".join(f"env {row} {self._histories.place(row)}" for row in part.rows)
            if part.num_losses_here >= _MOST_LOSSES:
                raise EnvCrashedError(first, f"{lost}, {_MOST_LOSSES} times in a row at the same place: {place}; ended")
            self._on_replaced(f"{lost}; its episodes were begun again {part.elsewhere}: {place}")
            try:
                self._replace(part, bring_back=command.goes_on)
                part.send(command.name, command.arguments(part))
            except SimulatorLost as error:
                lost = error
            else:
                return time.monotonic()

    def _replace(self, part: SimulatorHandle, *, bring_back: bool) -> None:
        part.start_again()
        losses, patience = part.num_losses_here - 1, self._patience
        orders = [
            ("make", self._part_spec(part), patience.limit_s("make", 1, num_losses=losses)),
            ("share", self._share_arguments(part), patience.limit_s("share", 1, num_losses=losses)),
        ]
        if bring_back and self._is_reset:
            num_chunks, num_actions = self._histories.num_done(part.rows)
            limit_s = patience.limit_of_return_s(num_chunks, num_actions, num_losses=losses)
            orders.append(("restore", ({}, self._part_history(part)), limit_s))
        for name, arguments, limit_s in orders:
            self._checked_answer(part, part.answer(name, arguments, limit_s=limit_s))

    def _checked_answer(self, part: SimulatorHandle, answer: tuple[Any, ...]) -> Any:
        if answer[0] == "done":
            return answer[1]
        self._is_reset = False
        if answer[0] == "refused":
            raise getattr(errors, answer[1])(answer[2])
        _, env_index, problem, trace = answer
        raise EnvCrashedError(part.rows.start + env_index, f"{problem}\nin {part.where}:\n{trace.rstrip()}")

    def _result(self, answers: list[Any], places: _Places, *, num_actions: int | None) -> StepResult:
        blocks = [block for _, block in self._blocks()]
        episodes = tuple(
            dataclasses.replace(end, env_index=part.rows.start + end.env_index)
            for part, (_, _, ends) in zip(self._parts, answers, strict=True)
            for end in ends
        )
        rewards = np.concatenate([block["rewards"][:, : num_actions or 1] for block in blocks])
        observation = self._joined("observation", [texts for texts, _, _ in answers], places)
        return StepResult(
            observation=observation,
            rewards=torch.from_numpy(rewards if num_actions else rewards[:, 0].copy()),
            terminated=torch.from_numpy(np.concatenate([block["terminated"] for block in blocks])),
            truncated=torch.from_numpy(np.concatenate([block["truncated"] for block in blocks])),
            num_steps=torch.from_numpy(np.concatenate([block["num_steps"] for block in blocks])),
            final_observation=self._final(answers, places) if episodes else observation,
            episodes=episodes,
        )

    def _final(self, answers: list[Any], places: _Places) -> Observation:
        # A child without ended episodes writes no final observation, because it equals its observation.
        written = ["final_observation" if ends else "observation" for _, _, ends in answers]
        return self._joined("final_observation", [texts for _, texts, _ in answers], places, written)

    def _joined(
        self, part: str, texts: list[dict[str, list[str]]], places: _Places, written: Sequence[str] = ()
    ) -> Observation:
        """Concatenates the children's rows: images in their places, copies of everything else. `written` names the part
        of the result that each child wrote, if that is not always `part`."""
        written = written or [part] * len(self._parts)
        fields = [block.fields(own) for (_, block), own in zip(self._blocks(), written, strict=True)]
        observation: Observation = {}
        for name, spec in self._observation_spec.items():
            if spec.dtype == "text":
                observation[name] = [text for child_texts in texts for text in child_texts[name]]
            elif (part, name) in places:
                observation[name] = place = places[part, name]
                for process, own in zip(self._parts, written, strict=True):
                    if own != part:
                        rows = slice(process.rows.start, process.rows.stop)
                        place[rows] = places[own, name][rows]
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
