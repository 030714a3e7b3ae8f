"""The timer of many plans against the simulator of one."""

import math

from hypothesis import given, settings
from sched_generated_problems import problems

from rlinf_sched import Plan, Problem, simulate
from rlinf_sched.errors import SchedError
from rlinf_sched.planner.placements import StagePlacement, bits_of, devices_of, first_of, last_of, placements_of
from rlinf_sched.planner.plan_timer import PlanTimer


@given(problems())
@settings(max_examples=150, deadline=None)
def test_a_step_takes_what_the_simulator_says(one: tuple[Problem, Plan]):
    problem, plan = one
    try:
        expected = simulate(problem, plan).step_s
    except SchedError:
        expected = math.inf
    placements, count = placements_of(problem, plan), problem.cluster.num_devices
    elsewhere = tuple(
        StagePlacement(
            bits_of((device + 1) % count for device in devices_of(placement.devices)),
            placement.num_ranks,
            1,
            not placement.offload,
        )
        for placement in placements
    )
    timer = PlanTimer(problem, elsewhere)
    timer.step_s(elsewhere)
    assert timer.step_s(placements) == timer.step_s(placements, expected) == expected
    if not problem.flow.max_staleness:
        assert timer.step_s(placements, expected / 2) == math.inf


def test_sets_of_devices():
    devices = (0, 3, 4, 64, 100_000)
    bits = bits_of(devices)
    assert bits == sum(1 << device for device in devices)
    assert devices_of(bits) == devices
    assert devices_of(first_of(bits, 2)) == (0, 3)
    assert devices_of(last_of(bits, 2)) == (64, 100_000)
    assert first_of(bits, 9) == last_of(bits, 9) == bits
    assert first_of(bits, 0) == 0 == bits_of([])
