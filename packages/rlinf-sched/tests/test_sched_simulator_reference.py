"""The native event core against a plain SimPy model, and laws that hold for every timeline."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, given, settings

from rlinf_sched.simulator import simulate
from rlinf_sched.simulator.timeline import SPAN_KINDS


def _load(name):
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec and spec.loader
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


Reference = _load("simpy_reference").Reference
problems = _load("generated_problems").problems
often = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))


def spans_of(timeline):
    for i in range(len(timeline.stage)):
        kind = SPAN_KINDS[timeline.kind[i]]
        if kind != "sync":
            step = None if kind in ("onload", "offload") else int(timeline.step[i])
            stage = timeline.stages[timeline.stage[i]]
            times = (float(timeline.start_s[i]), float(timeline.end_s[i]))
            yield (stage, int(timeline.rank[i]), kind, step, int(timeline.num_items[i]), *times)


def in_order(spans):
    return sorted(spans, key=lambda s: (s[0], s[1], s[2], round(float(s[5]), 7), round(float(s[6]), 7), s[4]))


@often
@given(problems())
def test_every_span_is_where_the_reference_has_it(case):
    problem, plan = case
    reference = Reference(problem, plan, num_steps=2).run()
    timeline = simulate(problem, plan, num_steps=2)
    ours, theirs = in_order(spans_of(timeline)), in_order(reference.spans)
    assert [s[:5] for s in ours] == [s[:5] for s in theirs]
    np.testing.assert_allclose(
        np.array([s[5:] for s in ours]), np.array([[float(t) for t in s[5:]] for s in theirs]), rtol=1e-9, atol=1e-9
    )
    np.testing.assert_allclose(timeline.step_end_s, [float(t) for t in reference.step_ends], rtol=1e-9)
