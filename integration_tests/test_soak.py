"""What a soaked run is judged by, and a short one; `tools/soak.sh` runs a long one."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from process_resources import Before, ProcessResources, processes_below, resources_of
from rlinf_comm import Channel
from soaked_run import Sample, compared, judge, soak

MANY = 1000


def samples(**growth: float) -> list[Sample]:
    """1,000 steps of a driver and a worker; the worker's numbers grow by so much a step."""
    start = {"rss_bytes": 10**8, "num_descriptors": 20, "num_threads": 4, "num_segments": 3}
    return [
        Sample(
            step,
            {
                "driver": ProcessResources(**start),
                "actor/0": ProcessResources(
                    **{name: int(value + step * growth.get(name, 0)) for name, value in start.items()}
                ),
            },
        )
        for step in range(0, MANY, 10)
    ]


def test_nothing_that_grows_is_well():
    assert judge(samples(), MANY) == []
    assert judge(samples(rss_bytes=1000), MANY) == [], "0.8 % over the run"


@pytest.mark.parametrize("what", ["num_descriptors", "num_threads", "num_segments"])
def test_one_more_is_too_many(what):
    (problem,) = judge(samples(**{what: 1 / 400}), MANY)
    assert problem.startswith(f"actor/0: {what} grew from ")


def test_memory_that_grows_by_more_than_a_hundredth_is_told():
    (problem,) = judge(samples(rss_bytes=2000), MANY)
    assert problem.startswith("actor/0: rss_bytes grew from 100,370,000 to 101,810,000 (+1.43%)"), problem


def test_what_happens_in_the_warm_up_does_not_count():
    small = ProcessResources(rss_bytes=1, num_descriptors=1, num_threads=1, num_segments=1)
    warm = [replace(one, held={**one.held, "driver": small}) if one.steps_done < 100 else one for one in samples()]
    assert judge(warm, MANY) == []
    assert "only 0 samples" in judge(samples(), 10 * MANY)[0]


def test_step_times_are_compared_after_the_warm_up():
    assert compared([9.0] * 100 + [1.0] * 450 + [2.0] * 450)["ratio"] == 2.0


def test_this_process_is_seen(tmp_path):
    before = resources_of(os.getpid())
    channel = Channel.create("held")
    after = resources_of(os.getpid())
    assert before is not None and after is not None and after.num_segments == before.num_segments + 1
    assert channel.name == "held"
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert {os.getpid(), child.pid} <= processes_below(os.getpid())
    beginning = Before.now(tmp_path / "tmp")
    assert beginning.left({child.pid: "a child"}) == [f"process {child.pid} (a child)"]
    child.communicate()
    assert resources_of(child.pid) is None and beginning.left({child.pid: "a child"}) == []
    (tmp_path / "tmp" / "left").touch()
    assert beginning.folders() == ["left"]


@pytest.mark.slow
def test_a_short_soak_finds_nothing(tmp_path):
    assert soak(tmp_path, 400)["problems"] == []
