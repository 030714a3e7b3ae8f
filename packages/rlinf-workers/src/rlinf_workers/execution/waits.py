"""The wait-for graph in words: who waits for which channel, lease or peer, since when, and who could end it."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence

from rlinf_comm.channel import Channel
from rlinf_workers.execution.lease import Leases
from rlinf_workers.launcher.base import Wait


def describe_waits(waits: Sequence[Wait], leases: Leases, channels: Mapping[str, Channel]) -> str:
    """One line a wait, the longest first."""
    if not waits:
        return "  no worker said that it was waiting: they compute, or hang in native code (see their logs)"
    now = time.time()
    lines = []
    for wait in sorted(waits, key=lambda wait: wait.since_s):
        line = f"  {wait.waiter} waits for {wait.target} since {now - wait.since_s:.1f} s"
        if match := re.fullmatch(r"lease of turn (\d+)", wait.target):
            line += f" (held by {', '.join(leases.holders(int(match[1]))) or 'nobody'})"
        elif (match := re.fullmatch(r"(?:room in )?channel (.+)", wait.target)) and match[1] in channels:
            stats = channels[match[1]].stats()
            line += f" ({stats.num_items} entries, {stats.num_bytes} of {stats.capacity_bytes} bytes in it)"
        lines.append(line)
    return "\n".join(lines)
