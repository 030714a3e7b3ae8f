"""GPUs by their public datasheets: peak rates. The utilisation of real kernels is defined where profiles are derived.

Sources: NVIDIA datasheets "H100 Tensor Core GPU", "H200 Tensor Core GPU", "A100 80GB" (SXM parts; the bf16 figure is
half of the printed one, which counts structured sparsity), "Ada GPU architecture" (RTX 4090), and the H20's public
figures.
Memory is the printed size in powers of ten; drivers report a few per cent more.
Network: one port per GPU as in DGX systems, 400 Gb/s for Hopper (DGX H100 datasheet), 200 Gb/s for A100 (DGX A100).
Cores: two processors of 56 in a DGX H100 or H200, of 64 in a DGX A100 (their datasheets). The H20 and the RTX 4090 are
sold in nodes of many kinds.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from rlinf_sched.cluster import Cluster, Device, Links
from rlinf_sched.errors import ClusterError, did_you_mean

GPUS_PER_NODE = 8
"""GPUs of one HGX or DGX board."""
SYNC_BYTES_PER_S = 9.4e9
"""Rate at which a model's bf16 weights come from a Megatron trainer into engines on the same GPUs: the 61 GB of
Qwen3-30B-A3B on 8 H100 take 6 s in SkyRL (NovaSky-AI/SkyRL, pull request 487; 48 s before its tensors went in buckets)
and 7 s in slime (60 s before; its post on weight sync). Without a trainer to gather from, checkpoint-engine brings 61
to 76 GB/s to 8 H800, and as much to 256 H20: the number of GPUs does not matter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One GPU product. Rates are per GPU and, for links, one direction."""

    name: str
    flops_per_s: float
    """Peak rate of dense bf16 arithmetic in the tensor cores, with fp32 accumulation."""
    memory_bytes: int
    memory_bytes_per_s: float
    node_bytes_per_s: float
    """Rate to another GPU of the node: NVLink's, or PCIe's where there is none."""
    host_bytes_per_s: float
    """Rate to host memory over PCIe."""
    network_bytes_per_s: float
    node_cores: int = 0
    """Cores of the node that it is sold in. 0: nodes differ, so that cores are not counted."""

    @property
    def links(self) -> Links:
        """The links of a node of these GPUs."""
        return Links(
            node_bytes_per_s=self.node_bytes_per_s,
            network_bytes_per_s=self.network_bytes_per_s,
            host_bytes_per_s=self.host_bytes_per_s,
            sync_bytes_per_s=SYNC_BYTES_PER_S,
        )


_HOPPER_LINKS = {"node_bytes_per_s": 450e9, "host_bytes_per_s": 64e9, "network_bytes_per_s": 50e9}
_DGX_HOPPER_CORES = 2 * 56

GPUS = {
    "H100": Gpu(
        name="NVIDIA H100 SXM",
        flops_per_s=989e12,
        memory_bytes=80 * 10**9,
        memory_bytes_per_s=3.35e12,
        node_cores=_DGX_HOPPER_CORES,
        **_HOPPER_LINKS,
    ),
    "H200": Gpu(
        name="NVIDIA H200 SXM",
        flops_per_s=989e12,
        memory_bytes=141 * 10**9,
        memory_bytes_per_s=4.8e12,
        node_cores=_DGX_HOPPER_CORES,
        **_HOPPER_LINKS,
    ),
    "H20": Gpu(
        name="NVIDIA H20",
        flops_per_s=148e12,
        memory_bytes=96 * 10**9,
        memory_bytes_per_s=4.0e12,
        node_cores=0,
        **_HOPPER_LINKS,
    ),
    "A100": Gpu(
        name="NVIDIA A100 80GB SXM",
        flops_per_s=312e12,
        memory_bytes=80 * 10**9,
        memory_bytes_per_s=2.039e12,
        node_bytes_per_s=300e9,
        host_bytes_per_s=32e9,
        network_bytes_per_s=25e9,
        node_cores=2 * 64,
    ),
    "RTX 4090": Gpu(
        name="NVIDIA GeForce RTX 4090",
        flops_per_s=165e12,
        memory_bytes=24 * 10**9,
        memory_bytes_per_s=1.008e12,
        node_bytes_per_s=32e9,
        host_bytes_per_s=32e9,
        network_bytes_per_s=12.5e9,  # 100 Gb/s shared by the node would be less; consumer boards have none of their own
    ),
}
"""Short name -> datasheet."""


def sheet_of(products: Iterable[str]) -> str | None:
    """The name in `GPUS` of GPUs that their driver calls so, for example "NVIDIA H100 80GB HBM3"; None: they are
    unknown, of several kinds, or none."""
    names = set(products)
    return next((key for key in GPUS if names and all(f" {key} " in f" {name} " for name in names)), None)


def find_gpu(name: str) -> Gpu:
    """The GPU of that short name, upper or lower case.

    Raises:
        ClusterError: there is none; says which there are.
    """
    by_name = {key.lower(): gpu for key, gpu in GPUS.items()}
    try:
        return by_name[name.lower()]
    except KeyError:
        raise ClusterError(f"gpu={name!r}{did_you_mean(name, GPUS)}") from None


def gpu_cluster(gpu: str, num_devices: int) -> Cluster:
    """`num_devices` equal GPUs in nodes of `GPUS_PER_NODE`; the last node may have fewer.

    Raises:
        ClusterError: an unknown GPU, or fewer than one device.
    """
    if num_devices < 1:
        raise ClusterError(f"num_devices={num_devices}: use at least 1")
    sheet = find_gpu(gpu)
    devices = (
        Device(index=i, kind="cuda", node=i // GPUS_PER_NODE, name=sheet.name, memory_bytes=sheet.memory_bytes)
        for i in range(num_devices)
    )
    return Cluster(devices=tuple(devices), links=sheet.links, cpu_cores=sheet.node_cores)
