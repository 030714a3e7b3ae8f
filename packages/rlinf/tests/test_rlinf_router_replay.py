"""`actor.router_replay`, from the recipe to the weights."""

import json

import pytest
import torch
from safetensors.torch import load_file

from rlinf.cli.main import main
from rlinf.config.load import load_config
from rlinf.config.overrides import parse_overrides
from rlinf.program import reasoning
from rlinf_workers.testing.architectures import tiny_architecture

NUM_STEPS = 2


@pytest.fixture
def recipe(tmp_path):
    tiny_architecture("qwen3_moe", tmp_path / "model", num_experts=8)
    path = tmp_path / "experts.yaml"
    path.write_text(f"""
job: reasoning
name: experts
run: {{num_steps: {NUM_STEPS}, evaluate_every: {NUM_STEPS}, checkpoint_every: {NUM_STEPS}, trace: false}}
task: {{kind: sort, num_digits: 2, num_held_out: 8}}
model: {{path: {tmp_path / "model"}}}
algorithm: {{name: grpo, group_size: 4}}
rollout: {{num_prompts: 8, max_new_tokens: 8, max_prompt_tokens: 8}}
reward: {{kind: random}}
actor: {{learning_rate: 3.0e-3, num_shards: 2, max_tokens_per_micro_batch: 64, router_replay: true}}
""")
    return path


def test_the_actor_uses_what_the_engine_recorded(recipe, tmp_path):
    threads = torch.get_num_threads()
    steps = list(reasoning.train(load_config(str(recipe), parse_overrides([])), tmp_path / "program"))
    torch.set_num_threads(threads)
    assert [step["actor/router_agreement"] for step in steps] == [1.0] * NUM_STEPS
    assert max(step["rollout/logprob_gap_max"] for step in steps) < 1e-5
    assert all(step["actor/grad_norm"] > 0 for step in steps)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_numbers_do_not_depend_on_the_plan(recipe, tmp_path):
    runs = []
    for name, *overrides in (
        ("one", "--mode=collocated"),
        ("two", "--mode=collocated", "--cluster.num_devices=2"),
        ("apart", "--mode=disaggregated", "--cluster.num_devices=2"),
    ):
        assert main(["train", str(recipe), "--output", str(tmp_path / name), *overrides]) == 0
        rows = [json.loads(line)["metrics"] for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        model = tmp_path / name / "checkpoints" / f"step-{NUM_STEPS:06}" / "model"
        weights = {key: value for file in model.glob("*.safetensors") for key, value in load_file(file).items()}
        runs.append(([(row["actor/router_agreement"], row["actor/grad_norm"]) for row in rows], weights))
    (metrics, weights), *others = runs
    for other_metrics, other_weights in others:
        assert other_metrics == metrics
        assert other_weights.keys() == weights.keys()
        assert all(torch.equal(other_weights[name], weights[name]) for name in weights)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ranks_of_megatron_that_divide_the_experts_use_the_same(recipe, tmp_path):
    pytest.importorskip("megatron.core")  # tools/environment.sh installs it
    options = "{expert_parallel: 2, context_parallel: 2}"
    rows = []
    for name, *overrides in (("replicated",), ("megatron", f"--actor.backend_options={options}")):
        line = [f"--actor.backend={name}", "--mode=collocated", "--cluster.num_devices=2", *overrides]
        assert main(["train", str(recipe), "--output", str(tmp_path / name), *line]) == 0
        rows.append(
            [json.loads(row)["metrics"] for row in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        )
    for row, expected in zip(*rows, strict=True):
        for key in ("actor/router_agreement", "actor/grad_norm", "reward/mean"):
            assert row[key] == pytest.approx(expected[key], rel=1e-5), key
        assert row["rollout/logprob_gap_max"] < 1e-5
