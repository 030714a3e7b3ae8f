"""`rlinf doctor --cluster` without Ray: what is judged of a cluster's report, and how a probe measures."""

import json
import os
import socket
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from rlinf.cli import doctor_cluster
from rlinf.cli.main import main
from rlinf.cluster_findings import judge
from rlinf_sched import read_problem
from rlinf_workers.launchers import ClusterReport, LauncherSpec, NodeReport, WayReport
from rlinf_workers.launchers.ray import probe

TOKEN = b"0123456789abcdef"
EXAMPLE = Path(__file__).parents[2] / "rlinf-sched" / "examples" / "laptop.json"


def node(number: int, **other) -> NodeReport:
    seen = {
        "hostname": f"host{number}",
        "address": f"10.0.0.{number + 1}",
        "num_cpus": 8,
        "num_gpus": 1,
        "python": "3.11.9",
        "packages": {"rlinf": "2026.11.0", "torch": "2.9.0"},
        "cuda": "12.8",
        "gpus": (("GPU", 80 << 30),),
        "shared_free_bytes": 8 << 30,
        "shared_bytes": 8 << 30,
        "clock_error_s": 0.001,
    }
    return NodeReport(number=number, **(seen | other))


def cluster(*nodes: NodeReport, ways: tuple[WayReport, ...] | None = None) -> ClusterReport:
    numbers = [one.number for one in nodes]
    all_ways = tuple(
        WayReport(source=a, target=b, round_trip_s=1e-4, bytes_per_s=2e9) for a in numbers for b in numbers if a != b
    )
    return ClusterReport(nodes=nodes, ways=all_ways if ways is None else ways)


def wrong(report: ClusterReport) -> list[tuple[str, str, str]]:
    """Subject, text and hint of all that is not ok."""
    return [(one.subject, one.text, one.hint) for one in judge(report) if one.verdict != "ok"]


def test_equal_nodes_are_well():
    report = cluster(node(0), node(1), node(2, clock_offset_s=0.02))
    assert wrong(report) == []
    assert [one.subject for one in judge(report)] == [
        "nodes",
        "versions",
        "devices",
        "shared memory",
        "clocks",
        "network",
    ]


def test_a_cluster_that_takes_anybody_is_a_note():
    ((subject, text, hint),) = wrong(replace(cluster(node(0)), is_open=True))
    assert subject == "token" and "asks nobody for a token" in text and "docs/clusters.md" in hint


def test_versions_that_differ_are_named_with_their_nodes():
    packages = {"rlinf": "2026.11.0", "torch": "2.8.0", "ray": "2.60.0"}
    report = cluster(node(0), node(1, packages=packages), node(2, python="3.11.8"), node(3, packages=packages))
    assert wrong(report) == [
        ("versions", "Python: 3.11.9 on node 0, 1, 3; 3.11.8 on node 2", "install 3.11.9, the driver's, on node 2"),
        ("versions", "ray: none on node 0, 2; 2.60.0 on node 1, 3", "uninstall it on node 1, 3"),
        ("versions", "torch: 2.9.0 on node 0, 2; 2.8.0 on node 1, 3", "install 2.9.0, the driver's, on node 1, 3"),
    ]


def test_gpus_that_torch_does_not_find_are_a_problem_and_those_that_ray_does_not_count_a_note():
    hidden = node(1, num_gpus=8, gpus=(), cuda=None)
    unused = node(2, num_gpus=0)
    broken = node(3, torch_problem="ImportError: libcudart.so.13")
    findings = [one for one in judge(cluster(node(0), hidden, unused, broken)) if one.subject == "devices"]
    assert [one.verdict for one in findings] == ["problem", "note", "problem"]
    assert findings[0].text == "node 1 (host1, 10.0.0.2): Ray counts 8 GPUs, and torch finds 0"
    assert "built for CPUs alone" in findings[0].hint
    assert "torch finds 1 GPUs, and Ray counts 0" in findings[1].text
    assert "libcudart" in findings[2].text


def test_little_shared_memory_and_a_clock_that_is_off_are_notes():
    docker = node(1, shared_free_bytes=64 << 20, shared_bytes=64 << 20)
    late = node(2, clock_offset_s=-0.5, clock_error_s=0.002)
    unsure = node(3, clock_offset_s=0.5, clock_error_s=0.49)
    assert [(subject, text) for subject, text, _ in wrong(cluster(node(0), docker, late, unsure))] == [
        ("shared memory", "node 1 (host1, 10.0.0.2): 0.1 GiB of 0.1 GiB free in /dev/shm"),
        ("clocks", "node 2 (host2, 10.0.0.3): -500.0 ± 2.0 ms against the driver's clock"),
    ]


def test_a_way_that_is_closed_is_a_problem_and_a_slow_one_a_note():
    ways = cluster(node(0), node(1), node(2)).ways
    ways = (replace(ways[0], problem="timed out"), replace(ways[1], bytes_per_s=0.9e9), *ways[2:])
    assert [(subject, text) for subject, text, _ in wrong(cluster(node(0), node(1), node(2), ways=ways))] == [
        ("network", "node 0 (host0, 10.0.0.1) cannot reach node 1 (host1, 10.0.0.2): timed out"),
        ("network", "node 0 (host0, 10.0.0.1) to node 2 (host2, 10.0.0.3): 0.90 GB/s; the median is 2.00 GB/s"),
    ]


def test_a_node_that_nobody_could_look_at_is_a_problem_and_has_no_other():
    lost = NodeReport(number=1, hostname="h", address="a", num_cpus=1, num_gpus=1, problem="worker died")
    report = cluster(node(0), lost, ways=())
    assert wrong(report) == [("nodes", "nobody could look at node 1 (h, a): worker died", "see its Ray logs")]
    assert [row[-1] for row in doctor_cluster.node_rows(report)] == ["clock, ms", "+0.0 ± 1.0", "?"]


def test_the_planner_is_told_the_slowest_open_way():
    ways = (
        WayReport(source=0, target=1, round_trip_s=3e-4, bytes_per_s=2e9),
        WayReport(source=1, target=0, round_trip_s=1e-4, bytes_per_s=1e9),
        WayReport(source=1, target=2, problem="refused"),
    )
    links = cluster(node(0), node(1), node(2), ways=ways).links()
    assert links is not None
    assert (links.network_bytes_per_s, links.latency_s) == (1e9, 3e-4)
    assert cluster(node(0), ways=()).links() is None


def test_the_command_prints_tables_and_findings_and_changes_the_network_of_a_profile(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    report = cluster(node(0), node(1, python="3.11.8"))
    calls = []
    monkeypatch.setattr(doctor_cluster, "_looked_at", lambda *arguments: calls.append(arguments) or report)
    profile = tmp_path / "profile.json"
    before = read_problem(EXAMPLE)
    profile.write_text(before.to_json())
    assert main(["doctor", "--cluster", "--links", str(profile)]) == 1
    out = capsys.readouterr().out
    assert calls == [("", None)]
    rows = [line.split() for line in out.splitlines()]
    assert [
        "0",
        "host0",
        "10.0.0.1",
        "3.11.9",
        "2.9.0",
        "2026.11.0",
        "8",
        "1",
        "8.0",
        "GiB",
        "+0.0",
        "±",
        "1.0",
    ] in rows
    assert ["1", "->", "0", "100", "us", "2.00", "GB/s"] in rows
    assert "links: {network_bytes_per_s: 2e+09, latency_s: 0.0001}" in out
    after = read_problem(profile)
    assert (after.cluster.links.network_bytes_per_s, after.cluster.links.latency_s) == (2e9, 1e-4)
    assert after == doctor_cluster.with_network(before, after.cluster.links)
    assert after.cluster.links.node_bytes_per_s == before.cluster.links.node_bytes_per_s

    assert main(["doctor", "--cluster", "10.0.0.1:6379", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert calls[1:] == [("10.0.0.1:6379", None)]
    assert (len(document["nodes"]), len(document["ways"]), document["ways"][0]["bytes_per_s"]) == (2, 2, 2e9)
    assert [one["subject"] for one in document["findings"] if one["verdict"] == "problem"] == ["versions"]


def test_only_the_slowest_ways_have_a_row():
    report = cluster(*map(node, range(5)))
    fast = replace(report.ways[3], bytes_per_s=9e9)
    lines = doctor_cluster.way_table(replace(report, ways=(fast, *report.ways))).splitlines()
    assert len(lines) == 1 + doctor_cluster.MAX_WAYS + 1
    assert lines[-1] == "and 9 faster ones (--json shows all)"
    assert not any("9.00" in line for line in lines)


@pytest.mark.parametrize("links", ["profile.yaml", "none.json"])
def test_a_file_that_cannot_have_links_is_refused_before_anything_is_measured(links, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(doctor_cluster, "_looked_at", lambda *_: pytest.fail("measured"))
    assert main(["doctor", "--cluster", "--links", str(tmp_path / links)]) == 2
    assert "rlinf profile" in capsys.readouterr().err
    assert main(["doctor", "--links", str(tmp_path / links)]) == 2


# --- a probe ----------------------------------------------------------------------------------------------------------


def test_a_probe_measures_the_way_to_another_and_says_why_there_is_none(monkeypatch):
    monkeypatch.setattr(probe, "LONG_ENOUGH_S", 0.01)
    one, other = probe.NodeProbe("127.0.0.1", TOKEN), probe.NodeProbe("127.0.0.2", TOKEN)
    measured = one.measure(("127.0.0.2", other.port()))
    assert measured.keys() == {"round_trip_s", "bytes_per_s"}
    assert 0 < measured["round_trip_s"] < 1 and measured["bytes_per_s"] > 1e6
    with socket.create_server(("127.0.0.1", 0)) as server:
        closed = server.getsockname()[1]
    assert one.measure(("127.0.0.1", closed)) == {"problem": "Connection refused"}
    stranger = probe.NodeProbe("127.0.0.1", bytes(16))
    assert one.measure(("127.0.0.1", stranger.port())).keys() == {"problem"}, "it does not know the token"


def test_a_probe_counts_every_byte(monkeypatch):
    """The other side says that they have come only once all of them have."""
    monkeypatch.setattr(probe, "PIECE_BYTES", 1000)
    counted = []

    class Counting:
        def sendall(self, data):
            counted.append(len(data))

        def recv(self, num_bytes):
            return b"."

    probe._seconds_for(Counting(), 3500)  # pyright: ignore[reportArgumentType]
    assert counted == [8, 1000, 1000, 1000, 500]


def test_a_probe_sees_its_machine():
    report = probe.NodeProbe("127.0.0.1", TOKEN).look(["torch", "no-such-package"])
    import torch

    assert report["packages"] == {"torch": torch.__version__}
    space = os.statvfs("/dev/shm")
    assert report["shared_bytes"] == space.f_blocks * space.f_frsize
    assert (report["cuda"], len(report["gpus"])) == (torch.version.cuda, torch.cuda.device_count())


def test_a_torch_that_cannot_be_imported_is_told(monkeypatch):
    monkeypatch.setattr(probe, "LOOK_AT_TORCH", "raise ImportError('libcudart.so.13')")
    assert probe.look_at_torch() == {"torch_problem": "ImportError: libcudart.so.13"}


@dataclass(frozen=True, kw_only=True)
class Farm(LauncherSpec):
    """A custom launcher with a cluster of its own."""

    @property
    def can_look(self) -> bool:
        return True

    def look(self, address, packages, say):
        say(f"looking at {address}")
        assert "rlinf" in packages
        return cluster(node(0), ways=())


FARM = Farm(name="farm", implementation="nowhere:Launcher")


def test_a_custom_launcher_says_what_is_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--cluster", "barn", "--launcher", f"{__name__}:FARM"]) == 0
    terminal = capsys.readouterr()
    assert "host0" in terminal.out and terminal.err == "looking at barn\n"
    assert main(["doctor", "--cluster", "--launcher", "local"]) == 2
    assert "--launcher=local: it has no cluster to look at" in capsys.readouterr().err
    assert main(["doctor", "--launcher", "ray"]) == 2
