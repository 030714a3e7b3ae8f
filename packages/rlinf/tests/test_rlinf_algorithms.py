"""Advantages and losses of one's own are called before a run starts; numbers that cannot act are said."""

from pathlib import Path

import pytest

from rlinf import jobs
from rlinf.config.load import load_config
from rlinf.config.overrides import parse_overrides
from rlinf.errors import UserError
from rlinf.jobs.algorithms import idle_notes, try_algorithm
from rlinf_algos import AlgosError, preset

EXAMPLES = Path(__file__).parents[3] / "docs" / "examples"
MODULE = """
import time

import torch

from rlinf_algos import check_inputs, measured_loss

def total(rewards): return rewards.sum()
def wide(rewards): return rewards[..., None]
def divided(rewards): return (rewards - rewards.mean()) / rewards.std()
def beyond(rewards): return rewards[99]
def interrupts(rewards): raise KeyboardInterrupt
def leaves(rewards): raise SystemExit(3)
def hangs(rewards):
    while True: time.sleep(0.01)
def listed(rewards): return rewards.tolist()
def lonely(rewards, values, loss_mask): return rewards
def crooked(rewards, values, loss_mask): return rewards, values[:, :1]
def fine(rewards, lengths): return rewards - rewards.mean(dim=1, keepdim=True) + 0 * lengths
def fine_on_steps(rewards, truncated): return rewards
def fine_on_tokens(rewards, values, loss_mask): return rewards - values, rewards

def number(policy_logprobs, proximal_logprobs, advantages, loss_mask):
    return -(policy_logprobs * advantages[:, None]).mean()

def broadcast(policy_logprobs, proximal_logprobs, advantages, loss_mask):
    ratio = (policy_logprobs - proximal_logprobs).exp()
    return ratio * advantages

def averaged(policy_logprobs, proximal_logprobs, advantages, loss_mask):
    inputs = check_inputs(policy_logprobs, proximal_logprobs, advantages, loss_mask)
    return measured_loss((inputs.advantages * inputs.log_ratio).mean(), inputs)

def constant(policy_logprobs, proximal_logprobs, advantages, loss_mask):
    inputs = check_inputs(policy_logprobs, proximal_logprobs, advantages, loss_mask)
    return measured_loss(inputs.advantages, inputs)

def logarithm(policy_logprobs, proximal_logprobs, advantages, loss_mask):
    inputs = check_inputs(policy_logprobs, proximal_logprobs, advantages, loss_mask)
    return measured_loss(inputs.log_ratio.log(), inputs)

def root(policy_logprobs, proximal_logprobs, advantages, loss_mask):
    inputs = check_inputs(policy_logprobs, proximal_logprobs, advantages, loss_mask)
    return measured_loss((inputs.log_ratio**2).sqrt(), inputs)
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Name of a module with the functions above, at a place of its own."""
    name = f"own_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


@pytest.mark.parametrize(
    ("advantage", "says"),
    [
        ("total", "returned the shape [] for rewards [1, 8]; they must be equal"),
        ("wide", "returned the shape [1, 8, 1] for rewards [1, 8]"),
        ("divided", "called once with equal rewards [1, 8]: the advantages[0, 0]=nan is not finite"),
        ("beyond", "IndexError: index 99 is out of bounds"),
        ("leaves", "SystemExit: 3"),
        ("listed", "returned a list; return a tensor of advantages, or a pair"),
        ("lonely", "TypeError: it reads values and gave no returns"),
        ("crooked", "its returns have the shape [8, 1] for rewards [8, 6]"),
    ],
)
def test_a_wrong_advantage_is_named_with_its_place(own, tmp_path, advantage, says):
    with pytest.raises(UserError) as caught:
        try_algorithm(preset("grpo", advantage=f"{own}:{advantage}"))
    message = str(caught.value)
    assert message.startswith(f"algorithm.advantage={own}:{advantage}, called once with")
    assert says in message
    line = next(i for i, text in enumerate(MODULE.splitlines(), 1) if text.startswith(f"def {advantage}("))
    assert f"{tmp_path / own}.py:{line} in {advantage}" in message
    assert len(message.splitlines()) <= 5


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        ("number", "returned a Tensor; return a PolicyLoss, as rlinf_algos.measured_loss"),
        ("broadcast", "RuntimeError: The size of tensor a (6) must match the size of tensor b (4)"),
        (
            "averaged",
            "returned loss_terms of the shape [] for tokens [4, 6]; return one term per token, not their mean",
        ),
        ("constant", "its loss_terms have no gradient; they must depend on policy_logprobs"),
        ("logarithm", "loss_terms[0, 0]=-inf is not finite"),
        ("root", "the gradient for policy_logprobs[0, 0]=nan is not finite"),
    ],
)
def test_a_wrong_loss_is_named_with_its_place(own, tmp_path, loss, says):
    with pytest.raises(UserError) as caught:
        try_algorithm(preset("grpo", policy_loss=f"{own}:{loss}"))
    assert says in str(caught.value)
    assert f"{tmp_path / own}.py:" in str(caught.value)
    assert "log-probabilities [4, 6] of the proximal policy itself and advantages [4]" in str(caught.value)


def test_one_that_hangs_is_named_with_its_place(own, monkeypatch):
    monkeypatch.setattr("rlinf.jobs.algorithms.TIME_LIMIT_S", 0.5)
    with pytest.raises(UserError, match=rf"algorithm.advantage={own}:hangs did not return within 0.5 s; it is at"):
        try_algorithm(preset("grpo", advantage=f"{own}:hangs"))


def test_an_interrupt_within_one_ends_the_command(own, capsys):
    with pytest.raises(KeyboardInterrupt):
        try_algorithm(preset("grpo", advantage=f"{own}:interrupts"))
    assert capsys.readouterr().err == "", "a thread would have printed its traceback"


def test_one_whose_module_raises_is_named_with_its_place(tmp_path, monkeypatch):
    (tmp_path / "raises_at_once.py").write_text("import torch\n\nnothing_there\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(AlgosError, match=r"NameError: name 'nothing_there' is not defined \(.*raises_at_once.py:3\)"):
        preset("grpo", advantage="raises_at_once:mine")


def test_right_ones_pass(own):
    try_algorithm(preset("grpo", advantage=f"{own}:fine"))
    try_algorithm(preset("grpo", advantage=f"{own}:fine_on_tokens"))
    try_algorithm(preset("grpo", samples="episodes", advantage=f"{own}:fine_on_steps"))


@pytest.mark.parametrize(
    "part", [{"policy_loss": "custom_loss:soft_clip"}, {"advantage": "custom_algorithm:against_median"}]
)
def test_the_examples_of_the_docs_pass(monkeypatch, part):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    try_algorithm(preset("grpo", **part))
    try_algorithm(preset("grpo", samples="episodes", **part))


def test_a_run_with_a_wrong_loss_leaves_nothing_behind(own, refused, tmp_path):
    message = refused("train", "sort-grpo", "--algorithm.policy_loss", f"{own}:number", "--output", "run")
    assert f"algorithm.policy_loss={own}:number" in message
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "changes", "keys"),
    [
        ("grpo", {}, None),
        ("grpo", {"clip_high": 0.3}, "algorithm.clip_high has"),
        ("grpo", {"clip_high": 0.3, "dual_clip": 3.0}, "algorithm.clip_high, algorithm.dual_clip have"),
        ("grpo", {"policy_loss": "sapo", "options": {"tau_negative": 1.2}}, "algorithm.options.tau_negative has"),
        ("grpo", {"clip_high": 0.3, "num_minibatches": 2}, None),
        ("grpo", {"clip_high": 0.3, "num_epochs": 2}, None),
        ("grpo", {"clip_high": 0.3, "proximal_policy": "rollout"}, None),
        ("rloo", {}, None),
    ],
)
def test_chosen_clip_ranges_that_cannot_act_are_said(name, changes, keys):
    notes = idle_notes(preset(name, **changes))
    assert notes == () if keys is None else notes[0].startswith(f"{keys} no effect: with one optimizer step a batch")


def test_a_model_without_experts_has_no_load_to_balance():
    config = load_config("sort-grpo", parse_overrides(["--algorithm.router_aux_coef", "0.1"]))
    with pytest.raises(UserError, match=r"algorithm.router_aux_coef=0.1: qwen2 is no mixture of experts"):
        jobs.prepare(config)


def test_a_model_without_experts_has_none_to_replay():
    line = ["--actor.router_replay", "true", "--actor.max_tokens_per_micro_batch", "64"]
    with pytest.raises(UserError, match=r"actor.router_replay=true: qwen2 is no mixture of experts"):
        jobs.prepare(load_config("sort-grpo", parse_overrides(line)))


@pytest.mark.parametrize("line", [["--algorithm.clip_high", "0.3"], []])
def test_a_run_begins_with_the_note(line):
    job = jobs.prepare(load_config("sort-grpo", parse_overrides(line)))
    assert any("algorithm.clip_high has no effect" in note for note in job.notes) is bool(line)
