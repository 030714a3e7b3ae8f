"""The ways from one peer to another: base.py says what one is, and each of the other files has one."""

from __future__ import annotations

import os
from collections.abc import Sequence

from rlinf_comm.peers.transports.base import ChosenTransport, Transport
from rlinf_comm.peers.transports.shared import SharedTransport
from rlinf_comm.peers.transports.tcp import TcpTransport

__all__ = ["ChosenTransport", "Transport", "SharedTransport", "TcpTransport", "chosen_transports"]

ALLOWED_VARIABLE = "RLINF_COMM_TRANSPORTS"

_ALL: tuple[Transport, ...] = (SharedTransport(), TcpTransport())
"""The fastest first."""


def chosen_transports(transports: Sequence[str | Transport] | None) -> tuple[Transport, ...]:
    """The transports to try, in order: `transports`, or all; of these, the ones that the environment allows.

    Raises:
        ValueError: a name that there is none of, or nothing is left.
    """
    by_name = {transport.name: transport for transport in _ALL}

    def checked_name(name: str, source: str) -> str:
        if name not in by_name:
            raise ValueError(f"{source}: no transport {name!r}; allowed: {', '.join(by_name)}")
        return name

    if isinstance(transports, str):
        raise ValueError(f"transports={transports!r}; a sequence of names, say transports=({transports!r},)")
    chosen = tuple(
        by_name[checked_name(item, f"transports={transports!r}")] if isinstance(item, str) else item
        for item in (_ALL if transports is None else transports)
    )
    text = os.environ.get(ALLOWED_VARIABLE)
    if text:
        custom = {transport.name for transport in chosen if transport not in _ALL}
        allowed = {checked_name(name.strip(), f"{ALLOWED_VARIABLE}={text}") for name in text.split(",")} | custom
        chosen = tuple(transport for transport in chosen if transport.name in allowed)
    if not chosen:
        raise ValueError(f"transports={transports!r}, {ALLOWED_VARIABLE}={text or ''}: no transport is left to use")
    return chosen
