"""RayLauncher on two pretended nodes of this machine: it conforms, and workers are where Ray has room for them."""

import os
import time
from pathlib import Path

import pytest
from workers_ray import ADDRESS, joined

from rlinf_sched import Cluster, Device
from rlinf_workers.errors import ClusterRefused
from rlinf_workers.launchers.base import Identity, WorkerSpec
from rlinf_workers.testing.launchers import CHECKS, START_S, assert_gone, launched
from rlinf_workers.testing.toy_flow import Fault

pytest.importorskip("ray", reason="pip install 'rlinf-workers[ray]'")
pytestmark = pytest.mark.slow  # a busy machine may need longer to start a node than Ray waits

NODE = {"num_cpus": 2, "include_dashboard": False, "object_store_memory": 80 << 20}
ATTEMPTS = 5
"""Ray gives a node 30 s to start, and a busy machine may take more."""


class Where(Fault):
    """Tells where it is."""

    def gpus(self) -> str | None:
        return os.environ.get("CUDA_VISIBLE_DEVICES")

    def agent(self) -> int:
        return os.getppid()


@pytest.fixture(scope="module", autouse=True)
def two_nodes():
    """A node without GPUs, which the driver is on, and one that Ray counts four on."""
    import ray
    from ray.cluster_utils import Cluster as RayCluster

    # Ray would not pretend GPUs that this process hides.
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    nodes = _started(lambda: RayCluster(initialize_head=True, head_node_args={**NODE, "num_gpus": 0}))
    try:
        _started(lambda: nodes.add_node(**NODE, num_gpus=4))
        nodes.wait_for_nodes()
        monkeypatch.setenv(ADDRESS, str(nodes.address))
        yield nodes
    finally:
        monkeypatch.undo()
        ray.shutdown()
        nodes.shutdown()


def _started(start):
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return start()
        except Exception as error:
            if attempt == ATTEMPTS or "timed out during startup" not in str(error):
                raise
    raise AssertionError("unreachable")


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_it_conforms(check, tmp_path):
    check(joined, tmp_path)


def test_ranks_are_on_their_nodes_and_see_the_gpus_that_ray_gave(tmp_path):
    """The run takes two GPUs of the second node, and its worker the second of them."""
    with launched(lambda: joined(cluster=cluster(1, 2))) as launcher:
        handles = [start(launcher, tmp_path, rank, node=rank, gpus=(1,) * rank) for rank in range(2)]
        gpus = [handle.call("gpus").result(START_S) for handle in handles]
        node_gpus = launcher._agents[1].result().arrival.gpus
        assert len(node_gpus) == 2 and gpus[1] == node_gpus[1]
        agents = [handle.call("agent").result(START_S) for handle in handles]
        raylets = [Path(f"/proc/{int(parent_of(agent))}/cmdline").read_text() for agent in agents]
        assert all(node.id in raylet for node, raylet in zip(launcher._nodes, raylets, strict=True))
        launcher.shutdown()
        assert_gone(agents)


def test_what_the_run_has_is_reserved_until_it_ends():
    """Another run waits for a while and then says who has what; afterwards there is room again."""
    with launched(lambda: joined(cluster=cluster(1, 3))):
        with pytest.raises(ClusterRefused) as caught:
            joined(cluster=cluster(0, 2), wait_s=1.0)
        assert "free 0 CPUs, 1 GPUs; wanted 2 and 2" in str(caught.value)
    joined(cluster=cluster(0, 2)).shutdown()


def test_too_little_is_refused_with_what_there_is():
    began_s = time.monotonic()
    with pytest.raises(ClusterRefused, match=r"2 CPUs, 4 GPUs; free .*; wanted 2 and 5"):
        joined(cluster=cluster(1, 5), wait_s=600.0)
    assert time.monotonic() - began_s < 300, "what can never be is not waited for"
    with pytest.raises(ClusterRefused, match=r"num_nodes=3: after 1 s the Ray cluster has 2 nodes:\nnode 0, .*2 CPUs"):
        joined(num_nodes=3, wait_s=1.0)


def test_the_drivers_node_is_the_first(two_nodes):
    from rlinf_workers.launchers.ray.launcher import RayLauncher

    nodes = RayLauncher.nodes(address=two_nodes.address)
    assert [node.id for node in nodes] == [two_nodes.head_node.node_id, two_nodes.list_all_nodes()[1].node_id]
    assert [(node.num_cpus, node.num_gpus, node.gpus) for node in nodes] == [(2, 0, ()), (2, 4, ())], "torch sees none"
    assert RayLauncher.nodes(address=two_nodes.address, num_nodes=1) == nodes[:1]


def cluster(num_slots: int, num_gpus: int) -> Cluster:
    """Slots of the first node and GPUs of the second."""
    slots = [Device(index=index, kind="cpu", name="slot", memory_bytes=1) for index in range(num_slots)]
    gpus = [
        Device(index=num_slots + index, kind="cuda", node=1, name="GPU", memory_bytes=1) for index in range(num_gpus)
    ]
    return Cluster(devices=(*slots, *gpus))


def start(launcher, folder, rank, **where):
    identity = Identity(role="where", rank=rank, num_ranks=2)
    spec = WorkerSpec(identity=identity, worker_class=Where, log_path=folder / f"{identity.name}.log", **where)
    return launcher.start(spec)


def parent_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
