"""An engine whose law is known gives spans, and the spans give the law back; the planner's simulator agrees with it."""

import pytest

from rlinf_sched import Cluster, FlowGraph, ItemCosts, Stage, plan_for_mode, simulate
from rlinf_workers.execution.executor import FlowRun
from rlinf_workers.item_costs import engine_times, seconds_as_they_came, spread_of
from rlinf_workers.profiling import OUTSIDE_ENGINE, Profiler
from rlinf_workers.spans import COMPUTE_SPAN, Span

GRAPH = FlowGraph(
    name="grpo",
    stages=(
        Stage(name="rollout", worker="rollout", role="rollout", reads=("prompts",), writes=("samples",)),
        Stage(name="actor", worker="actor", role="actor", reads=("samples",), trains=True),
    ),
    feeds=("prompts",),
)


def span(start_s, end_s, began_s=(), *, name="rollout", num_items=None, rank=0):
    return Span(
        name=name,
        category=COMPUTE_SPAN,
        start_ns=round(start_s * 1e9),
        duration_ns=round((end_s - start_s) * 1e9),
        num_items=len(began_s) if num_items is None else num_items,
        worker=f"{name}/{rank}",
        devices=(),
        began_ns=tuple(round(began * 1e9) for began in began_s),
    )


def test_an_item_alone_advances_twice_as_fast_as_one_of_two():
    times = engine_times([span(5, 6, [5]), span(6, 7, [5])])
    assert times is not None and times.most == 2
    assert times.seconds == pytest.approx((1.0, 3.0))


def test_what_an_item_waits_for_outside_the_engine_takes_as_long_alone():
    """Half of the time of the mean item: alone, the other half is twice as fast."""
    times = engine_times([span(5, 6, [5]), span(6, 7, [5])], waits_s=0.75)
    assert times is not None and times.waiting_share == 0.5
    assert times.seconds == pytest.approx((1.0, 1.0 + 1 / 0.75))


def test_nothing_advances_between_two_spans():
    times = engine_times([span(5, 6, [5]), span(16, 17, [5])])
    assert times is not None and times.seconds == pytest.approx((1.0, 3.0))


def test_a_place_that_is_refilled_keeps_the_engine_full():
    times = engine_times([span(0, 1, [0]), span(1, 3, [0, 1])])  # the third came when the first left
    assert times is not None and times.most == 2
    assert times.seconds == pytest.approx((1.0, 3.0, 2.0))


def test_a_stage_that_computes_on_what_it_then_hands_on_is_no_engine():
    assert engine_times([span(0, 1, [0.2, 0.2]), span(1, 2, [1])]) is None


def test_items_share_their_hand_over_and_come_by_their_beginning():
    ranks = [[span(0, 4, num_items=2), span(9, 12, num_items=1)], [span(1, 2, num_items=1), span(2, 3, num_items=0)]]
    assert seconds_as_they_came(ranks) == [2.0, 2.0, 1.0, 3.0]


def test_steps_that_tell_fewer_items_apart_do_not_count():
    assert spread_of([[1, 1, 1, 1]]) == ItemCosts()
    costs = spread_of([[1, 1, 1, 1], [1, 2, 4, 5], [2, 4, 8, 10]])
    assert costs.samples == pytest.approx((1 / 3, 2 / 3, 4 / 3, 5 / 3), abs=1e-4)


def test_the_planner_simulates_the_step_that_the_engine_made():
    """Four items, 1 to 4 s by themselves in an engine of four; the actor takes half as long for each. The long ones
    come last, so the actor waits for the first two and is then busy until 6.25 s."""
    spans = [span(0, 1, [0]), span(1, 1.75, [0]), span(1.75, 2.25, [0]), span(2.25, 2.5, [0])]
    actor_s = [(1, 1.5), (1.75, 2.75), (2.75, 4.25), (4.25, 6.25)]
    spans += [span(start, end, name="actor", num_items=1) for start, end in actor_s]
    cluster = Cluster.cpu_slots(2)
    plan = plan_for_mode(GRAPH, cluster, "disaggregated", granularity={"rollout": 1, "actor": 1})
    profiler = Profiler(GRAPH, cluster, 4)
    profiler.observe(FlowRun(metrics={}, collected={}, shown_rows=[], spans=spans, start_s=0.0, duration_s=6.25), plan)
    profiler.observe_memory(Running(), plan)  # pyright: ignore[reportArgumentType]
    problem = profiler.measured().problem
    rollout = problem.profiles.stages["rollout"]
    assert rollout.batching == "continuous" and rollout.costs.samples == pytest.approx((0.4, 0.8, 1.2, 1.6))
    assert simulate(problem, plan).step_s == pytest.approx(6.25, abs=1e-3)


def test_waits_outside_the_engine_are_the_part_of_an_item_that_fewer_items_do_not_shorten():
    """Episodes of 0.5, 1 and 1.5 times the mean in an engine where n of them take 0.6 + 0.2 n s: after 0.6, 1.1 and
    1.5 s they are whole. The law of fewer items follows from one size."""
    spans = [span(0, 0.6, [0]), span(0.6, 1.1, [0]), span(1.1, 1.5, [0])]
    spans += [span(start, start + 0.1, name="actor", num_items=1) for start in (0.6, 1.1, 1.5)]
    cluster = Cluster.cpu_slots(2)
    plan = plan_for_mode(GRAPH, cluster, "disaggregated", granularity={"rollout": 1, "actor": 1})
    profiler = Profiler(GRAPH, cluster, 3)
    mean_stay_s = (0.6 + 1.1 + 1.5) / 3
    profiler.observe(
        FlowRun(
            metrics={OUTSIDE_ENGINE: mean_stay_s / 2},
            collected={},
            shown_rows=[],
            spans=spans,
            start_s=0.0,
            duration_s=1.6,
        ),
        plan,
    )
    profiler.observe_memory(Running(), plan)  # pyright: ignore[reportArgumentType]
    problem = profiler.measured().problem
    rollout = problem.profiles.stages["rollout"].instances[0]
    assert [rollout.seconds(n) for n in (1, 2, 3)] == pytest.approx([0.8, 1.0, 1.2])
    assert simulate(problem, plan).step_s == pytest.approx(1.6, abs=2e-3)


class Running:
    """What the profiler asks of an executor."""

    def group(self, name):
        return self

    def call(self, method):
        return [(100, 150)]

    def weights_bytes(self, edge):
        return 8000
