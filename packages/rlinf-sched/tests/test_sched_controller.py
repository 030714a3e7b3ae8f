"""Drift that lasts is found, noise is not; a change is proposed where it helps and admitted where it pays."""

import numpy as np
import pytest

from rlinf_sched import PlanError, SchedError
from rlinf_sched.derive import grpo
from rlinf_sched.dynamic import Controller, DriftDetector, cusum_threshold
from rlinf_sched.dynamic import controller as controller_module
from rlinf_sched.planner import plan
from rlinf_sched.simulator import simulate


@pytest.fixture(scope="module")
def running():
    problem = grpo(num_devices=64)
    return problem, plan(problem, modes=["disaggregated"])


def drift(controller, factors):
    """Feeds in steps until something is found; all stages but those named run as predicted."""
    expected = dict(controller.predicted_s)
    for _ in range(100):
        found = controller.observe({name: s * factors.get(name, 1.0) for name, s in expected.items()})
        if found:
            return found
    return {}


@pytest.mark.parametrize("noise", [0.01, 0.05, 0.1])
@pytest.mark.parametrize("tails", ["normal", "student"])
def test_false_alarms_stay_below_their_bound(noise, tails):
    draw, num_steps, rate = np.random.default_rng(1), 20_000, 2e-3
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
        found = detector.observe(factor * float(np.exp(0.03 * value)), 1.0)
        if found is not None:
            assert found == pytest.approx(factor, rel=0.08)
            assert step < 12
            return
    pytest.fail("not found")


def test_one_slow_step_is_no_drift():
    detector = DriftDetector()
    assert [detector.observe(100.0 if step == 50 else 1.0, 1.0) for step in range(200)] == [None] * 200


def test_only_what_drifted_is_named_and_the_change_helps(running):
    problem, chosen = running
    controller = Controller(problem=problem, plan=chosen)
    found = drift(controller, {"actor": 1.6})
    assert found == {"actor": pytest.approx(1.6, rel=0.01)}
    before_s = simulate(problem, chosen).step_s
    controller.rescale("actor", found["actor"])
    slowed_s = simulate(controller.problem, chosen).step_s
    proposal = controller.propose()
    assert proposal is not None and proposal.admitted
    proposal.plan.validate(problem.flow, problem.cluster)
    assert simulate(controller.problem, proposal.plan).step_s == pytest.approx(slowed_s - proposal.gain_s)
    assert len(proposal.plan.stage("actor").devices) > len(chosen.stage("actor").devices)
    assert slowed_s > before_s
    controller.adopt(proposal)
    assert controller.plan == proposal.plan
    assert drift(controller, {}) == {}


def test_what_does_not_pay_is_not_admitted(running):
    problem, chosen = running
    controller = Controller(problem=problem, plan=chosen, horizon_steps=1, restart_s=1e6)
    controller.rescale("actor", 1.6)
    proposal = controller.propose()
    assert proposal is not None and not proposal.admitted
    assert "beyond the horizon of 1" in proposal.reason
    with pytest.raises(PlanError, match="not admitted"):
        controller.adopt(proposal)


def test_no_neighbour_is_proposed_that_is_no_better(running):
    problem, chosen = running
    proposal = Controller(problem=problem, plan=chosen).propose()
    assert proposal is None or proposal.gain_s > 0


def test_a_decision_at_1024_devices_simulates_few_plans(monkeypatch):
    """What keeps it within 0.2 s there; the benchmark takes the time."""
    problem = grpo(num_devices=1024, num_prompts=2048)
    controller = Controller(problem=problem, plan=plan(problem, modes=["disaggregated"]))
    controller.rescale("actor", 1.6)
    simulated = []
    real = controller_module.simulate
    monkeypatch.setattr(controller_module, "simulate", lambda *args, **kw: simulated.append(1) or real(*args, **kw))
    proposal = controller.propose()
    assert len(simulated) <= 20
    assert proposal is not None and proposal.admitted


def test_what_is_refused(running):
    problem, chosen = running
    controller = Controller(problem=problem, plan=chosen)
    with pytest.raises(SchedError, match="did you mean 'actor'"):
        controller.observe({"actr": 1.0})
    with pytest.raises(SchedError, match="must be positive"):
        controller.observe({"actor": 0.0})
