"""Device leases: stages that share devices take turns.

A lease belongs to a *turn* (one stage, or the stages of one cycle, which cannot go on without each other) and covers
all devices of the turn at once. Taking them together means that two worker groups whose ranks meet in collectives
cannot hold half of the devices each: there is no partial hold, so there is no deadlock. Ranks of the turn that holds
the devices join it freely; while another turn waits, once each, or again while a rank of their group is inside. The
turn ends when none of them is inside. Among waiting turns the one earlier in the
flow goes first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from rlinf_comm.records import record


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseRequest:
    """What a stage asks the driver's lease service."""

    action: Literal["acquire", "release"]
    turn: int
    stage: str


@dataclass
class _Turn:
    inside: set[str] = field(default_factory=set)
    joined: set[str] = field(default_factory=set)


class LeaseTable:
    """Who holds which devices. Pure bookkeeping: no threads, no clocks.

    Args:
        devices_of_turn: the devices that each turn shares with another turn. Turns are numbered in the order of the
            flow.
    """

    def __init__(self, devices_of_turn: Mapping[int, frozenset[int]]) -> None:
        self._devices = dict(devices_of_turn)
        self._active: dict[int, _Turn] = {}
        self._waiting: list[tuple[int, str]] = []

    def acquire(self, turn: int, holder: str) -> bool:
        """True: granted now. False: queued; a later `release` returns it."""
        if self._may_enter(turn, holder) and not self._someone_before(turn):
            self._enter(turn, holder)
            return True
        self._waiting.append((turn, holder))
        return False

    def release(self, turn: int, holder: str) -> list[tuple[int, str]]:
        """Gives the lease back; returns the (turn, holder) pairs that this lets in, in order."""
        state = self._active.get(turn)
        if state is None or holder not in state.inside:
            raise ValueError(f"{holder} gives back the lease of turn {turn}, which it does not hold")
        state.inside.remove(holder)
        if not state.inside:
            del self._active[turn]
        granted: list[tuple[int, str]] = []
        for waiting in sorted(self._waiting, key=lambda entry: entry[0]):  # stable: first come, first served in a turn
            if self._may_enter(*waiting):
                self._waiting.remove(waiting)
                self._enter(*waiting)
                granted.append(waiting)
        return granted

    def holders(self, turn: int) -> list[str]:
        """Who is inside the turns that keep `turn` from starting, or inside `turn` itself."""
        names: list[str] = []
        for other, state in self._active.items():
            if other == turn or self._devices[other] & self._devices[turn]:
                names.extend(sorted(state.inside))
        return names

    @property
    def is_idle(self) -> bool:
        return not self._active and not self._waiting

    def _may_enter(self, turn: int, holder: str) -> bool:
        if turn in self._active:
            # A rank that has had its go waits if others do, else the turn might never end; but not while a rank of
            # its own group is inside, which may be waiting for it in a collective.
            state, group = self._active[turn], _group(holder)
            awaited = holder not in state.joined or any(_group(name) == group for name in state.inside)
            return awaited or not self._conflicting_waiters(turn)
        return not any(self._devices[turn] & self._devices[other] for other in self._active)

    def _someone_before(self, turn: int) -> bool:
        """Whether an earlier turn is waiting for the same devices and `turn` is not under way already."""
        return turn not in self._active and any(waiting < turn for waiting in self._conflicting_waiters(turn))

    def _conflicting_waiters(self, turn: int) -> list[int]:
        return [other for other, _ in self._waiting if other != turn and self._devices[other] & self._devices[turn]]

    def _enter(self, turn: int, holder: str) -> None:
        state = self._active.setdefault(turn, _Turn())
        state.inside.add(holder)
        state.joined.add(holder)


def _group(holder: str) -> str:
    """`actor/1 actor` -> `actor`"""
    return holder.partition("/")[0]


class LeaseService:
    """Answers the workers' lease requests from one table; a handler for `Launcher.serve`."""

    def __init__(self, devices_of_turn: Mapping[int, frozenset[int]]) -> None:
        self._table = LeaseTable(devices_of_turn)
        self._lock = threading.Lock()
        self._replies: dict[tuple[int, str], Callable[[object], None]] = {}

    def __call__(self, worker: str, request: LeaseRequest, reply: Callable[[object], None]) -> None:
        holder = f"{worker} {request.stage}"
        with self._lock:
            if request.action == "release":
                granted = [(key, self._replies.pop(key)) for key in self._table.release(request.turn, holder)]
            elif self._table.acquire(request.turn, holder):
                granted = []
            else:
                self._replies[(request.turn, holder)] = reply
                return
        reply(None)
        for _, waiting_reply in granted:
            waiting_reply(None)

    def holders(self, turn: int) -> list[str]:
        with self._lock:
            return self._table.holders(turn)
