"""Which link an edge takes, from where its two ends are."""

from __future__ import annotations

from collections.abc import Collection

from rlinf_workers.errors import FlowDefinitionError


def choose(wanted: str, edge: str, nodes: Collection[int]) -> str:
    """A name of `registry.WEIGHT_LINKS`: what the recipe wants or, for `auto`, shared memory within one machine.

    Args:
        nodes: the machines of all ranks of the edge, as the cluster counts them.
    Raises: FlowDefinitionError when `auto` has nothing to offer.
    """
    if wanted != "auto":
        return wanted
    if len(set(nodes)) > 1:
        raise FlowDefinitionError(
            f"weights {edge}: their ranks are on machines {sorted(set(nodes))}, and no shipped link crosses machines; "
            "place both ends on one, or name a link of your own (cluster.weight_link in a recipe)"
        )
    return "shared"
