"""Device leases: stages that share devices take turns.

A lease belongs to a *turn* (one stage, or the stages of one cycle) and covers all devices of the turn at once, so no
two groups can hold half of them each. Ranks of the turn that holds the devices join it freely; while another turn
waits, once each, or again while a rank of their group is inside. The turn ends when none of them is inside. Among
waiting turns the one earlier in the flow goes first.

A lease is granted when the state of other turns has left the rank's devices, see residents.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from rlinf_comm import record
from rlinf_workers.execution.device_state import group_of


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseRequest:
    """What a stage asks the driver's lease service."""

    action: Literal["acquire", "release"]
    turn: int
    stage: str
    stays: bool
    """To acquire: the state that the worker brings never leaves."""


Reply = Callable[[str], None]
"""To a request to acquire: "", or why the devices cannot be had."""
MakeRoom = Callable[[str, LeaseRequest, Reply], None]
"""Lets the state of others leave the devices of a worker that has been let in, and replies to it then."""


@dataclass
class _Turn:
    inside: set[str] = field(default_factory=set)
    joined: set[str] = field(default_factory=set)


_Waiting = tuple[int, str, Callable[[], None], Reply]
"""A turn, who wants to join it, what lets it in, and the reply to it."""


class Leases:
    """Who holds which devices; answers the workers' requests, as a handler for `Launcher.serve`.

    Args:
        devices_of_turn: the devices that each turn shares with another turn. Turns are numbered in the order of the
            flow.
        make_room: what comes between the turn's beginning and the reply; by default nothing.
    """

    def __init__(
        self,
        devices_of_turn: Mapping[int, frozenset[int]],
        make_room: MakeRoom = lambda _worker, _request, reply: reply(""),
    ) -> None:
        self._devices = dict(devices_of_turn)
        self._make_room = make_room
        self._active: dict[int, _Turn] = {}
        self._waiting: list[_Waiting] = []
        self._refusal = ""
        self._lock = threading.Lock()

    def __call__(self, worker: str, request: LeaseRequest, reply: Reply) -> None:
        """Replies to who acquires when the lease is granted."""
        turn, holder = request.turn, f"{worker} {request.stage}"

        def let_in() -> None:
            self._make_room(worker, request, reply)

        with self._lock:
            if self._refusal:
                granted = [partial(reply, self._refusal)] if request.action == "acquire" else []
            elif request.action == "release":
                granted = self._release(turn, holder)
            elif self._may_enter(turn, holder) and not self._someone_before(turn):
                self._enter(turn, holder)
                granted = [let_in]
            else:
                self._waiting.append((turn, holder, let_in, reply))
                granted = []
        for grant in granted:
            grant()

    def refuse(self, why: str) -> None:
        """Nobody gets a lease any more, and whoever waits for one is told why; for a run that is given up."""
        with self._lock:
            self._refusal = why
            waiting, self._waiting = self._waiting, []
        for *_, reply in waiting:
            reply(why)

    def holders(self, turn: int) -> list[str]:
        """Who is inside the turns that keep `turn` from starting, or inside `turn` itself."""
        with self._lock:
            active = {
                other: state for other, state in self._active.items() if self._devices[other] & self._devices[turn]
            }
            return [name for state in active.values() for name in sorted(state.inside)]

    def _release(self, turn: int, holder: str) -> list[Callable[[], None]]:
        """Gives the lease back; returns what lets in those that may enter now, in order."""
        state = self._active.get(turn)
        if state is None or holder not in state.inside:
            raise ValueError(f"{holder} gives back the lease of turn {turn}, which it does not hold")
        state.inside.remove(holder)
        if not state.inside:
            del self._active[turn]
        granted = []
        for waiting in sorted(self._waiting, key=lambda entry: entry[0]):  # stable: first come, first served in a turn
            turn, holder, grant, _ = waiting
            if self._may_enter(turn, holder):
                self._waiting.remove(waiting)
                self._enter(turn, holder)
                granted.append(grant)
        return granted

    def _may_enter(self, turn: int, holder: str) -> bool:
        if turn in self._active:
            # A rank that has had its go waits if others do, else the turn might never end; but not while a rank of
            # its own group is inside, which may be waiting for it in a collective.
            state, group = self._active[turn], group_of(holder)
            awaited = holder not in state.joined or any(group_of(name) == group for name in state.inside)
            return awaited or not self._conflicting_waiters(turn)
        return not any(self._devices[turn] & self._devices[other] for other in self._active)

    def _someone_before(self, turn: int) -> bool:
        """Whether an earlier turn is waiting for the same devices and `turn` is not under way already."""
        return turn not in self._active and any(waiting < turn for waiting in self._conflicting_waiters(turn))

    def _conflicting_waiters(self, turn: int) -> list[int]:
        return [other for other, *_ in self._waiting if other != turn and self._devices[other] & self._devices[turn]]

    def _enter(self, turn: int, holder: str) -> None:
        state = self._active.setdefault(turn, _Turn())
        state.inside.add(holder)
        state.joined.add(holder)
