"""`rlinf` where each CPU slot counts as a node of its own, so that what is between them goes over the network."""

from dataclasses import replace

from rlinf.cli.main import entry_point
from rlinf_sched import Cluster

_slots_of_one_node = Cluster.cpu_slots


def _slots_of_several_nodes(num_slots: int, memory_bytes: int | None = None) -> Cluster:
    cluster = _slots_of_one_node(num_slots, memory_bytes)
    return replace(cluster, devices=tuple(replace(device, node=device.index) for device in cluster.devices))


if __name__ == "__main__":
    Cluster.cpu_slots = _slots_of_several_nodes  # type: ignore[method-assign]
    entry_point()
