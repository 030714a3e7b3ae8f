"""Profiles of workers: a trace for each rank, with the names of its stages."""

import gzip
import json
from pathlib import Path

import pytest

from rlinf_sched import Cluster, plan_for_mode
from rlinf_workers import Executor, LocalLauncher, StepContext
from rlinf_workers.testing.toy_flow import Number, toy_flow

CLUSTER = Cluster.cpu_slots(2)
NUMBERS = [Number(index=i, value=float(i)) for i in range(10)]


def names_in(trace: Path) -> set[str]:
    return {event.get("name", "") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}


@pytest.mark.parametrize("forks", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_each_rank_writes_a_trace_that_names_its_stages(tmp_path: Path, forks: bool, request: pytest.FixtureRequest):
    if forks:
        request.getfixturevalue("forked_workers")
    flow = toy_flow()
    plan = plan_for_mode(flow.graph(), CLUSTER, "collocated", num_ranks={"learn": 2})
    with Executor(cluster=CLUSTER, launcher=LocalLauncher(forks=forks), log_folder=tmp_path / "logs") as executor:
        executor.start(flow, plan)
        executor.sync_weights()
        for step in range(3):
            if step == 1:
                executor.begin_profile()
            context = StepContext(step=step, phase="train", seed=0, num_items=len(NUMBERS))
            executor.run(flow, context=context, feeds={"numbers": NUMBERS}, timeout_s=600)
            if step == 1:
                files = executor.end_profile(tmp_path / "profile")
        assert executor.end_profile(tmp_path / "none") == []
    graph = flow.graph()
    expected = {
        f"{name}-{rank}.json.gz": set(stages)
        for name, stages in graph.workers.items()
        for rank in range(plan.stage(stages[0]).num_ranks)
    }
    assert {file.name for file in files} == set(expected)
    for file in files:
        assert expected[file.name] <= names_in(file), file
    assert any("aten::" in name for file in files for name in names_in(file))
