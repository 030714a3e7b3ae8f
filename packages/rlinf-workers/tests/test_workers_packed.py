"""A packed row gives the log-probabilities, values and gradients of whole sequences, one at a time and unpadded."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st
from transformers import AutoConfig, AutoModelForCausalLM
from workers_rounding import additions_of_transformer, rounding_bound

from rlinf_workers.models import head, packed
from rlinf_workers.models.language_model import ModelSettings
from rlinf_workers.models.packed import computed_tokens, pack_without_padding, packed_logits
from rlinf_workers.models.trainable import TokenModel, ValueModel
from rlinf_workers.roles.records.language import Prompt, SampleGroup

VOCAB_SIZE, NUM_TOKENS, TEMPERATURE = 97, 24, 0.7
SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ROUNDING = rounding_bound(additions_of_transformer(num_layers=3, width=32, inner_width=48, num_tokens=33))
"""Of log-probabilities, entropies and values of order 1, and of gradients relative to the largest, in float32."""
ARCHITECTURES = {
    "gemma": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0},
    "llama": {},
    "mistral": {"sliding_window": 5},
    "qwen2": {},
    "qwen2 with windows": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "qwen3": {"head_dim": 16},
    "qwen3_moe": {
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "experts_implementation": "eager",  # the grouped product knows no float64
    },
}


def sample_group(index, prompt_length, lengths):
    generator = torch.Generator().manual_seed(index)
    mask = (torch.arange(NUM_TOKENS) < torch.tensor(lengths)[:, None]).float()
    prompt_ids = torch.randint(3, VOCAB_SIZE, (prompt_length,), generator=generator)
    return SampleGroup(
        prompt=Prompt(index=index, token_ids=prompt_ids, reference_answer=""),
        completion_ids=torch.randint(3, VOCAB_SIZE, mask.shape, generator=generator),
        loss_mask=mask,
        rollout_logprobs=torch.zeros(mask.shape),
        policy_version=0,
    )


GROUPS = [sample_group(0, 7, [5, 1, 12]), sample_group(1, 7, [3, 24]), sample_group(2, 9, [14, 2, 0, 8])]


def model_of(name, folder: Path | None = None, dtype=torch.float64):
    torch.manual_seed(0)
    config = AutoConfig.for_model(name.split()[0], **SHAPE, **ARCHITECTURES[name])
    if folder is not None:
        config.save_pretrained(folder)
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def states_of_whole_sequences(model, groups):
    """Logits before each completion token, and the token; one sequence at a time."""
    for group in groups:
        prompt = group.prompt.token_ids
        for ids, mask in zip(group.completion_ids, group.loss_mask, strict=True):
            completion = ids[: int(mask.sum())]
            logits = model(input_ids=torch.cat([prompt, completion])[None], use_cache=False).logits[0]
            yield logits[len(prompt) - 1 : -1], completion


def logprobs_of_whole_sequences(model, groups):
    """[M]"""
    logprobs = []
    for logits, completion in states_of_whole_sequences(model, groups):
        logprobs.append((logits / TEMPERATURE).log_softmax(-1).gather(1, completion[:, None])[:, 0])
    return torch.cat(logprobs)


def answered(model, batch, *, entropies=False):
    kind = TokenModel(ModelSettings(folder="", has_weights=False), TEMPERATURE)
    return kind.answers(model, batch, entropies=entropies)


def check_equal(model, groups, bound, gradient_bound):
    batch = pack_without_padding(groups)
    inside = batch.loss_mask != 0
    logprobs = answered(model, batch).logprobs
    weight = torch.rand(int(inside.sum()), dtype=logprobs.dtype)
    (logprobs[inside] * weight).sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    expected = logprobs_of_whole_sequences(model, groups)
    (expected * weight).sum().backward()

    torch.testing.assert_close(logprobs[inside], expected, rtol=0, atol=bound)
    assert not logprobs[~inside].any()
    largest = max(float(parameter.grad.abs().max()) for parameter in model.parameters())
    for gradient, parameter in zip(gradients, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=0, atol=gradient_bound * largest)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_packed_row_equals_whole_sequences(name):
    torch.set_num_threads(1)
    # Gemma 2's plain attention takes its softmax in float32, and norms are in float32: hence the bound of gradients.
    check_equal(model_of(name), GROUPS, ROUNDING if name == "gemma2" else 1e-10, ROUNDING)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_packed_row_equals_whole_sequences_in_float32(name):
    check_equal(model_of(name, dtype=torch.float32), GROUPS, ROUNDING, ROUNDING)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 9), st.lists(st.integers(0, NUM_TOKENS), min_size=1, max_size=5)),
        min_size=1,
        max_size=5,
    ).filter(lambda groups: any(sum(lengths) for _, lengths in groups))
)
def test_any_groups_equal_whole_sequences(drawn):
    groups = [sample_group(i, length, lengths) for i, (length, lengths) in enumerate(drawn)]
    model, batch = model_of("qwen2"), pack_without_padding(groups)
    with torch.no_grad():
        logprobs = answered(model, batch).logprobs[batch.loss_mask != 0]
        torch.testing.assert_close(logprobs, logprobs_of_whole_sequences(model, groups), rtol=0, atol=1e-10)
    assert computed_tokens(groups) == (len(batch.token_ids), int((batch.position_ids + 1).sum()))


def test_layers_compute_no_padding_and_the_head_only_what_is_asked():
    model, seen = model_of("qwen2"), {}
    for name, module in (("mlp", model.model.layers[0].mlp), ("head", model.lm_head)):
        module.register_forward_hook(lambda _, inputs, __, name=name: seen.update({name: inputs[0].shape[:-1]}))
    batch = pack_without_padding(GROUPS)
    packed_logits(model, batch)
    assert seen == {"mlp": (1, len(batch.token_ids)), "head": (1, int(batch.loss_mask.sum()))}
    assert batch.token_ids.tolist()[:13] == [
        *GROUPS[0].prompt.token_ids.tolist(),
        *GROUPS[0].completion_ids[0, :4].tolist(),
        *GROUPS[0].completion_ids[2, :2].tolist(),
    ]


def test_entropies_and_the_head_without_logits_agree(monkeypatch):
    model, batch = model_of("qwen2", dtype=torch.float32), pack_without_padding(GROUPS)
    by_logits = answered(model, batch, entropies=True)
    monkeypatch.setattr(head, "MAX_LOGITS_BYTES", 1)
    without = answered(model, batch, entropies=True)
    for name in ("logprobs", "entropies"):
        torch.testing.assert_close(getattr(by_logits, name), getattr(without, name), rtol=0, atol=ROUNDING)
    logits, _ = next(iter(states_of_whole_sequences(model, GROUPS)))
    logprobs = (logits / TEMPERATURE).log_softmax(-1)
    expected = -(logprobs.exp() * logprobs).sum(-1)
    torch.testing.assert_close(by_logits.entropies[0, :5], expected, rtol=0, atol=ROUNDING)


def test_values_are_those_of_whole_sequences(tmp_path):
    model_of("qwen2", tmp_path)
    kind = ValueModel(ModelSettings(folder=str(tmp_path), has_weights=False))
    model = kind.build(torch.device("cpu"))
    torch.nn.init.normal_(model.get_output_embeddings().weight, std=32**-0.5)  # pyright: ignore
    batch = pack_without_padding(GROUPS)
    actual = kind.answers(model, batch, entropies=False).values
    expected = torch.cat([values[:, 0] for values, _ in states_of_whole_sequences(model, GROUPS)])
    torch.testing.assert_close(actual[batch.loss_mask != 0], expected, rtol=0, atol=ROUNDING)
    assert kind.num_calls(batch) == 1


def test_completions_of_very_different_length_share_no_call():
    group = sample_group(0, 4, [24, 23, 3, 2])
    assert [tuple(b.keys.shape) for b in pack_without_padding([group]).attention.blocks] == [(1, 4), (2, 27), (2, 6)]


def test_a_model_keeps_its_own_attention_outside():
    model = model_of("gemma2")
    before = model.config._attn_implementation
    answered(model, pack_without_padding(GROUPS))
    assert model.config._attn_implementation == before == "eager"


def test_a_model_whose_layers_attend_in_another_way_is_an_error(monkeypatch):
    monkeypatch.setattr(packed, "packed", lambda _: nullcontext())  # the layers keep their own attention
    with pytest.raises(RuntimeError, match="0 of 3 layers kept the packed sequences apart"):
        answered(model_of("qwen2"), pack_without_padding(GROUPS))


def test_completions_without_any_token_have_no_answers_and_no_gradient():
    """A filter may mask all that a micro-batch has."""
    model = model_of("qwen2")
    empty = [replace(group, loss_mask=torch.zeros_like(group.loss_mask)) for group in GROUPS]
    answers = answered(model, pack_without_padding(empty), entropies=True)
    assert answers.logprobs.shape == answers.entropies.shape == (sum(len(group.loss_mask) for group in GROUPS), 1)
    (answers.logprobs.sum() + answers.entropies.sum()).backward()
    assert not answers.logprobs.any()
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in model.parameters())
