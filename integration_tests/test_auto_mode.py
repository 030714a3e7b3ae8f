"""Mode auto on real processes: it measures, plans, maybe moves, and the numbers are those of any other plan."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from command_line import LONG_SORT, flags, numbers, rlinf, rows, train, weights
from rlinf import jobs
from rlinf.config.load import load_config, to_yaml
from rlinf.config.overrides import parse_overrides
from rlinf.loop.moving import UpcomingMove
from rlinf.planning import auto_mode
from rlinf.planning.auto_mode import AutoMode
from rlinf.planning.plans import make_plans
from rlinf.run_folder import RunFolder
from rlinf_sched import best_plan as make_plan

SETTINGS = LONG_SORT | {"run.checkpoint_every": 100}
NUM_PROBES = 1 + 3 * auto_mode.NUM_REPEATS


def assert_equal(actual, expected):
    assert rows(actual) == rows(expected)
    assert rows(actual, "evaluations.jsonl") == rows(expected, "evaluations.jsonl")
    assert weights(actual) == weights(expected)


@pytest.mark.slow
def test_a_run_that_measures_and_plans_gives_the_same_numbers(tmp_path, long_sort_run):
    run = train("sort-grpo", tmp_path / "run", SETTINGS)
    assert_equal(run, long_sort_run)
    first, *_, last = json.loads((run / "plan_times.json").read_text())["plans"]
    assert (first["num_steps"], first["step"]["predicted_s"]) == (NUM_PROBES, None)
    assert last["step"]["predicted_s"] > 0
    assert last["step"]["measured_s"] > 0
    assert set(last["stages"]) == {"rollout", "reward", "actor"}
    problem = json.loads((run / "problem.json").read_text())
    assert "measured on" in problem["profiles"]["stages"]["actor"]["source"]
    assert "Predicted" in (run / "report.html").read_text()


def moves_apart(monkeypatch, settings, steps_ahead=0):
    """Whatever was measured, the planner is made to answer with a plan that moves processes and pays, and the run waits
    for the new processes. Returns the config."""
    config = load_config("sort-grpo", parse_overrides(flags(settings)))
    apart = jobs.prepare(load_config("sort-grpo", parse_overrides(flags(settings | {"mode": "disaggregated"}))))

    def elsewhere(job, flows, problem):
        there, predicted = make_plans(apart, flows, Path("none")), make_plan(problem).prediction
        assert predicted is not None
        plan = replace(there.plans["grpo"], prediction=replace(predicted, step_s=0.0, max_staleness=steps_ahead))
        return replace(there, plans={**there.plans, "grpo": plan}, problem=problem)

    def for_nothing(self, executor, *, num_steps, move_s):
        return better(self, executor, num_steps=num_steps, move_s=0.0)

    def waits_for_it(self, executor):
        while not is_ready(self, executor):
            time.sleep(0.01)
        return True

    better, is_ready = AutoMode.better, UpcomingMove.is_ready
    monkeypatch.setattr(auto_mode, "plans_of_problem", elsewhere)
    monkeypatch.setattr(UpcomingMove, "is_ready", waits_for_it)
    monkeypatch.setattr(AutoMode, "better", for_nothing)
    return config


def run_here(config, path):
    with RunFolder(path, config_yaml=to_yaml(config), command=["test"], keep_checkpoints=2) as folder:
        jobs.run(jobs.prepare(config), folder)
    return path


@pytest.mark.slow
def test_a_run_that_moves_to_another_plan_gives_the_same_numbers(tmp_path, long_sort_run, monkeypatch, capsys):
    path = run_here(moves_apart(monkeypatch, SETTINGS), tmp_path / "run")
    plans = json.loads((path / "plan_times.json").read_text())["plans"]
    assert (plans[0]["mode"], plans[0]["num_steps"]) == ("collocated", NUM_PROBES)
    assert (plans[1]["mode"], plans[1]["first_step"]) == ("disaggregated", NUM_PROBES)
    assert_equal(path, long_sort_run)
    messages = capsys.readouterr()
    assert "auto: starts actor, rollout elsewhere while steps go on; " in messages.out + messages.err


@pytest.mark.slow
def test_a_replay_runs_as_far_ahead_as_mode_auto_has_chosen(tmp_path, monkeypatch):
    monkeypatch.setattr(auto_mode, "NUM_REPEATS", 1)
    ahead = {
        "cluster.num_devices": 2,
        "cluster.oversubscribe": "true",
        "algorithm.max_staleness": 3,
        "run.record": "true",
        "run.num_steps": 16,
    }
    path = run_here(moves_apart(monkeypatch, SETTINGS | ahead, steps_ahead=1), tmp_path / "run")
    staleness = [row["rollout/staleness_max"] for row in rows(path)]
    assert staleness[0] == 0 and staleness[-1] == 1 and max(staleness) == 1
    replayed = tmp_path / "replayed"
    assert rlinf("replay", path, "--output", replayed).returncode == 0
    assert numbers(replayed) == numbers(path)


@pytest.mark.slow
def test_profiling_sees_every_stage_together_and_apart(tmp_path):
    config = load_config("sort-grpo", parse_overrides(flags(SETTINGS | {"cluster.num_devices": 2})))
    path = tmp_path / "run"
    with RunFolder(path, config_yaml=to_yaml(config), command=["test"], keep_checkpoints=1) as folder:
        measured = jobs.measure(jobs.prepare(config), folder)
    assert set(measured.fits) == {("rollout", 1), ("rollout", 2), ("reward", 1), ("actor", 1), ("actor", 2)}
    for stage in ("rollout", "actor"):
        instances = measured.problem.profiles.stages[stage].instances
        assert [instance.num_ranks for instance in instances] == [1, 2]
        assert all(instance.state_bytes > 0 for instance in instances)
    assert make_plan(measured.problem).prediction is not None
