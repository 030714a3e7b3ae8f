"""The native event core against a plain SimPy model, and laws that hold for every timeline."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from sched_generated_problems import problems
from sched_simpy_reference import Reference

from rlinf_sched.simulator import simulate
from rlinf_sched.simulator.timeline import SPAN_KINDS

ROUNDING = 1e-6
"""Of times, relative. The reference computes exactly, and rounding grows where an item beside another is much slower
than alone: with 2.5 s for two and 0.125 s for one twentyfold at each change, to 2e-8 in the worst case seen."""

often = settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


def spans_of(timeline):
    for i in range(len(timeline.stage)):
        kind = SPAN_KINDS[timeline.kind[i]]
        if kind != "sync":
            step = None if kind in ("onload", "offload") else int(timeline.step[i])
            stage = timeline.stages[timeline.stage[i]]
            times = (float(timeline.start_s[i]), float(timeline.end_s[i]))
            yield (stage, int(timeline.rank[i]), kind, step, int(timeline.num_items[i]), *times)


def in_order(spans):
    return sorted(spans, key=lambda s: (s[0], s[1], s[2], round(float(s[5]), 5), round(float(s[6]), 5), s[4]))


@often
@given(problems())
def test_every_span_is_where_the_reference_has_it(case):
    compare_with_reference(*case)


@pytest.mark.parametrize(
    "kind",
    [
        {"max_staleness": 1},
        {"max_staleness": 2},
        {"on_host": True},
        {"crowded": True},
        {"max_staleness": 1, "on_host": True, "crowded": True},
    ],
    ids=str,
)
@settings(often, max_examples=6)
@given(data=st.data())
def test_so_is_every_span_of_what_is_seldom_drawn(kind, data):
    compare_with_reference(*data.draw(problems(**kind)))


def compare_with_reference(problem, plan):
    reference = Reference(problem, plan, num_steps=2).run()
    timeline = simulate(problem, plan, num_steps=2)
    ours, theirs = in_order(spans_of(timeline)), in_order(reference.spans)
    assert [s[:5] for s in ours] == [s[:5] for s in theirs]
    np.testing.assert_allclose(
        np.array([s[5:] for s in ours]), np.array([[float(t) for t in s[5:]] for s in theirs]), rtol=ROUNDING, atol=1e-9
    )
    np.testing.assert_allclose(timeline.step_end_s, [float(t) for t in reference.step_ends], rtol=ROUNDING)


@often
@given(problems())
def test_laws_that_every_timeline_keeps(case):
    problem, plan = case
    timeline = simulate(problem, plan, seed=5, num_steps=2)
    compute = timeline.kind == SPAN_KINDS.index("compute")
    in_cycle = {name for cycle in problem.flow.cycles() for name in cycle}
    for s, name in enumerate(timeline.stages):
        rounds = problem.profile(name).rounds if name in in_cycle else 1
        for step in range(timeline.num_steps):
            mine = compute & (timeline.stage == s) & (timeline.step == step)
            assert timeline.num_items[mine].sum() == problem.num_items * rounds
    assert np.all(timeline.end_s >= timeline.start_s)
    assert np.all(np.diff(timeline.step_end_s) >= 0)
    assert problem.flow.max_staleness or timeline.end_s.max() <= timeline.step_end_s[-1] + 1e-9
    working = np.flatnonzero(np.isin(timeline.kind, [SPAN_KINDS.index(kind) for kind in ("compute", "step")]))
    for device in range(problem.cluster.num_devices):
        here = [
            (timeline.start_s[i], timeline.end_s[i])
            for i in working
            if device in timeline.devices_of(timeline.stages[timeline.stage[i]], timeline.rank[i])
        ]
        assert all(before[1] <= after[0] + 1e-9 for before, after in pairwise(sorted(here)))
        memory = timeline.memory(device)
        assert memory.num_bytes.min() >= 0 and memory.num_bytes[-1] == _kept(problem, plan, device)
    path = timeline.critical_path
    assert path[-1].end_s == timeline.step_end_s[-1] >= path[0].start_s
    assert all(before.end_s == after.start_s for before, after in pairwise(path))
    causes = timeline.cause[timeline.cause >= 0]
    assert np.all(timeline.start_s[causes] <= timeline.start_s[timeline.cause >= 0] + 1e-9)


def _kept(problem, plan, device):
    """Bytes of the stages that stay on the device (each is a worker group of its own)."""
    staying = [placed for placed in plan.stages if device in placed.devices and not placed.offload]
    instances = [(problem.profile(placed.stage).instances[0], len(placed.devices)) for placed in staying]
    return sum(instance.resident_bytes(count) for instance, count in instances)
