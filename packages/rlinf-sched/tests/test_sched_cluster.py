"""Clusters: slots, nodes, mixed kinds, contradictions."""

import pytest

from rlinf_sched import Cluster, ClusterError, Device


def test_cpu_slots_are_numbered_and_share_the_memory():
    cluster = Cluster.cpu_slots(3, memory_bytes=2 << 30)
    assert [device.name for device in cluster.devices] == ["cpu:0", "cpu:1", "cpu:2"]
    assert [device.index for device in cluster.devices] == [0, 1, 2]
    assert cluster.num_devices == 3
    assert cluster.num_nodes == 1
    assert cluster.describe() == "1 node, 3 devices: 3 x CPU slot (cpu, 2.0 GiB)"


def test_cpu_slots_share_the_machine_s_memory_by_default():
    one, four = Cluster.cpu_slots(1).devices[0], Cluster.cpu_slots(4).devices[0]
    assert one.memory_bytes > 64 << 20
    assert one.memory_bytes // 4 == four.memory_bytes


def test_cuda_nodes():
    assert Cluster.cuda_nodes(1, 1, name="x", memory_bytes=1).num_devices == 1
    cluster = Cluster.cuda_nodes(2, 4, name="NVIDIA H100", memory_bytes=80 << 30)
    assert [device.node for device in cluster.devices] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert cluster.describe() == "2 nodes, 8 devices: 8 x NVIDIA H100 (cuda, 80.0 GiB)"


def test_a_mixed_cluster_places_on_its_gpus():
    gpu = Device(index=0, kind="cuda", name="NVIDIA L4", memory_bytes=24 << 30)
    big = Device(index=1, kind="cuda", name="NVIDIA H200", memory_bytes=140 << 30)
    slot = Device(index=2, kind="cpu", name="cpu:0", memory_bytes=8 << 30)
    cluster = Cluster(devices=(gpu, big, slot))
    assert cluster.compute_devices == (0, 1)
    assert cluster.indices_of_kind("cpu") == (2,)
    assert "1 x NVIDIA L4 (cuda, 24.0 GiB), 1 x NVIDIA H200 (cuda, 140.0 GiB), 1 x cpu:0" in cluster.describe()
    assert Cluster.cpu_slots(2, memory_bytes=1).compute_devices == (0, 1)


def test_a_node_counts_its_devices_of_a_kind():
    gpus = Cluster.cuda_nodes(2, 3, name="x", memory_bytes=1)
    assert [gpus.index_on_node(index) for index in range(6)] == [0, 1, 2, 0, 1, 2]
    mixed = Cluster(devices=(device(), device(index=1, kind="cuda", name="x"), device(index=2)))
    assert [mixed.index_on_node(index) for index in range(3)] == [0, 0, 1]


def device(**changes):
    return Device(**{"index": 0, "kind": "cpu", "name": "cpu:0", "memory_bytes": 1, **changes})


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Cluster(devices=()), "no devices"),
        (lambda: Cluster(devices=(device(index=1),)), r"devices\[0\].index=1"),
        (lambda: Cluster(devices=(device(kind="tpu"),)), "kind='tpu'; use one of cpu, cuda"),
        (lambda: Cluster(devices=(device(memory_bytes=0),)), "memory_bytes=0 must be positive"),
        (lambda: Cluster(devices=(device(node=-1),)), "node=-1"),
        (lambda: Cluster.cpu_slots(0), "at least 1 slot"),
        (lambda: Cluster.cuda_nodes(1, 0, name="x", memory_bytes=1), "num_devices_per_node=0"),
    ],
)
def test_contradictions(make, text):
    with pytest.raises(ClusterError, match=text):
        make()
