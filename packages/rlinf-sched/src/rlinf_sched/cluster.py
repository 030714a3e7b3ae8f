"""The devices a plan may use: GPUs, or CPU slots on a machine without one."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal, get_args

from rlinf_sched.errors import ClusterError
from rlinf_sched.host_memory import usable_bytes

DeviceKind = Literal["cpu", "cuda"]
MAX_CORES = 1_000_000
"""Upper limit of a node's cores."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One place where a rank of a worker group can compute: a GPU, or a slot of a host's CPU.

    Example: Device(index=3, kind="cuda", node=0, name="NVIDIA H100 80GB HBM3", memory_bytes=85_520_809_984)
    """

    index: int
    """Index of the device, counted over the whole cluster from 0; a plan's `devices` are such indices."""
    kind: DeviceKind
    node: int = 0
    """Machine the device is in, counted from 0."""
    name: str
    """Display name: the GPU's product name, or "cpu:0" for a slot."""
    memory_bytes: int
    """Bytes that a worker may count on; for a CPU slot its share of the host's memory."""

    @property
    def product(self) -> str:
        """The device name in profiles: slots of a CPU are all alike, whatever their names."""
        return "CPU slot" if self.kind == "cpu" else self.name


@dataclass(frozen=True, kw_only=True, slots=True)
class Links:
    """Bandwidths between devices, per device and direction.

    Example: an H100 node with NVLink, one 400 Gb/s network port per GPU and PCIe 5 to the host is `Links()`.
    """

    node_bytes_per_s: float = 450e9
    """Rate between two devices of one node (NVLink 4: 900 GB/s in both directions together)."""
    network_bytes_per_s: float = 50e9
    """Rate between two devices of different nodes."""
    host_bytes_per_s: float = 50e9
    """Rate between a device and its host's memory, at which state is onloaded and offloaded."""
    latency_s: float = 20e-6
    """Latency of one hand-over in seconds, however small it is."""
    sync_bytes_per_s: float | None = None
    """Rate at which a weight sync gathers a model's tensors, packs them and loads them into engines, over all ranks
    together; the links carry them after that. None: negligible time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """All devices of a run, in the order of their indices. Kinds, products and memory sizes may differ.

    Example: a laptop with two CPU slots is `Cluster.cpu_slots(2)`; two nodes of eight GPUs for planning on a laptop are
    `Cluster.cuda_nodes(2, 8, name="NVIDIA H100", memory_bytes=80 << 30)`.
    """

    devices: tuple[Device, ...]
    links: Links = field(default_factory=Links)
    cpu_cores: int = 0
    """Cores of each node, for its host processes and CPU slots. Processes that together need more slow each other down.
    0: unlimited."""

    def __post_init__(self) -> None:
        for name in ("node_bytes_per_s", "network_bytes_per_s", "host_bytes_per_s"):
            if not getattr(self.links, name) > 0:
                raise ClusterError(f"cluster.links.{name}={getattr(self.links, name)} must be positive")
        if self.links.sync_bytes_per_s is not None and not self.links.sync_bytes_per_s > 0:
            raise ClusterError(f"cluster.links.sync_bytes_per_s={self.links.sync_bytes_per_s} must be positive")
        if self.links.latency_s < 0:
            raise ClusterError(f"cluster.links.latency_s={self.links.latency_s} must not be negative")
        if not 0 <= self.cpu_cores <= MAX_CORES:
            raise ClusterError(f"cluster.cpu_cores={self.cpu_cores} must be from 0, not counted, to {MAX_CORES:,}")
        if not self.devices:
            raise ClusterError("a cluster has no devices; give it at least one, for example Cluster.cpu_slots(1)")
        for i, device in enumerate(self.devices):
            if device.index != i:
                raise ClusterError(
                    f"cluster.devices[{i}].index={device.index}; devices are listed in order 0, 1, 2, ..."
                )
            if device.kind not in get_args(DeviceKind):
                raise ClusterError(
                    f"cluster.devices[{i}].kind={device.kind!r}; use one of {', '.join(get_args(DeviceKind))}"
                )
            if device.memory_bytes <= 0:
                raise ClusterError(f"cluster.devices[{i}].memory_bytes={device.memory_bytes} must be positive")
            if device.node < 0:
                raise ClusterError(f"cluster.devices[{i}].node={device.node} must not be negative")

    @classmethod
    def cpu_slots(cls, num_slots: int, memory_bytes: int | None = None) -> "Cluster":
        """`num_slots` equal CPU slots "cpu:0", "cpu:1", ... of this machine.

        Args:
            num_slots: at least 1.
            memory_bytes: memory of each slot; None shares this machine's memory out evenly, or its cgroup's part.
        """
        if num_slots < 1:
            raise ClusterError(f"cpu_slots={num_slots}: a cluster needs at least 1 slot")
        if memory_bytes is None:
            memory_bytes = _host_memory_bytes() // num_slots
        return cls(
            devices=tuple(
                Device(index=i, kind="cpu", name=f"cpu:{i}", memory_bytes=memory_bytes) for i in range(num_slots)
            )
        )

    @classmethod
    def cuda_nodes(cls, num_nodes: int, num_devices_per_node: int, *, name: str, memory_bytes: int) -> "Cluster":
        """`num_nodes` machines with `num_devices_per_node` equal GPUs each; for planning without owning them."""
        if num_nodes < 1 or num_devices_per_node < 1:
            raise ClusterError(f"num_nodes={num_nodes}, num_devices_per_node={num_devices_per_node}: use at least 1")
        return cls(
            devices=tuple(
                Device(index=i, kind="cuda", node=i // num_devices_per_node, name=name, memory_bytes=memory_bytes)
                for i in range(num_nodes * num_devices_per_node)
            )
        )

    @property
    def num_devices(self) -> int:
        return len(self.devices)

    @property
    def num_nodes(self) -> int:
        return len({device.node for device in self.devices})

    def index_on_node(self, index: int) -> int:
        """Index of a device among those of its kind on its node, from 0, as the node's own tools count."""
        mine = self.devices[index]
        return sum((device.kind, device.node) == (mine.kind, mine.node) for device in self.devices[:index])

    def indices_of_kind(self, kind: DeviceKind) -> tuple[int, ...]:
        """Indices of the devices of that kind, ascending."""
        return tuple(device.index for device in self.devices if device.kind == kind)

    @property
    def compute_devices(self) -> tuple[int, ...]:
        """Indices of the devices the modes place stages on: the GPUs, or the CPU slots where there is no GPU.

        CPU slots beside GPUs are used only where a plan names them.
        """
        return self.indices_of_kind("cuda") or self.indices_of_kind("cpu")

    def describe(self) -> str:
        """One line for display: `2 nodes, 16 devices: 16 x NVIDIA H100 (cuda, 80.0 GiB)`."""
        counts = Counter((device.name, device.kind, device.memory_bytes) for device in self.devices)
        if all(device.kind == "cpu" for device in self.devices):  # each slot has a name of its own
            counts = Counter(("CPU slot", "cpu", device.memory_bytes) for device in self.devices)
        parts = [f"{n} x {name} ({kind}, {size / (1 << 30):.1f} GiB)" for (name, kind, size), n in counts.items()]
        return f"{_plural(self.num_nodes, 'node')}, {_plural(self.num_devices, 'device')}: {', '.join(parts)}"


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _host_memory_bytes() -> int:
    try:
        return usable_bytes()
    except (AttributeError, ValueError, OSError) as e:
        raise ClusterError("this system does not tell its memory; pass memory_bytes to Cluster.cpu_slots") from e
