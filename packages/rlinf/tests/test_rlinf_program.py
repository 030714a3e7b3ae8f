"""The programs are the runs: the same metrics and weights as `rlinf train --mode collocated`, to the bit."""

import json

import pytest
import torch
from safetensors.torch import load_file

from rlinf.cli.main import main
from rlinf.config.load import load_config
from rlinf.config.overrides import parse_overrides
from rlinf.program import embodied, reasoning

NUM_STEPS = 3
SORT = f"""
job: reasoning
name: tiny-sort
run: {{num_steps: {NUM_STEPS}, evaluate_every: {NUM_STEPS}, checkpoint_every: {NUM_STEPS}, trace: false}}
task: {{kind: sort, num_digits: 2, num_held_out: 16}}
model:
  architecture: {{family: qwen2, hidden_size: 32, intermediate_size: 64, num_layers: 2, num_heads: 2, num_kv_heads: 1,
    max_positions: 32}}
sft_warm_up: {{max_steps: 10, check_every: 5, batch_size: 32, target_accuracy: 0.99, learning_rate: 0.01, reuse: false}}
algorithm: {{name: grpo, group_size: 4}}
rollout: {{num_prompts: 16, max_new_tokens: 3, max_prompt_tokens: 8}}
reward: {{kind: exact}}
actor: {{learning_rate: 3.0e-3, micro_batch_groups: 4, num_shards: 2}}
"""
POLE = f"""
job: embodied
name: tiny-pole
run: {{num_steps: {NUM_STEPS}, evaluate_every: {NUM_STEPS}, checkpoint_every: {NUM_STEPS}, trace: false}}
env: {{kind: gymnasium, id: CartPole-v1, num_envs: 8, num_groups: 4, num_steps: 16, max_episode_steps: 16,
  num_eval_episodes: 4, eval_seed: 50000}}
policy: {{name: actor_critic, hidden_sizes: [16]}}
algorithm: {{name: ppo, num_minibatches: 2, num_epochs: 2}}
actor: {{learning_rate: 1.0e-3, num_shards: 2}}
"""
TEAM = [
    "--task={kind: team, num_held_out: 8}",
    "--rollout.max_prompt_tokens=4",
    "--rollout.engine_options={refill: true}",
    "--rollout.agent={run: 'rlinf.tasks.games:play_team', max_turns: 2, max_context_tokens: 8}",
    "--rollout.agent.agents={hinter: {}, guesser: {policy: second}}",
    "--reward={kind: episode}",
]
CASES = {
    "grpo": (reasoning.train, SORT, []),
    "a KL to a reference": (reasoning.train, SORT, ["--algorithm.kl_coef=0.1", "--algorithm.num_minibatches=2"]),
    "ppo, packed": (reasoning.train, SORT, ["--algorithm.name=ppo", "--actor.max_tokens_per_micro_batch=64"]),
    "two policies": (reasoning.train, SORT, TEAM),
    "two policies with critics and a KL": (reasoning.train, SORT, [*TEAM, "--algorithm={name: ppo, kl_coef: 0.1}"]),
    "actor_critic": (embodied.train, POLE, []),
}
SLOW = ("two policies", "two policies with critics and a KL", "a KL to a reference")
"""Others have what these have."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", [pytest.param(one, marks=pytest.mark.slow if one in SLOW else []) for one in CASES])
def test_the_program_is_the_collocated_run_to_the_bit(case, tmp_path):
    train, recipe, overrides = CASES[case]
    path, run = tmp_path / "tiny.yaml", tmp_path / "run"
    path.write_text(recipe)
    overrides = ["--mode=collocated", *overrides]
    assert main(["train", str(path), "--output", str(run), *overrides]) == 0
    rows = [json.loads(line)["metrics"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    expected = [without_times(row) for row in rows]

    threads = torch.get_num_threads()
    trained = train(load_config(str(path), parse_overrides(overrides)), tmp_path / "program")
    metrics = [without_times(row) for row in trained]
    torch.set_num_threads(threads)

    assert len(expected) == NUM_STEPS
    assert metrics == expected
    assert any(row["actor/grad_norm"] > 0 for row in expected), "nothing was learned"
    weights = weights_in(tmp_path / "program")
    for name, tensor in weights_in(run / "checkpoints" / f"step-{NUM_STEPS:06}").items():
        assert torch.equal(weights.pop(name), tensor), name
    assert not weights
    assert len({name for name in metrics[-1] if name.endswith("actor/grad_norm")}) == 1 + (TEAM[0] in overrides)


def without_times(metrics):
    depend = ("time/", "perf/", "router/")
    return {name: value for name, value in metrics.items() if not name.startswith(depend) and "_engine_s" not in name}


def weights_in(folder):
    """Of all policies."""
    models = ["model", *(str(path.relative_to(folder)) for path in folder.glob("policies/*/model"))]
    return {
        f"{model}/{name}": tensor
        for model in models
        for file in (folder / model).glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }
