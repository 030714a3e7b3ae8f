"""Off-policy runs: the same numbers to the bit in every mode and over a resume, demonstrations included."""

import json

import pytest

from command_line import numbers, train, train_here
from rlinf.run_folder.checksums import file_digest

TINY_SAC = {
    "actor.num_shards": 2,
    "env.num_envs": 4,
    "env.num_groups": 2,
    "env.num_steps": 4,
    "env.max_episode_steps": 10,  # episodes go on from step to step
    "env.num_eval_episodes": 4,
    "policy.options": "{hidden_size: 16, num_layers: 2}",
    "algorithm.batch_size": 16,
    "algorithm.buffer_size": 40,  # it wraps
    "algorithm.num_random": 16,
    "run.num_steps": 4,
    "run.evaluate_every": 2,
    "run.checkpoint_every": 2,
}
TINY_RLPD = TINY_SAC | {
    "env.max_episode_steps": 40,
    "algorithm.update_ratio": 0.5,
    "algorithm.policy_delay": 4,
    "algorithm.num_critics": 3,
    "demonstrations.num_episodes": 2,
}
TINY_CLASSIFIER = {  # too little to learn from, so it takes some failures for successes
    "success_classifier.source": "experts",
    "success_classifier.num_episodes": 4,
    "success_classifier.num_failures": 4,
    "success_classifier.num_steps": 5,
    "success_classifier.threshold": 0.3,
}
LITTLE_PI0 = {
    "env.num_envs": 4,
    "env.num_groups": 2,
    "env.num_steps": 2,
    "env.num_eval_episodes": 2,
    "sft_warm_up.num_episodes": 2,
    "sft_warm_up.num_steps": 2,
    "run.num_steps": 1,
    "algorithm.num_minibatches": 1,
    "mode": "collocated",
}
TINY_NOISE = TINY_SAC | {
    "env.max_episode_steps": 6,
    "algorithm.num_critics": 3,
    "policy.options.hidden_size": 16,
}
del TINY_NOISE["policy.options"]
PLANS = {
    "disaggregated": {"mode": "disaggregated", "plan.granularity": "{env: 1, policy: 1}"},
    "collocated-one-rank": {"mode": "collocated", "cluster.num_devices": 1},
    "hybrid": {"mode": "hybrid"},
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    path = train_here("pendulum-sac", tmp_path_factory.mktemp("sac") / "run", TINY_SAC | {"mode": "collocated"})
    return numbers(path)


@pytest.mark.parametrize(
    "plan", ["disaggregated", *(pytest.param(p, marks=pytest.mark.slow) for p in PLANS if p[0] != "d")]
)
def test_every_mode_gives_the_same_numbers(tmp_path, reference, plan):
    assert numbers(train_here("pendulum-sac", tmp_path / "run", TINY_SAC | PLANS[plan])) == reference
    metrics, *_ = reference
    assert all(row["critic/grad_norm"] > 0 for row in metrics)


def test_a_resumed_run_continues_to_the_bit_in_another_mode(tmp_path, reference):
    path = train_here("pendulum-sac", tmp_path / "run", TINY_SAC | {"mode": "disaggregated", "run.num_steps": 2})
    train_here(None, path, {"run.num_steps": 4, "mode": "collocated"})
    assert numbers(path) == reference


@pytest.mark.slow
@pytest.mark.parametrize("classifier", [{}, TINY_CLASSIFIER])
def test_pictures_give_the_same_numbers_in_every_mode_and_over_a_resume(tmp_path, classifier):
    pytest.importorskip("metaworld")
    seen = "{reward_mode: sparse, action_repeat: 5, state: robot, cameras: corner, image_size: 36}"
    tiny = TINY_RLPD | {"env.options": seen} | classifier
    path = train("faucet-rlpd", tmp_path / "one", tiny | {"mode": "collocated"})
    apart = {"mode": "disaggregated", "env.num_processes": 1, "run.num_steps": 2}
    other = train("faucet-rlpd", tmp_path / "two", tiny | apart)
    train(None, other, {"run.num_steps": 4, "mode": "collocated"})
    assert numbers(other) == numbers(path)
    if classifier:
        digests = [file_digest(run / "success_classifier" / "classifier.safetensors") for run in (path, other)]
        assert digests[0] == digests[1]
        metrics, *_ = numbers(path)
        assert any(row.get("env/classifier_success") for row in metrics)


@pytest.mark.slow
def test_demonstrations_are_in_the_batches_in_every_mode_and_over_a_resume(tmp_path):
    pytest.importorskip("metaworld")
    path = train("faucet-rlpd", tmp_path / "one", TINY_RLPD | {"mode": "collocated"})
    (note,) = [n for n in json.loads((path / "manifest.json").read_text())["notes"] if n.startswith("demonstrations:")]
    assert note.startswith("demonstrations: 2 demonstrations of faucet-open-v3, ")
    other = train("faucet-rlpd", tmp_path / "two", TINY_RLPD | {"mode": "disaggregated", "run.num_steps": 2})
    train(None, other, {"run.num_steps": 4, "mode": "collocated"})
    assert numbers(other) == numbers(path)


@pytest.mark.slow
def test_the_noise_of_a_frozen_policy_is_learned_alike_in_every_mode_and_over_a_resume(tmp_path):
    pytest.importorskip("metaworld")
    warm = train("reach-pi0-ppo", tmp_path / "warm", LITTLE_PI0)
    frozen = warm / "checkpoints" / "step-000001" / "model"
    files = {path.name: path.read_bytes() for path in frozen.iterdir()}
    tiny = TINY_NOISE | {"policy.options.flow_folder": frozen}
    path = train("faucet-pi0-dsrl", tmp_path / "one", tiny | {"mode": "collocated"})
    other = train("faucet-pi0-dsrl", tmp_path / "two", tiny | {"mode": "disaggregated", "run.num_steps": 2})
    train(None, other, {"run.num_steps": 4, "mode": "collocated"})
    assert numbers(other) == numbers(path)
    assert {path.name: path.read_bytes() for path in frozen.iterdir()} == files
