"""Drift that lasts is detected, and noise is not."""

import numpy as np
import pytest
from sched_planner_problems import chain, gpus, profile

from rlinf_sched import SchedError
from rlinf_sched.drift import DriftDetector, DriftMonitor, cusum_threshold
from rlinf_sched.modes import plan_for_mode
from rlinf_sched.simulator import simulate


@pytest.fixture(scope="module")
def running():
    profiles = {name: profile(1.0, num_devices=1, step_s=step_s) for name, step_s in (("rollout", 0.0), ("actor", 2.0))}
    problem = chain(profiles, gpus(2))
    return problem, plan_for_mode(problem.flow, problem.cluster, "disaggregated")


def drift(monitor, factors):
    """Feeds in steps until something is found; all stages but those named run as predicted."""
    expected = dict(monitor.predicted_s)
    for _ in range(100):
        drifts = monitor.observe({name: s * factors.get(name, 1.0) for name, s in expected.items()})
        if drifts:
            return drifts
    return {}


@pytest.mark.parametrize(("tails", "noise"), [("normal", 0.1), ("student", 0.01), ("student", 0.1)])
def test_false_alarms_stay_below_their_bound(tails, noise):
    draw, num_steps, rate = np.random.default_rng(1), 4_000, 2e-3
    values = draw.standard_normal(num_steps) if tails == "normal" else draw.standard_t(3, num_steps) / np.sqrt(3)
    detector = DriftDetector(false_alarms_per_step=rate)
    alarms = sum(detector.observe(float(np.exp(noise * value)), 1.0) is not None for value in values)
    assert alarms <= rate * num_steps + 3 * np.sqrt(rate * num_steps)


def test_the_threshold_is_the_bound_it_says():
    slack, rate = 0.5, 0.01
    height, draw, lengths = cusum_threshold(slack, rate), np.random.default_rng(0), []
    for _ in range(300):
        up = down = length = 0
        while max(up, down) <= height:
            value, length = draw.standard_normal(), length + 1
            up, down = max(0, up + value - slack), max(0, down - value - slack)
        lengths.append(length)
    assert np.mean(lengths) == pytest.approx(1 / rate, rel=0.25)


@pytest.mark.parametrize("factor", [0.7, 1.25, 2.0])
def test_a_lasting_drift_is_found_soon_and_its_size_is_right(factor):
    draw, detector = np.random.default_rng(3), DriftDetector()
    for value in draw.standard_normal(40):
        assert detector.observe(float(np.exp(0.03 * value)), 1.0) is None
    for step, value in enumerate(draw.standard_normal(20)):
        drift_factor = detector.observe(factor * float(np.exp(0.03 * value)), 1.0)
        if drift_factor is not None:
            assert drift_factor == pytest.approx(factor, rel=0.08)
            assert step < 12
            return
    pytest.fail("not found")


def test_one_slow_step_is_no_drift():
    detector = DriftDetector()
    assert [detector.observe(100.0 if step == 50 else 1.0, 1.0) for step in range(200)] == [None] * 200


def test_only_the_stage_that_drifted_is_named_and_rescaled(running):
    problem, chosen = running
    monitor = DriftMonitor(problem=problem, plan=chosen)
    before_s = monitor.step_s
    assert before_s == simulate(problem, chosen).step_s
    drifts = drift(monitor, {"actor": 1.6})
    assert drifts == {"actor": pytest.approx(1.6, rel=0.01)}
    expected = monitor.predicted_s["actor"] * drifts["actor"]
    monitor.rescale("actor", drifts["actor"])
    assert monitor.predicted_s["actor"] == pytest.approx(expected)
    assert monitor.step_s == simulate(monitor.problem, chosen).step_s > before_s
    assert drift(monitor, {}) == {}


def test_unknown_stages_and_times_that_are_not_positive_are_refused(running):
    problem, chosen = running
    monitor = DriftMonitor(problem=problem, plan=chosen)
    with pytest.raises(SchedError, match="did you mean 'actor'"):
        monitor.observe({"actr": 1.0})
    with pytest.raises(SchedError, match="must be positive"):
        monitor.observe({"actor": 0.0})
