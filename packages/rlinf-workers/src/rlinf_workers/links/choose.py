"""Which link an edge takes, from where its two ends are."""

from __future__ import annotations

import socket
from collections.abc import Collection, Mapping
from typing import Any


def choose(wanted: str, options: Mapping[str, Any], nodes: Collection[int]) -> tuple[str, dict[str, Any]]:
    """(a name of `registry.WEIGHT_LINKS`, its options): what the recipe wants or, for `auto`, shared memory within one
    machine and streams between several, which call this machine by its name.

    Args:
        nodes: the machines of all ranks of the edge, as the cluster counts them.
    """
    if wanted != "auto":
        return wanted, dict(options)
    if len(set(nodes)) > 1:
        return "streams", {"host": socket.gethostname()}
    return "shared", {}
