"""Device leases: stages that share devices take turns.

A lease belongs to a *turn* (one stage, or the stages of one cycle) and covers all devices of the turn at once, so no
two groups can hold half of them each. Ranks of the turn that holds the devices join it freely. While another turn is
waiting, a rank joins only once, or again while a rank of its own group is inside. The turn ends when no rank is inside.
Of the waiting turns, the one earlier in the flow goes first.

A lease is granted when the state of other turns has left the rank's devices, see device_state.py.
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
    """A stage's request to the driver's lease service."""

    action: Literal["acquire", "release"]
    turn: int
    stage: str
    stays: bool
    """For acquire: the worker's state is never offloaded."""


Reply = Callable[[str], None]
"""The reply to an acquire request: "", or the reason why the devices cannot be had."""
MakeRoom = Callable[[str, LeaseRequest, Reply], None]
"""Offloads others from the devices of an admitted worker, then replies to it."""


@dataclass
class _Turn:
    inside: set[str] = field(default_factory=set)
    joined: set[str] = field(default_factory=set)


_Waiting = tuple[int, str, Callable[[], None], Reply]
"""A turn, the worker that waits to join it, the function that admits it, and its reply."""


class Leases:
    """The leases of one run; handles the workers' requests for `Launcher.serve`.

    Args:
        devices_of_turn: the devices that each turn shares with another turn. Turns are numbered in the order of the
            flow.
        make_room: called between admission and reply; by default does nothing.
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
        """Handles a request; replies to an acquire when the lease is granted."""
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
        """Fails all pending and future requests with this reason; for a run that is abandoned."""
        with self._lock:
            self._refusal = why
            waiting, self._waiting = self._waiting, []
        for *_, reply in waiting:
            reply(why)

    def holders(self, turn: int) -> list[str]:
        """Workers inside the turns that keep `turn` from starting, or inside `turn` itself."""
        with self._lock:
            active = {
                other: state for other, state in self._active.items() if self._devices[other] & self._devices[turn]
            }
            return [name for state in active.values() for name in sorted(state.inside)]

    def _release(self, turn: int, holder: str) -> list[Callable[[], None]]:
        """Releases the lease; returns the functions that admit the workers which may enter now, in order."""
        state = self._active.get(turn)
        if state is None or holder not in state.inside:
            raise ValueError(f"{holder} gives back the lease of turn {turn}, which it does not hold")
        state.inside.remove(holder)
        if not state.inside:
            del self._active[turn]
        granted = []
        for waiting in sorted(self._waiting, key=lambda entry: entry[0]):  # stable: first come, first served
            turn, holder, grant, _ = waiting
            if self._may_enter(turn, holder):
                self._waiting.remove(waiting)
                self._enter(turn, holder)
                granted.append(grant)
        return granted

    def _may_enter(self, turn: int, holder: str) -> bool:
        if turn in self._active:
            # A rank that was inside before waits if another turn does, otherwise the turn might never end; but not
            # while a rank of its own group is inside, which may be waiting for it in a collective.
            state, group = self._active[turn], group_of(holder)
            awaited = holder not in state.joined or any(group_of(name) == group for name in state.inside)
            return awaited or not self._conflicting_waiters(turn)
        return not any(self._devices[turn] & self._devices[other] for other in self._active)

    def _someone_before(self, turn: int) -> bool:
        """Whether an earlier turn is waiting for the same devices and `turn` has not started yet."""
        return turn not in self._active and any(waiting < turn for waiting in self._conflicting_waiters(turn))

    def _conflicting_waiters(self, turn: int) -> list[int]:
        return [other for other, *_ in self._waiting if other != turn and self._devices[other] & self._devices[turn]]

    def _enter(self, turn: int, holder: str) -> None:
        state = self._active.setdefault(turn, _Turn())
        state.inside.add(holder)
        state.joined.add(holder)
