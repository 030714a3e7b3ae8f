"""Which weight sync an edge takes, from where its two ends are."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rlinf_workers.addresses import DRIVERS_NODE, own_address


def choose(
    wanted: str, options: Mapping[str, Any], sources: Collection[int], targets: Sequence[int], *, on_gpus: bool
) -> list[tuple[str, dict[str, Any]]]:
    """[(a name of `plugins.WEIGHT_SYNCS`, its options)]: what the recipe wants or, for `auto`, what is tried in turn
    until one is not refused. On the driver's machine, whose process makes them, device memory where all ranks are on
    GPUs, and shared memory. On others and between several streams, whose directory is at the address of this machine:
    to each node once where several ranks of one take weights in host memory.

    Args:
        sources: the machines of the ranks that train, as the cluster counts them.
        targets: that of each end that serves.
        on_gpus: whether all ranks of the edge are on GPUs.
    """
    is_here = {*sources, *targets} == {DRIVERS_NODE}
    between = {} if is_here else {"host": own_address()}
    once = ("per_node", {**between, "nodes": list(targets), **options})
    if wanted == "per_node":
        return [once]
    if wanted != "auto":
        return [(wanted, dict(options))]
    if is_here:
        return [("device", {}), ("shared", {})] if on_gpus else [("shared", {})]
    return [("streams", between)] if on_gpus or len(set(targets)) == len(targets) else [once]
