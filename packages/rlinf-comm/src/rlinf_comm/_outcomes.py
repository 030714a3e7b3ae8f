"""The error for each way in which a put or take can fail: what, why, and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlinf_comm import _C
from rlinf_comm.errors import (
    ChannelAborted,
    ChannelClosed,
    ChannelError,
    ChannelStalled,
    ChannelTimeout,
    PeerLost,
)

_MAX_NAMED = 5


def outcome_error(
    name: str,
    native: _C.Channel,
    outcome: int,
    what: str,
    timeout_s: float | None,
    *,
    keys: Sequence[int | str] | None = None,
) -> ChannelError | PeerLost:
    """Returns the error for a call on the channel `name` that ended with `outcome`.

    Args:
        what: What was asked for.
        keys: Those that a take asked for; None for any.
    """
    if outcome == _C.Outcome.ABORTED:
        return ChannelAborted(f"channel {name!r}: {native.abort_reason().decode(errors='replace')}")
    if outcome == _C.Outcome.PEER_LOST:
        return _peer_lost(name, native, what)
    counts = native.counts()
    fill = (
        f"{counts['num_items']} items are waiting (capacity_items={counts['capacity_items']}), "
        f"{counts['num_bytes']} bytes (capacity_bytes={counts['capacity_bytes']})"
    )
    if outcome == _C.Outcome.CLOSED:
        return ChannelClosed(
            f"channel {name!r}: {what}, but all {counts['num_producers']} producers have closed it; "
            "create it with the right num_producers, or reopen it"
        )
    if outcome == _C.Outcome.STALLED:
        return ChannelStalled(
            f"channel {name!r}: {what}, but {fill} and a producer waits for room; "
            "raise capacity_items or capacity_bytes, or ask for fewer items"
        )
    assert outcome == _C.Outcome.TIMED_OUT, f"unexpected {_C.Outcome(outcome)!r}"
    return ChannelTimeout(
        f"channel {name!r}: {what} not done within timeout_s={timeout_s}; {fill}; "
        f"{counts['num_closed']} of {counts['num_producers']} producers have closed{_other_keys(native, counts, keys)}"
    )


def _other_keys(native: _C.Channel, counts: dict[str, Any], keys: Sequence[int | str] | None) -> str:
    """Which keys the items have that wait while nobody asks for them, or while they leave no room for another key.

    Args:
        keys: Those that a take asked for; None for any, and for a put.
    """
    waiting = native.waiting_keys()
    others = [(key, num_items) for key, num_items in waiting if keys is None or key not in keys]
    if not others or (keys is None and len(waiting) < 2):
        return ""
    others.sort(key=lambda entry: -entry[1])
    named = ", ".join(f"{num_items} with key {key!r}" for key, num_items in others[:_MAX_NAMED])
    more = f" and those of {len(others) - _MAX_NAMED} more keys" if len(others) > _MAX_NAMED else ""
    text = f"; of the items that wait {named}{more}" + ("" if keys is None else " were not asked for")
    if counts["num_keys"] > 1:
        return f"{text}; each of num_keys={counts['num_keys']} keys may fill an equal share"
    if counts["num_blocked_puts"] == 0:
        return text
    return f"{text}; they leave other keys no room: take them too, or create the channel with num_keys="


def _peer_lost(name: str, native: _C.Channel, what: str) -> PeerLost:
    lost = native.lost_users()
    named = [f"process {pid} ({'producer' if produced else 'consumer'})" for pid, produced in lost[:_MAX_NAMED]]
    more = f" and {len(lost) - _MAX_NAMED} more" if len(lost) > _MAX_NAMED else ""
    return PeerLost(
        f"channel {name!r}: {what} has to wait, but {', '.join(named) or 'a process'}{more} died without leaving "
        "the channel; drop_lost_peers() goes on with the rest, abort(reason) ends it for all, and "
        "lost_peers='tolerate' at its creation waits for a replacement",
        pids=tuple(pid for pid, _ in lost),
    )
