"""The error for each way in which a put or take can fail: what, why, and what to do."""

from __future__ import annotations

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
    name: str, native: _C.Channel, outcome: int, what: str, timeout_s: float | None
) -> ChannelError | PeerLost:
    """For a call on the channel `name` that ended with `outcome`. `what` says what was asked for."""
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
        f"{counts['num_closed']} of {counts['num_producers']} producers have closed"
    )


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
