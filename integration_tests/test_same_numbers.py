"""One seed, the same numbers: to the bit, in every mode, at several granularities and numbers of ranks."""

import json
import secrets
import sys
from pathlib import Path
from typing import Any

import pytest

import command_line
from command_line import SHORT_PUSH, SHORT_SORT, rows, train, train_here, weights
from rlinf.glossary import find
from rlinf_comm.wire import SECRET_VARIABLE
from rlinf_workers.testing.venvs import second_venv

SORT_PLANS = {
    "disaggregated-1": {"mode": "disaggregated", "plan.granularity": "{rollout: 1, reward: 1, actor: 1}"},
    "hybrid-4": {"mode": "hybrid", "plan.granularity": "{rollout: 4, reward: 2, actor: 3}"},
    "collocated-one-rank": {"mode": "collocated", "cluster.num_devices": 1, "plan.granularity": "{rollout: 5}"},
}
PUSH_PLANS = {
    "disaggregated-2": {"mode": "disaggregated", "plan.granularity": "{env: 2, policy: 1}"},
    "hybrid-in-part": {
        "mode": "hybrid",
        "plan.devices": "{env: [0], policy: [0, 1]}",
        "plan.granularity": "{env: 4, policy: 1}",
    },
    "hybrid-ranks-share-a-device": {"mode": "hybrid", "plan.num_ranks": "{env: 2}"},
    "collocated-one-rank": {"mode": "collocated", "cluster.num_devices": 1, "plan.num_ranks": "{env: 1}"},
}
PICTURES = {
    "env.kind": "metaworld",
    "env.id": "reach-v3",
    "env.options": "{cameras: [corner2], image_size: 64, state: robot}",
    "env.num_steps": 8,
    "env.max_episode_steps": 6,
    "policy": "{name: cnn, options: {hidden_size: 32, reads_state: true}}",
}
PICTURE_PLANS = {
    "collocated-2": {"mode": "collocated", "cluster.num_devices": 2},
    "hybrid-1-env-rank": {"mode": "hybrid", "cluster.num_devices": 2, "plan.num_ranks": "{env: 1}"},
    "hybrid-2-env-ranks": {"mode": "hybrid", "cluster.num_devices": 2, "plan.num_ranks": "{env: 2}"},
    "disaggregated": {"mode": "disaggregated", "plan.granularity": "{env: 1, policy: 1}"},
    "own-processes": {"mode": "hybrid", "cluster.num_devices": 2, "env.num_processes": 1},
}


ALGORITHMS = {
    "ppo": {"algorithm.name": "ppo", "algorithm.num_epochs": 2},
    "dapo": {"algorithm.name": "dapo", "algorithm.oversampling": 1.5, "algorithm.overlong_buffer_tokens": 1},
    "many": {
        "algorithm.policy_loss": "clip_cov",
        "algorithm.num_minibatches": 2,
        "algorithm.kl_coef": 0.1,
        "algorithm.kl_in": "reward",
        "algorithm.kl": "k1",
        "algorithm.kl_target": 0.5,
        "algorithm.top_entropy_fraction": 0.5,
        "algorithm.off_policy_threshold": 0.01,
        "algorithm.overlong_filter": True,
    },
}
"""One with a critic and whitening over the step, one whose ranks agree on the groups that train, one whose
micro-batches choose tokens and whose ranks agree on the weight of the KL."""


def _with_seldom(plans):
    """The plans, of which `tools/test.sh` takes those that are farthest from the reference, and `--all` takes all."""
    return [plan if plan.startswith("disaggregated") else pytest.param(plan, marks=pytest.mark.slow) for plan in plans]


def numbers(path) -> dict[str, Any]:
    """What a run wrote, all of it in the glossary of metrics."""
    files = {"metrics": rows(path), "evaluations": rows(path, "evaluations.jsonl")}
    for file, written in files.items():
        names = {name for row in written for name in row} - {"step"}
        assert [name for name in names if find(name, evaluation=file == "evaluations") is None] == []
    return files | {"weights": weights(path)}


@pytest.fixture(scope="module")
def sort_reference(sort_run):
    """The collocated plan on two slots."""
    reference = numbers(sort_run)
    assert any(row["actor/grad_norm"] > 0 for row in reference["metrics"]), (
        "equal because nothing was learned proves nothing"
    )
    return reference


@pytest.fixture(scope="module")
def push_reference(tmp_path_factory):
    """The recipe's own plan: too few steps to measure, so collocated."""
    return numbers(train_here("pushcube-ppo", tmp_path_factory.mktemp("push") / "run", SHORT_PUSH))


@pytest.mark.parametrize("plan", _with_seldom(SORT_PLANS))
def test_sorting(tmp_path, sort_reference, plan):
    keys = SORT_PLANS[plan]
    if "cluster.num_devices" in keys:  # the first and the last role of the flow in an environment of their own, too
        python = second_venv(tmp_path / "environment")
        keys = keys | {"venvs.rollout": python, "venvs.actor": python}
    run = train("sort-grpo", tmp_path / "run", SHORT_SORT | keys)
    actual = numbers(run)
    (session,) = json.loads((run / "manifest.json").read_text())["sessions"]
    ran = {name: of_role["interpreter"] for name, of_role in session.get("venvs", {}).items()}
    assert ran == {name.partition(".")[2]: path for name, path in keys.items() if name.startswith("venvs")}
    assert actual["metrics"] == sort_reference["metrics"]
    assert actual["evaluations"] == sort_reference["evaluations"]
    assert actual["weights"] == sort_reference["weights"]


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["disaggregated-1", "hybrid-4"])
def test_sorting_on_two_nodes(tmp_path, sort_reference, plan, monkeypatch):
    """Items go through doors and weights by streams, as between two hosts."""
    monkeypatch.setattr(command_line, "RLINF", [sys.executable, str(Path(__file__).with_name("two_nodes.py"))])
    monkeypatch.setenv(SECRET_VARIABLE, secrets.token_hex(32))
    actual = numbers(train("sort-grpo", tmp_path / "run", SHORT_SORT | SORT_PLANS[plan]))
    assert actual["metrics"] == sort_reference["metrics"]
    assert actual["evaluations"] == sort_reference["evaluations"]
    assert actual["weights"] == sort_reference["weights"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ALGORITHMS)
def test_algorithms_that_gather_the_step(tmp_path, name):
    run_numbers = []
    for plan in (SORT_PLANS["disaggregated-1"], SORT_PLANS["collocated-one-rank"]):
        folder = tmp_path / str(len(run_numbers))
        run_numbers.append(numbers(train("sort-grpo", folder, SHORT_SORT | ALGORITHMS[name] | plan)))
    assert any(row["actor/grad_norm"] > 0 for row in run_numbers[0]["metrics"])
    for other in run_numbers[1:]:
        assert other["metrics"] == run_numbers[0]["metrics"]
        assert other["evaluations"] == run_numbers[0]["evaluations"]
        assert other["weights"] == run_numbers[0]["weights"]


@pytest.mark.maniskill
@pytest.mark.parametrize("plan", _with_seldom(PUSH_PLANS))
def test_push_cube(tmp_path, push_reference, plan):
    pytest.importorskip("mani_skill")
    actual = numbers(train("pushcube-ppo", tmp_path / "run", SHORT_PUSH | PUSH_PLANS[plan]))
    assert actual["metrics"] == push_reference["metrics"]
    assert actual["evaluations"] == push_reference["evaluations"]
    assert actual["weights"] == push_reference["weights"]


@pytest.mark.slow
def test_pictures(tmp_path):
    """Meta-World's arm by a small convolutional policy: every mode, 1 and 2 env ranks, simulators of their own."""
    pytest.importorskip("metaworld")
    keys = SHORT_PUSH | PICTURES
    alone = train("pushcube-ppo", tmp_path / "alone", keys | {"mode": "collocated", "cluster.num_devices": 1})
    reference = numbers(alone)
    assert any(row["actor/grad_norm"] > 0 for row in reference["metrics"])
    for name, plan in PICTURE_PLANS.items():
        assert numbers(train("pushcube-ppo", tmp_path / name, keys | plan)) == reference, name


@pytest.mark.slow
def test_episodes_longer_than_a_step_go_on_in_every_plan_and_over_a_resume(tmp_path):
    """Restored by replaying their actions, in a process of the simulators' own too."""
    pendulum = {"env.kind": "gymnasium", "env.id": "Pendulum-v1", "env.options": "{}", "env.max_episode_steps": 25}
    keys = SHORT_PUSH | pendulum | {"run.checkpoint_every": 2}
    expected = numbers(train("pushcube-ppo", tmp_path / "one", keys | {"run.num_steps": 4, "mode": "collocated"}))
    moved = {"mode": "disaggregated", "env.num_processes": 1}
    path = train("pushcube-ppo", tmp_path / "two", keys | moved | {"run.num_steps": 2})
    train(None, path, {"run.num_steps": 4, "mode": "collocated"})
    assert numbers(path) == expected


@pytest.mark.slow
def test_a_sft_warm_up_that_an_earlier_run_made_is_the_same(tmp_path, sort_reference, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, expected in (("first", "SFT warm-up: kept for the next run"), ("second", "SFT warm-up: taken from")):
        run = train("sort-grpo", tmp_path / name, SHORT_SORT | {"sft_warm_up.reuse": "true"})
        assert any(note.startswith(expected) for note in json.loads((run / "manifest.json").read_text())["notes"])
        assert numbers(run) == sort_reference


@pytest.mark.slow
def test_another_seed_gives_other_numbers(tmp_path, sort_reference):
    actual = numbers(train("sort-grpo", tmp_path / "run", SHORT_SORT | {"seed": 1}))
    assert actual["weights"] != sort_reference["weights"]


@pytest.mark.slow
def test_environments_on_the_host(tmp_path):
    """Environments on the host give the same numbers.

    Where a run has GPUs, its simulators have no device and as many ranks as the cores allow; here they run beside CPU
    slots.
    """
    from rlinf import jobs
    from rlinf.config.load import load_config, to_yaml
    from rlinf.config.overrides import parse_overrides
    from rlinf.run_folder import RunFolder

    pendulum = {"env.kind": "gymnasium", "env.id": "Pendulum-v1", "env.options": "{}"}
    keys = SHORT_PUSH | pendulum | {"mode": "collocated", "cluster.num_devices": 2}
    config = load_config("pushcube-ppo", parse_overrides([f"--{key}={value}" for key, value in keys.items()]))
    run_numbers = []
    for on_host in (False, True):
        job = jobs.prepare(config)
        job._simulates_on_host = on_host  # pyright: ignore[reportAttributeAccessIssue]
        path = tmp_path / str(on_host)
        with RunFolder(path, config_yaml=to_yaml(config), command=["test"], keep_checkpoints=1) as folder:
            jobs.run(job, folder)
        run_numbers.append(numbers(path))
    assert '"devices": []' in (tmp_path / "True" / "plan.json").read_text()
    assert run_numbers[0] == run_numbers[1]
