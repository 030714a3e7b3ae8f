"""Two pretended nodes of a Ray cluster: a run has the numbers of one machine to the bit; `rlinf doctor` sees both."""

import json
import subprocess

import pytest

from command_line import (
    END_TIMEOUT_S,
    RLINF,
    SHORT_SORT,
    all_gone,
    environment,
    numbers,
    start,
    steps_done,
    train,
    wait_for,
    worker_processes,
)

pytest.importorskip("ray", reason="pip install 'rlinf[ray]'")

SETTINGS = SHORT_SORT | {"run.num_steps": 2, "cluster.num_devices": 2}
"""More slots than a node has."""
NODE = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": 80 << 20}
ATTEMPTS = 5
"""Ray gives a node 30 s to start, and a busy machine may take more."""


@pytest.fixture(scope="module")
def address():
    """Of a cluster of two nodes with one CPU each."""
    from ray.cluster_utils import Cluster

    nodes = Cluster()
    try:
        while len(nodes.list_all_nodes()) < 2:
            _add_node(nodes)
        yield nodes.address
    finally:
        nodes.shutdown()


def _add_node(nodes):
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return nodes.add_node(**NODE)
        except Exception as error:
            if attempt == ATTEMPTS or "timed out during startup" not in str(error):
                raise
    raise AssertionError("unreachable")


def logs(path):
    return {str(log.relative_to(path)) for log in (path / "logs").glob("*/*.log")}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["collocated", "disaggregated"])
def test_two_nodes_give_the_numbers_of_one_machine(mode, address, tmp_path):
    alone = train("sort-grpo", tmp_path / "local", SETTINGS | {"mode": mode})
    local = numbers(alone)
    by_ray = {"cluster.launcher": "ray", "cluster.launcher_options": f"{{address: '{address}'}}"}
    ray_run = train("sort-grpo", tmp_path / "ray", SETTINGS | {"mode": mode} | by_ray, on_network=True)
    assert any(row["actor/grad_norm"] > 0 for row in local[0]), "equal because nothing was learned proves nothing"
    assert numbers(ray_run) == local
    assert all_gone(worker_processes(ray_run).values())
    assert logs(ray_run) == logs(alone)


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1], ids=["the driver's", "another"])
def test_a_run_goes_on_without_a_node_whose_raylet_was_killed(lost, tmp_path):
    """Ray lists it as alive for some time after that. What Ray says of it does not reach the screen."""
    from ray.cluster_utils import Cluster

    settings = SETTINGS | {"mode": "disaggregated", "run.num_steps": 200, "run.evaluate_every": 100}
    nodes = Cluster()
    try:
        raylets = [_add_node(nodes).all_processes["raylet"][0].process for _ in range(2)]
        by_ray = {
            "cluster.launcher": "ray",
            "cluster.launcher_options": f"{{address: '{nodes.address}', num_nodes: 2, wait_s: 10}}",
        }
        output = tmp_path / "ray"
        process = start("sort-grpo", output, settings | by_ray | {"run.checkpoint_every": 20})
        wait_for(lambda: steps_done(output) >= 30, process, "step 30")
        raylets[lost].kill()
        raylets[lost].wait()
        out, err = process.communicate(timeout=END_TIMEOUT_S)
        assert process.returncode == 0, out + err
        assert "on 1 of 2 nodes" in out, out
        assert "raylet" not in out + err, out + err
    finally:
        nodes.shutdown()
    alone = train("sort-grpo", tmp_path / "local", settings | {"cluster.num_devices": 1, "mode": "collocated"})
    assert numbers(output) == numbers(alone)


@pytest.mark.slow
def test_the_doctor_looks_at_both_nodes_and_at_the_ways_between_them(address):
    done = subprocess.run(
        [*RLINF, "doctor", "--cluster", address, "--json"],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=END_TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert [(node["number"], node["num_cpus"], node["problem"]) for node in report["nodes"]] == [(0, 1, ""), (1, 1, "")]
    assert report["nodes"][0]["packages"]["rlinf"] and report["nodes"][0]["packages"] == report["nodes"][1]["packages"]
    assert all(abs(node["clock_offset_s"]) <= node["clock_error_s"] for node in report["nodes"]), (
        "one machine, one clock"
    )
    assert [(way["source"], way["target"], way["problem"]) for way in report["ways"]] == [(0, 1, ""), (1, 0, "")]
    assert all(way["bytes_per_s"] > 0 and way["round_trip_s"] > 0 for way in report["ways"])
    assert not [one for one in report["findings"] if one["verdict"] == "problem"]
