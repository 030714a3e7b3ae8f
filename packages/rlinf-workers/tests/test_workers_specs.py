"""What the specs of engines and training backends say, beside what was measured."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from rlinf_sched.derive import JobShape, Lengths, ModelShape, find_gpu, find_model, forward_s
from rlinf_sched.derive.steps import LAYER_CALL_S
from rlinf_workers.plugins import ENGINES, TRAINERS

QWEN_HALF_B = {
    "model_type": "qwen2",
    "vocab_size": 151_936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True, kw_only=True)
class MeasuredStage:
    """A stage of a step on an H100 (benchmarks/results/gpu-steps.json): 8 answers of as many tokens to each prompt,
    which has 128."""

    model: ModelShape
    num_groups: int
    tokens: int
    role: str
    seconds: float
    options: dict[str, Any] = field(default_factory=dict)


BFLOAT16: dict[str, Any] = {
    "served_bytes": 2,
    "trainer_options": {"compute_dtype": "bfloat16", "recompute": True},
}
SMALL: dict[str, Any] = {"model": ModelShape.from_config(QWEN_HALF_B), "num_groups": 64, "tokens": 256}
MIDDLE: dict[str, Any] = {"model": find_model("Qwen2.5-1.5B"), "num_groups": 32, "tokens": 256}
SHORT: dict[str, Any] = {**SMALL, "num_groups": 32, "tokens": 128}


@pytest.mark.parametrize(
    "measured",
    [
        MeasuredStage(**SMALL, role="rollout", seconds=1.27, options=BFLOAT16),
        MeasuredStage(**SMALL, role="reference", seconds=2.80, options=BFLOAT16),
        MeasuredStage(**SMALL, role="actor", seconds=3.50, options={**BFLOAT16, "micro_batch_groups": 8}),
        MeasuredStage(**MIDDLE, role="rollout", seconds=1.42, options=BFLOAT16),
        MeasuredStage(**MIDDLE, role="actor", seconds=4.10, options={**BFLOAT16, "micro_batch_groups": 4}),
        MeasuredStage(**SHORT, role="rollout", seconds=1.55),
        MeasuredStage(**SHORT, role="actor", seconds=3.51, options={"micro_batch_groups": 4}),
    ],
    ids=lambda measured: f"{measured.role}, {measured.num_groups}, {measured.model.hidden_size}",
)
def test_stages_of_recipes_take_about_what_they_took(measured: MeasuredStage) -> None:
    lengths = Lengths(
        mean_tokens=measured.tokens, limit_tokens=measured.tokens, prompt_tokens=128, group_size=8, sigma=0
    )
    job = JobShape(lengths=lengths, num_groups=measured.num_groups, **measured.options)
    trainer, gpu = TRAINERS.spec("fsdp2" if job.trainer_options else "replicated"), find_gpu("H100")
    profile_of = {
        "rollout": ENGINES.spec("huggingface").profile,
        "reference": trainer.forward_profile,
        "actor": trainer.train_profile,
    }
    instance = profile_of[measured.role](measured.model, gpu, job).instances[0]
    assert instance.seconds(measured.num_groups) + instance.step_s == pytest.approx(measured.seconds, rel=0.25)


@pytest.mark.parametrize(
    ("changes", "of_reference", "of_actor"),
    [
        ({}, 5, 5),
        ({"on_gpu": False}, 64, 5),
        ({"max_tokens_per_micro_batch": None}, 2 * 64, 2 * 64),  # prompts, and completions
        ({"max_tokens_per_micro_batch": None, "micro_batch_groups": 8}, 2 * 64, 2 * 8),
        ({"num_shards": 4, "num_updates": 2}, 5, 4 * 2 * 1),
    ],
    ids=["packed", "on CPU slots", "padded", "padded, eight groups", "shards and updates"],
)
def test_passes_are_launched_as_often_as_workers_compute_them(
    changes: dict[str, Any], of_reference: int, of_actor: int
) -> None:
    """64 groups of 2,176 tokens with a budget of 32,768; a backward pass launches twice what its forward pass does."""
    spec, gpu, model = TRAINERS.spec("fsdp2"), find_gpu("H100"), SMALL["model"]
    lengths = Lengths(mean_tokens=256, limit_tokens=256, prompt_tokens=128, group_size=8, sigma=0)
    options: dict[str, Any] = {"trainer_options": {"compute_dtype": "bfloat16"}, "max_tokens_per_micro_batch": 32768}
    job = JobShape(lengths=lengths, num_groups=64, **options | changes)
    pass_s = 64 * forward_s(model, gpu, spec.computed(job))
    reference = spec.forward_profile(model, gpu, job).instances[0]
    assert reference.seconds(64) - pass_s == pytest.approx(of_reference * 24 * LAYER_CALL_S)
    actor = spec.train_profile(model, gpu, job).instances[0]
    assert actor.seconds(64) - 3 * pass_s == pytest.approx(3 * of_actor * 24 * LAYER_CALL_S)


@pytest.mark.parametrize(
    ("option", "value", "text"),
    [
        ("compile", "perhaps", "='perhaps': allowed: true, false, 'auto'"),
        ("compute_dtype", "float16", "='float16': allowed: 'float32', 'bfloat16'"),
    ],
)
def test_a_wrong_value_of_an_option_is_answered_with_those_that_recipes_may_have(option: str, value: str, text: str):
    assert list(TRAINERS.spec("fsdp2").problems({option: value})) == [(option, text)]
