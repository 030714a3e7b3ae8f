"""The verdict on engine and trainer: rounding passes in every pair of types, and no lie does that is larger.

An engine samples from a model folder; the trainer's forward judges its tokens with a folder of its own.
"""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlinf.jobs.agreement import ROUTING, SUSPECTS, Arithmetic, arithmetic_of, judge, judge_step
from rlinf_workers.engines import HuggingFaceEngine, SamplingSettings
from rlinf_workers.models.sequences import fit_width, pack_groups
from rlinf_workers.models.trainable import TokenModel
from rlinf_workers.roles import LogprobMismatch, mismatch_sums
from rlinf_workers.roles.records.language import SampleGroup
from rlinf_workers.testing.architectures import tiny_architecture
from rlinf_workers.testing.engines import prompts_of, sample

CPU = torch.device("cpu")
LAYERS = 4
FAMILIES = ("qwen2", "qwen3", "qwen3_moe")
PAIRS = [("float32", "float32"), ("bfloat16", "bfloat16"), ("float32", "bfloat16")]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Family -> settings of a model of four layers whose every tensor is random, with weights that matter."""
    torch.set_num_threads(1)
    models = {}

    def of(family):
        if family not in models:
            settings = tiny_architecture(family, tmp_path_factory.mktemp(family), num_hidden_layers=LAYERS)
            is_moe = family == "qwen3_moe"
            models[family] = (
                changed(settings, tmp_path_factory.mktemp("louder"), louder_experts) if is_moe else settings
            )
        return models[family]

    return of


def louder_experts(network):
    """Else it hardly matters which one a token goes to."""
    for layer in network.model.layers:
        layer.mlp.experts.down_proj *= 24.0


def changed(settings, folder, change):
    """The model with some of its weights changed, in another folder."""
    network = AutoModelForCausalLM.from_pretrained(settings.folder)
    with torch.no_grad():
        change(network)
    network.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).write_bytes((type(folder)(settings.folder) / file).read_bytes())
    return replace(settings, folder=str(folder))


def mismatch_between(served, trained, *, sampled_at=1.0, trained_at=1.0, cuts_prompts=False):
    """What a training step would measure."""
    prompts = prompts_of([4, 7, 8, 3, 5, 6, 8, 8])
    engine = HuggingFaceEngine(served, CPU, max_prompt_tokens=8, max_batch_sequences=64)
    engine.weights_received(0)
    seen = [replace(one, token_ids=one.token_ids[1:]) for one in prompts] if cuts_prompts else prompts
    sampling = SamplingSettings(group_size=8, max_new_tokens=24, temperature=sampled_at)
    by_index = {one.index: one for one in sample(engine, seen, sampling)}
    groups = [
        SampleGroup(
            prompt=prompt,
            completion_ids=by_index[prompt.index].token_ids,
            loss_mask=by_index[prompt.index].loss_mask,
            rollout_logprobs=by_index[prompt.index].logprobs,
            policy_version=0,
        )
        for prompt in prompts
    ]
    trainer, batch = TokenModel(trained, trained_at), pack_groups(groups)
    with torch.no_grad():
        logprobs = trainer.answers(trainer.build(CPU), batch, entropies=False).logprobs
    rollout = torch.cat([fit_width(group.rollout_logprobs, logprobs.shape[1]) for group in groups])
    gap = LogprobMismatch.of([mismatch_sums((logprobs - rollout).double(), batch.loss_mask)])
    assert gap is not None and gap.num_tokens > 400
    return gap


def arithmetic(family, trained="float32", served="float32", temperature=1.0):
    config = {"num_hidden_layers": LAYERS, "hidden_size": 32, "intermediate_size": 48}
    config |= {"num_experts": 4} if family == "qwen3_moe" else {}
    return arithmetic_of(config, trained_dtype=trained, served_dtype=served, temperature=temperature)


def test_sizes_of_a_model_that_reads_pictures_are_those_of_its_decoder():
    sizes = {"num_hidden_layers": LAYERS, "hidden_size": 32, "intermediate_size": 48, "num_experts": 4}
    nested = {"model_type": "qwen3_vl_moe", "text_config": sizes, "vision_config": {}}
    how = arithmetic_of(nested, trained_dtype="float32", served_dtype="float32", temperature=1.0)
    assert how == arithmetic("qwen3_moe")


def verdict(gap, how):
    return judge(how, kl=gap.kl, p999=gap.quantile(0.999), largest=gap.quantile(1.0))


@pytest.mark.parametrize(("trained", "served"), PAIRS)
@pytest.mark.parametrize("family", FAMILIES)
def test_rounding_agrees(model, family, trained, served):
    gap = mismatch_between(replace(model(family), dtype=served), replace(model(family), dtype=trained))
    how = arithmetic(family, trained, served)
    agreement = verdict(gap, how)
    assert agreement.agrees, agreement.text
    assert agreement.suspects == ()
    if family != "qwen3_moe":
        assert (2 * gap.kl) ** 0.5 < how.rms_bound / 2, "the bound is not at its limit here"


@pytest.mark.parametrize(("family", "temperature"), [("qwen2", 0.99), ("qwen3_moe", 1.02)])
def test_another_temperature_does_not(model, family, temperature):
    agreement = verdict(mismatch_between(model(family), model(family), sampled_at=temperature), arithmetic(family))
    assert not agreement.agrees, agreement.text


def test_a_temperature_that_both_know_agrees(model):
    gap = mismatch_between(model("qwen2"), model("qwen2"), sampled_at=0.5, trained_at=0.5)
    assert verdict(gap, arithmetic("qwen2", temperature=0.5)).agrees


def test_in_bfloat16_a_temperature_has_to_be_further_off(model):
    both = replace(model("qwen2"), dtype="bfloat16")
    how = arithmetic("qwen2", "bfloat16", "bfloat16")
    assert not verdict(mismatch_between(both, both, sampled_at=0.8), how).agrees


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_an_old_version_does_not(model, family, tmp_path):
    """One small optimizer step behind: every weight is 1e-5 off."""

    def step(network):
        generator = torch.Generator().manual_seed(6)
        for parameter in network.parameters():
            parameter += 1e-5 * torch.randn(parameter.shape, generator=generator).sign()

    old = changed(model(family), tmp_path, step)
    assert not verdict(mismatch_between(old, model(family)), arithmetic(family)).agrees


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_a_coarser_type_than_the_config_says_does_not(model, family):
    gap = mismatch_between(replace(model(family), dtype="bfloat16"), model(family))
    assert not verdict(gap, arithmetic(family)).agrees


def test_other_prompt_tokens_do_not(model):
    assert not verdict(mismatch_between(model("qwen2"), model("qwen2"), cuts_prompts=True), arithmetic("qwen2")).agrees


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_shuffled_experts_do_not(model, tmp_path, dtype):
    def shuffle(network):
        for layer in network.model.layers:
            for tensor in (layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj):
                tensor.copy_(tensor[[1, 0, 3, 2]].clone())

    family = "qwen3_moe"
    served = replace(changed(model(family), tmp_path, shuffle), dtype=dtype)
    gap = mismatch_between(served, replace(model(family), dtype=dtype))
    agreement = verdict(gap, arithmetic(family, dtype, dtype))
    assert not agreement.agrees, agreement.text
    assert agreement.suspects == (*SUSPECTS, ROUTING)


def test_a_token_that_went_to_another_expert_is_no_mismatch_in_float32():
    """The gap of the others is that of rounding."""
    how = arithmetic("qwen3_moe")
    assert judge(how, kl=1e-5, p999=how.rms_bound, largest=0.3).agrees
    assert not judge(how, kl=1e-5, p999=0.01, largest=0.3).agrees
    assert not judge(replace(how, has_experts=False), kl=1e-5, p999=how.rms_bound, largest=0.3).agrees


def test_what_is_not_a_number_agrees_with_nothing():
    assert not judge(arithmetic("qwen3_moe"), kl=float("nan"), p999=float("inf"), largest=float("inf")).agrees


def test_a_step_without_a_trained_token_says_nothing():
    assert judge_step(arithmetic("qwen2"), {"reward/mean": 0.0}) is None


def test_bounds_grow_with_layers_and_roundoff_alone():
    small = Arithmetic(
        trained_dtype="bfloat16", served_dtype="bfloat16", num_layers=7, width=64, has_experts=False, temperature=1.0
    )
    assert replace(small, num_layers=28).kl_bound == pytest.approx(4 * small.kl_bound)
    assert replace(small, width=1 << 14).kl_bound == small.kl_bound
    assert replace(small, temperature=0.5).kl_bound == pytest.approx(4 * small.kl_bound)
    assert replace(small, temperature=2.0).kl_bound == small.kl_bound
    assert replace(small, served_dtype="float32").kl_bound == pytest.approx(small.kl_bound / 2, rel=1e-3)


def test_fp8_weights_and_activations_add_their_rounding_to_the_bound():
    """2.65 % of each product, over the seven matrices of a layer; half the square is the KL."""
    both = arithmetic("qwen2")
    weights = replace(both, quantization="fp8")
    error = 2.3 * 0.02653 * (7 * LAYERS) ** 0.5
    assert weights.kl_bound == pytest.approx(error**2 / 2, rel=1e-3)
    assert replace(weights, quantizes_activations=True).kl_bound == pytest.approx(error**2, rel=1e-3)
    assert replace(both, quantizes_activations=True).kl_bound == pytest.approx(weights.kl_bound)


@pytest.mark.parametrize("family", FAMILIES)
def test_fp8_weights_are_no_mismatch(model, family):
    gap = mismatch_between(replace(model(family), quantization="fp8"), model(family))
    assert not verdict(gap, arithmetic(family)).agrees
    assert verdict(gap, replace(arithmetic(family), quantization="fp8")).agrees
