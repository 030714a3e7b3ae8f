"""Which link an edge takes, from where its two ends are."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from rlinf_workers.addresses import own_address


def choose(
    wanted: str, options: Mapping[str, Any], nodes: Collection[int], *, on_gpus: bool
) -> list[tuple[str, dict[str, Any]]]:
    """[(a name of `registry.WEIGHT_LINKS`, its options)]: what the recipe wants or, for `auto`, what is tried in turn
    until one is not refused: within one machine device memory where all ranks are on GPUs, and shared memory; between
    several streams, whose directory is at the address of this machine.

    Args:
        nodes: the machines of all ranks of the edge, as the cluster counts them.
        on_gpus: whether all ranks of the edge are on GPUs.
    """
    if wanted != "auto":
        return [(wanted, dict(options))]
    if len(set(nodes)) > 1:
        return [("streams", {"host": own_address()})]
    return [("device", {}), ("shared", {})] if on_gpus else [("shared", {})]
