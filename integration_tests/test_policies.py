"""Jobs that train several policies: the same numbers under every plan, after a lost actor and when they are resumed."""

import json

import pytest
import torch

from command_line import flags, last_checkpoint, numbers, rlinf, rows, tensors, train_and_kill, train_here, weights

TEAM = """
async def play(session, task):
    (hint,) = await session.chat(task.messages, agent="hinter")
    (guess,) = await session.chat([{"role": "user", "content": f"!{task.answer}="}], agent="guesser")
    session.reward(float(hint.text[:1] in "wxyz"), agent="hinter")
    session.reward(float(guess.text[:1] in "0123"), agent="guesser")
    return float(len(hint.text) == 2)
"""
KEYS = {
    "rollout.agent.run": "team:play",
    "model.architecture.hidden_size": 32,
    "model.architecture.intermediate_size": 64,
    "model.architecture.num_layers": 2,
    "sft_warm_up.max_steps": 10,
    "sft_warm_up.check_every": 10,
    "sft_warm_up.batch_size": 64,
    "sft_warm_up.reuse": "false",
    "task.num_held_out": 8,
    "rollout.num_prompts": 4,
    "rollout.agent.agents.guesser.policy": "second",
    "actor.micro_batch_groups": 2,
    "run.num_steps": 6,
    "run.evaluate_every": 3,
    "run.checkpoint_every": 3,
    "run.max_minutes": "null",
    "run.stop_at_score": "null",
    "cluster.num_devices": 2,
    "cluster.oversubscribe": "true",
    "mode": "collocated",
}
SECOND = "policies/second/model/"


@pytest.fixture(scope="module", autouse=True)
def _agent(tmp_path_factory):
    folder = tmp_path_factory.mktemp("agents")
    (folder / "team.py").write_text(TEAM)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder))
        patch.syspath_prepend(folder)
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of the job KEYS. Do not resume it."""
    return train_here("guess-team", tmp_path_factory.mktemp("policies") / "run", KEYS)


def without_times(path):
    """An episode's time outside the engine is measured."""
    steps, evaluations, weights_of = numbers(path)
    steps = [
        {
            key: value
            for key, value in row.items()
            if not key.endswith("outside_engine_s") and not key.startswith("router/")
        }
        for row in steps
    ]
    return steps, evaluations, weights_of


@pytest.mark.slow
def test_each_policy_learns_and_both_begin_alike(run):
    for name in ("actor/grad_norm", "policy/second/actor/grad_norm"):
        assert any(row[name] > 0 for row in rows(run)), name
    checkpoint = last_checkpoint(run)
    assert {path.name for path in (checkpoint / "policies" / "second").iterdir()} == {
        path.name for path in checkpoint.iterdir() if path.name not in ("policies", "state.json", "SHA256SUMS")
    }
    saved = weights(run)
    own = {name: data for name, data in saved.items() if name.startswith("model/")}
    assert all(saved[name.replace("model/", SECOND, 1)] != data for name, data in own.items() if "proj" in name)


@pytest.mark.parametrize("mode", ["disaggregated", "hybrid"])
def test_the_numbers_are_those_of_every_plan(run, tmp_path, mode):
    other = train_here("guess-team", tmp_path / "other", KEYS | {"mode": mode, "cluster.num_devices": 4})
    assert without_times(other) == without_times(run)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["actor/0", "actor-second/1"])
def test_a_lost_actor_takes_all_policies_back_to_a_checkpoint(run, tmp_path, victim):
    keys = KEYS | {"run.checkpoint_every": 2}
    done, _ = train_and_kill("guess-team", tmp_path / "killed", keys, victim, after_step=3)
    assert done.returncode == 0
    assert f"worker {victim} on " in done.stdout and "the run goes on with step " in done.stdout
    assert without_times(tmp_path / "killed") == without_times(run)


def test_a_resumed_run_goes_on_with_all_policies(run, tmp_path):
    train_here("guess-team", tmp_path / "run", KEYS | {"run.num_steps": 3})
    train_here(None, tmp_path / "run", {"run.num_steps": 6})
    assert without_times(tmp_path / "run") == without_times(run)


def test_engine_and_trainer_of_each_policy_are_compared():
    keys = {key: value for key, value in KEYS.items() if not key.startswith(("run.", "sft_warm_up."))}
    done = rlinf("check", "guess-team", *flags(keys | {"sft_warm_up": "null"}))
    assert done.returncode == 0, done.stderr
    assert "second, as loaded" in done.stdout and "second, after a step" in done.stdout
    assert "engine and trainer agree" in done.stdout


@pytest.mark.slow
def test_a_replay_ends_with_the_weights_of_all_policies(tmp_path):
    keys = KEYS | {
        "mode": "disaggregated",
        "algorithm.max_staleness": 1,
        "run.record": "true",
        "cluster.num_devices": 4,
    }
    run = train_here("guess-team", tmp_path / "run", keys)
    done = rlinf("replay", run, "--output", tmp_path / "again")
    assert "replayed 6 steps: samples, rewards and weights are the recorded ones" in done.stdout, done.stderr
    assert weights(tmp_path / "again") == weights(run)


def test_each_policy_is_exported_from_a_checkpoint(run, tmp_path):
    done = rlinf("export", run, "--policy", "second", "--output", tmp_path / "model")
    assert done.returncode == 0, done.stderr
    exported, own = tensors(tmp_path / "model"), tensors(last_checkpoint(run) / SECOND)
    assert exported.keys() == own.keys() and all(torch.equal(exported[name], own[name]) for name in own)
    assert "| policy | `second`" in (tmp_path / "model" / "README.md").read_text()
    done = rlinf("export", run, "--policy", "third", "--output", tmp_path / "third")
    assert done.returncode == 2 and "it has second" in done.stderr


@pytest.mark.slow
def test_an_evaluation_plays_with_all_policies_of_a_checkpoint(run, tmp_path):
    secrets = [json.dumps({"question": f"!{secret}=", "answer": str(secret)}) for secret in range(4)]
    (tmp_path / "secrets.jsonl").write_text("\n".join(secrets))
    line = ["eval", f"secrets={tmp_path / 'secrets.jsonl'}", "--benchmarks.secrets.reward", "exact"]
    line += ["--cluster.num_devices", "1", "--temperature", "1.0"]
    done = rlinf(*line, "--model", run, "--output", tmp_path / "eval")
    assert done.returncode == 0, done.stderr
    samples = [json.loads(row) for row in (tmp_path / "eval" / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 4 and all(not row["cause"] for row in samples)
    done = rlinf(*line, "--model", last_checkpoint(run) / SECOND, "--output", tmp_path / "alone")
    assert done.returncode == 2 and "one of several policies that the run trained together" in done.stderr


@pytest.mark.slow
def test_policies_with_models_of_their_own_train_adapters_of_them_and_resume(run, tmp_path):
    """With a KL to each model without its adapter."""
    pytest.importorskip("peft")
    first, second = (last_checkpoint(run) / folder for folder in ("model/", SECOND))
    removed = ("model.architecture", "sft_warm_up", "rollout.agent.agents")
    keys = {key: value for key, value in KEYS.items() if not key.startswith(removed)}
    keys |= {"model.path": first, "model.architecture": "null", "sft_warm_up": "null"}
    keys |= {"rollout.agent.agents.guesser.path": second, "actor.lora.rank": 2, "algorithm.kl_coef": 0.01}
    keys |= {"run.checkpoint_every": 1, "run.num_steps": 2}
    whole = train_here("guess-team", tmp_path / "whole", keys)
    adapters = [last_checkpoint(whole) / policy / "model" for policy in (".", "policies/guesser")]
    bases = [json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] for folder in adapters]
    assert bases == [str(first), str(second)]
    assert all(row[f"{prefix}actor/grad_norm"] > 0 for row in rows(whole) for prefix in ("", "policy/guesser/"))
    assert all("policy/guesser/actor/ref_kl" in row for row in rows(whole))
    train_here("guess-team", tmp_path / "run", keys | {"run.num_steps": 1})
    train_here(None, tmp_path / "run", {"run.num_steps": 2})
    assert weights(tmp_path / "run") == weights(whole)
