"""Load by other processes while something is measured, and what `rlinf profile` says of it."""

import os
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest

from rlinf.cli.profile_command import disturbances, with_notes
from rlinf.machine_load import CpuTimes, LoadMeter, OtherLoad, other_load, read_times
from rlinf_sched import (
    Cluster,
    FlowGraph,
    InstanceProfile,
    Problem,
    Profiles,
    Stage,
    StageProfile,
    StageSample,
    TimePoint,
    fit_stage,
)


def times(*rows: tuple[float, float, float]) -> list[CpuTimes]:
    return [CpuTimes(busy_s=busy, own_s=own, clock_s=clock) for busy, own, clock in rows]


def test_others_take_what_is_busy_and_not_ours():
    """Four CPUs for two seconds: 3 s of CPU in the first, 2 of them ours; 4 in the second, all ours."""
    load = other_load(times((10, 1, 0), (13, 3, 1), (17, 7, 2)), num_cpus=4)
    assert load == OtherLoad(mean_cpus=0.5, most_cpus=1.0, num_cpus=4)
    assert load.note is not None and load.note.startswith("other processes took 0.5 of this machine's 4 CPUs")


def test_a_process_of_ours_that_vanishes_is_no_gain():
    load = other_load(times((0, 50, 0), (1, 1, 1), (2, 2, 2)), num_cpus=4)
    assert load.mean_cpus == 0.5


def test_a_little_work_of_others_is_not_worth_a_note():
    assert OtherLoad(mean_cpus=0.39, most_cpus=4.0, num_cpus=4).note is None


def burn(seconds: float) -> str:
    return f"import time\nwhile time.process_time() < {seconds}: pass"


def test_what_descendants_compute_is_ours_and_what_strangers_compute_is_not():
    """Counted in CPU time, so that it does not matter how long it takes."""
    before = read_times()
    subprocess.run([sys.executable, "-c", burn(0.4)], check=True)
    after_own = read_times()
    stranger = subprocess.Popen(  # its parent ends at once, so that it is nobody's child here
        [sys.executable, "-c", "import os, sys, time\nif os.fork(): os._exit(0)\n" + burn(0.4)], stdout=subprocess.PIPE
    )
    assert stranger.stdout is not None
    stranger.stdout.read()  # until it has ended
    stranger.wait()
    after = read_times()
    assert after_own.own_s - before.own_s >= 0.35
    assert after.own_s - after_own.own_s < 0.35 <= after.busy_s - after_own.busy_s


def test_the_meter_reads_at_its_ends_and_in_between(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("rlinf.machine_load.INTERVAL_S", 0.01)
    count = iter(range(10_000))
    meter = LoadMeter(lambda: CpuTimes(busy_s=3.0 * (tick := next(count)), own_s=tick, clock_s=tick))
    with meter:
        while next(count) < 50:
            time.sleep(0.001)
    assert meter.load is not None and meter.load.most_cpus == min(2.0, os.cpu_count() or 1)
    assert not meter._thread.is_alive()


def one_stage() -> Problem:
    instance = InstanceProfile(
        num_devices=1, points=(TimePoint(num_items=1, seconds=1.0),), state_bytes=0, work_bytes=0
    )
    return Problem(
        flow=FlowGraph(
            name="one", stages=(Stage(name="actor", worker="actor", role="actor", reads=("x",)),), feeds=("x",)
        ),
        profiles=Profiles(stages={"actor": StageProfile(instances=(instance,), source="measured")}),
        cluster=Cluster.cuda_nodes(1, 1, name="GPU", memory_bytes=1 << 30),
        num_items=4,
    )


def measured(problem: Problem, seconds: list[float]) -> Any:
    samples = [StageSample(num_items=4, seconds=one) for one in seconds]
    return SimpleNamespace(problem=problem, fits={("actor", 2): fit_stage(samples)})


def test_a_profile_says_what_disturbed_it_on_the_terminal_and_in_its_file():
    problem = one_stage()
    busy = OtherLoad(mean_cpus=1.5, most_cpus=2.0, num_cpus=2)
    assert disturbances(measured(problem, [1.0, 1.02, 1.01]), None) == []
    notes = disturbances(measured(problem, [1.0, 2.0, 5.0]), busy)
    assert [note.split(",")[0] for note in notes] == [
        "other processes took 1.5 of this machine's 2 CPUs while it was measured (at most 2.0)",
        "repeats of actor on 2 ranks differ by 50% from their median",
    ]
    read = Problem.from_json(with_notes(problem, notes).to_json())
    assert all(profile.source.endswith("; ".join(notes)) for profile in read.profiles.stages.values())
    assert with_notes(problem, []) is problem
