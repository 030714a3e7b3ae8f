"""What a person may write in a problem file in place of the full records: sizes with units, pairs, equal devices.

    state_bytes: 14.2GiB              14.2 times 2**30
    node_bytes_per_s: 450GB/s         450e9
    points: [[1, 0.4], [64, 1.9]]     [{num_items: 1, seconds: 0.4}, {num_items: 64, seconds: 1.9}]
    cluster: {nodes: 8, devices_per_node: 8, name: NVIDIA H100, memory_gib: 80}
    cluster: {cpu_slots: 4}

Whatever is of another form is left as it is, for the strict reader to judge.
"""

import dataclasses
import re
from dataclasses import dataclass, field
from typing import Any

from rlinf_sched import strict_json
from rlinf_sched.cluster import Cluster, Links
from rlinf_sched.errors import ProblemError, did_you_mean

UNITS = {
    "B": 1,
    **{f"{letter}B": 1000**i for i, letter in enumerate("kMGTP", start=1)},
    **{f"{letter}iB": 1024**i for i, letter in enumerate("KMGTP", start=1)},
}
"""Unit -> bytes; decimal and binary units as SI and IEC write them."""
SIZE_PATTERN = rf"^\d+(\.\d+)? ?({'|'.join(UNITS)})(/s)?$"
MAX_DEVICES = 1_000_000
MAX_MEMORY_GIB = 2**30
"""Most memory of a device, in GiB: an exbibyte."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EqualNodes:
    """Equal nodes of equal GPUs, in place of the list of devices."""

    nodes: int = 1
    devices_per_node: int
    name: str
    """Name of the product, for people and for profiles that name theirs: "NVIDIA H100"."""
    memory_gib: float
    """Memory of each device, in GiB."""
    links: Links = field(default_factory=Links)
    cpu_cores: int = 0
    """Cores of each node; see `Cluster.cpu_cores`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CpuSlots:
    """Equal slots of one machine's CPU, in place of the list of devices."""

    cpu_slots: int
    memory_gib: float | None = None
    """Memory of each slot, in GiB. None: an equal part of this machine's memory."""
    links: Links = field(default_factory=Links)
    cpu_cores: int = 0
    """Cores that the slots and the host's processes share; see `Cluster.cpu_cores`."""


def expand(tree: Any) -> Any:
    """The tree with every shorthand written out; the tree given is left as it is.

    Raises:
        ProblemError: a size with an unknown unit, a shorthand cluster with a wrong, unknown or missing key.
    """
    tree = _sizes(tree, "problem", is_size=False)
    if not isinstance(tree, dict):
        return tree
    if "cluster" in tree:
        tree["cluster"] = _cluster(tree["cluster"])
    for instance in _instances(tree.get("profiles")):
        if isinstance(instance.get("points"), list):
            instance["points"] = [_point(point) for point in instance["points"]]
    return tree


def _sizes(value: Any, path: str, *, is_size: bool) -> Any:
    """A copy; texts under a key that counts bytes become numbers."""
    if isinstance(value, dict):
        return {
            key: _sizes(entry, f"{path}.{key}", is_size=is_size or (isinstance(key, str) and _counts_bytes(key)))
            for key, entry in value.items()
        }
    if isinstance(value, list):
        return [_sizes(entry, f"{path}[{i}]", is_size=is_size) for i, entry in enumerate(value)]
    return _bytes(value, path) if is_size and isinstance(value, str) else value


def _counts_bytes(key: str) -> bool:
    return key.endswith(("_bytes", "_bytes_per_s"))


def _bytes(text: str, path: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([A-Za-z]+)(?:/s)?", text.strip())
    if match is None and re.fullmatch(r"-\s*\d.*", text.strip()):
        raise ProblemError(f"{path}={text!r} must not be negative")
    if match is None:
        raise ProblemError(f"{path}={text!r} is no size; write a number of bytes, or one with a unit such as 80GiB")
    number, unit = match.groups()
    if unit not in UNITS:
        raise ProblemError(f"{path}={text!r}: unknown unit{did_you_mean(unit, UNITS)}")
    if float(number) * UNITS[unit] > strict_json.MAX_INTEGER:
        raise ProblemError(f"{path}={text!r} is beyond 2**63 bytes; give a smaller size")
    return round(float(number) * UNITS[unit])


def _cluster(value: Any) -> Any:
    if not isinstance(value, dict) or "devices" in value:
        return value
    if "cpu_slots" in value:
        slots = strict_json.record(value, CpuSlots, "problem.cluster", ProblemError)
        _check_count("cpu_slots", slots.cpu_slots)
        memory_bytes = None if slots.memory_gib is None else _memory_bytes(slots.memory_gib)
        return _tree(Cluster.cpu_slots(slots.cpu_slots, memory_bytes), slots)
    nodes = strict_json.record(value, EqualNodes, "problem.cluster", ProblemError)
    _check_count("nodes", nodes.nodes)
    _check_count("devices_per_node", nodes.devices_per_node)
    _check_count("nodes * devices_per_node", nodes.nodes * nodes.devices_per_node)
    memory_bytes = _memory_bytes(nodes.memory_gib)
    cluster = Cluster.cuda_nodes(nodes.nodes, nodes.devices_per_node, name=nodes.name, memory_bytes=memory_bytes)
    return _tree(cluster, nodes)


def _check_count(key: str, count: int) -> None:
    if not 1 <= count <= MAX_DEVICES:
        raise ProblemError(f"problem.cluster.{key}={count} must be from 1 to {MAX_DEVICES:,}")


def _memory_bytes(memory_gib: float) -> int:
    if not 0 < memory_gib <= MAX_MEMORY_GIB:
        raise ProblemError(f"problem.cluster.memory_gib={memory_gib} must be positive and at most {MAX_MEMORY_GIB}")
    return max(1, round(memory_gib * 2**30))


def _tree(cluster: Cluster, shorthand: EqualNodes | CpuSlots) -> dict[str, Any]:
    return {
        "devices": [dataclasses.asdict(device) for device in cluster.devices],
        "links": dataclasses.asdict(shorthand.links),
        "cpu_cores": shorthand.cpu_cores,
    }


def _instances(profiles: Any) -> list[dict[str, Any]]:
    stages = profiles.get("stages") if isinstance(profiles, dict) else None
    profiles_of_stages = list(stages.values()) if isinstance(stages, dict) else []
    lists = [profile.get("instances") for profile in profiles_of_stages if isinstance(profile, dict)]
    return [entry for entries in lists if isinstance(entries, list) for entry in entries if isinstance(entry, dict)]


def _point(point: Any) -> Any:
    if isinstance(point, list) and len(point) == 2:
        return {"num_items": point[0], "seconds": point[1]}
    return point
