"""One seed, the same numbers: to the bit, in every mode, at several granularities and numbers of ranks."""

import json

import pytest

from command_line import SHORT_PUSH, SHORT_SORT, rows, train, weights

SORT_PLANS = {
    "disaggregated-1": {"mode": "disaggregated", "plan.granularity": "{rollout: 1, reward: 1, actor: 1}"},
    "hybrid-4": {"mode": "hybrid", "plan.granularity": "{rollout: 4, reward: 2, actor: 3}"},
    "collocated-one-rank": {"mode": "collocated", "cluster.num_devices": 1, "plan.granularity": "{rollout: 5}"},
}
PUSH_PLANS = {
    "disaggregated-2": {"mode": "disaggregated", "plan.granularity": "{env: 2, policy: 1}"},
    "hybrid-4": {"mode": "hybrid", "plan.granularity": "{env: 2, policy: 4}"},
    "hybrid-ranks-share-a-device": {"mode": "hybrid", "plan.num_ranks": "{env: 2}"},
    "collocated-one-rank": {"mode": "collocated", "cluster.num_devices": 1, "plan.num_ranks": "{env: 1}"},
}


ALGORITHMS = {
    "ppo": {"algorithm.name": "ppo", "algorithm.num_epochs": 2},
    "dapo": {"algorithm.name": "dapo", "algorithm.oversampling": 1.5, "algorithm.overlong_buffer_tokens": 1},
}
"""One with a critic and whitening over the step, one whose ranks agree on the groups that train."""


def _with_seldom(plans):
    """Those in hybrid mode lie between the others, and are for `tools/test.sh --all`."""
    return [pytest.param(plan, marks=pytest.mark.slow) if "hybrid" in plan else plan for plan in plans]


def numbers(path):
    return {"metrics": rows(path), "evaluations": rows(path, "evaluations.jsonl"), "weights": weights(path)}


@pytest.fixture(scope="module")
def sort_reference(tmp_path_factory):
    """The collocated plan on two slots."""
    found = numbers(train("sort-grpo", tmp_path_factory.mktemp("sort") / "run", SHORT_SORT))
    assert any(row["actor/grad_norm"] > 0 for row in found["metrics"]), (
        "equal because nothing was learned proves nothing"
    )
    return found


@pytest.fixture(scope="module")
def push_reference(tmp_path_factory):
    """The recipe's own plan: too few steps to measure, so collocated."""
    return numbers(train("pushcube-ppo", tmp_path_factory.mktemp("push") / "run", SHORT_PUSH))


@pytest.mark.parametrize("plan", _with_seldom(SORT_PLANS))
def test_sorting(tmp_path, sort_reference, plan):
    found = numbers(train("sort-grpo", tmp_path / "run", SHORT_SORT | SORT_PLANS[plan]))
    assert found["metrics"] == sort_reference["metrics"]
    assert found["evaluations"] == sort_reference["evaluations"]
    assert found["weights"] == sort_reference["weights"]


@pytest.mark.parametrize("name", ["ppo", pytest.param("dapo", marks=pytest.mark.slow)])
def test_algorithms_that_gather_the_step(tmp_path, name):
    found = []
    for plan in (SORT_PLANS["disaggregated-1"], SORT_PLANS["collocated-one-rank"]):
        folder = tmp_path / str(len(found))
        found.append(numbers(train("sort-grpo", folder, SHORT_SORT | ALGORITHMS[name] | plan)))
    assert any(row["actor/grad_norm"] > 0 for row in found[0]["metrics"])
    for other in found[1:]:
        assert other["metrics"] == found[0]["metrics"]
        assert other["evaluations"] == found[0]["evaluations"]
        assert other["weights"] == found[0]["weights"]


@pytest.mark.maniskill
@pytest.mark.parametrize("plan", _with_seldom(PUSH_PLANS))
def test_push_cube(tmp_path, push_reference, plan):
    pytest.importorskip("mani_skill")
    found = numbers(train("pushcube-ppo", tmp_path / "run", SHORT_PUSH | PUSH_PLANS[plan]))
    assert found["metrics"] == push_reference["metrics"]
    assert found["evaluations"] == push_reference["evaluations"]
    assert found["weights"] == push_reference["weights"]


def test_a_warm_start_that_an_earlier_run_made_is_the_same(tmp_path, sort_reference, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, expected in (("first", "warm start: kept for the next run"), ("second", "warm start: taken from")):
        run = train("sort-grpo", tmp_path / name, SHORT_SORT | {"warm_start.reuse": "true"})
        assert any(note.startswith(expected) for note in json.loads((run / "manifest.json").read_text())["notes"])
        assert numbers(run) == sort_reference


def test_another_seed_gives_other_numbers(tmp_path, sort_reference):
    found = numbers(train("sort-grpo", tmp_path / "run", SHORT_SORT | {"seed": 1}))
    assert found["weights"] != sort_reference["weights"]
