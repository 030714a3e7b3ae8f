"""Sharing a prompt among its completions gives the log-probabilities and the gradients of whole sequences."""

import pytest
import torch
from workers_rounding import additions_of_transformer, rounding_bound

from rlinf_algos import token_logprobs
from rlinf_workers.models.language_model import ModelSettings, build_model
from rlinf_workers.models.sequences import completion_logits, pack_groups
from rlinf_workers.roles.records.language import Prompt, SampleGroup

GROUP_SIZE, NUM_TOKENS, TEMPERATURE = 3, 5, 0.7
ROUNDING = rounding_bound(additions_of_transformer(num_layers=2, width=32, inner_width=64, num_tokens=11))
"""Of log-probabilities and gradients of order 1; norms and angles are in float32 whatever the model is in."""


def sample_group(index, prompt_length, lengths):
    generator = torch.Generator().manual_seed(index)
    mask = (torch.arange(NUM_TOKENS) < torch.tensor(lengths)[:, None]).float()
    return SampleGroup(
        prompt=Prompt(
            index=index, token_ids=torch.randint(2, 13, (prompt_length,), generator=generator), reference_answer=""
        ),
        completion_ids=torch.randint(2, 13, (len(lengths), NUM_TOKENS), generator=generator) * mask.long(),
        loss_mask=mask,
        rollout_logprobs=torch.zeros(len(lengths), NUM_TOKENS),
        policy_version=0,
    )


def logprobs_of(model, batch):
    return token_logprobs(completion_logits(model, batch), batch.completion_ids, temperature=TEMPERATURE)


def logprobs_of_whole_sequences(model, groups):
    """One sequence at a time, without padding, cache or sharing; [B, T], 0 past the end of a completion."""
    rows = []
    for group in groups:
        for ids, mask in zip(group.completion_ids, group.loss_mask, strict=True):
            completion = ids[: int(mask.sum())]
            logits = model(input_ids=torch.cat([group.prompt.token_ids, completion])[None], use_cache=False).logits[0]
            steps = (logits[len(group.prompt.token_ids) - 1 : -1] / TEMPERATURE).log_softmax(-1)
            logprobs = steps.gather(1, completion[:, None])[:, 0]
            rows.append(torch.nn.functional.pad(logprobs, (0, NUM_TOKENS - len(logprobs))))
    return torch.stack(rows)


@pytest.mark.parametrize("prompt_lengths", [(4, 4), (6, 2), (1, 5)], ids=str)
def test_shared_prompts_equal_whole_sequences(model, prompt_lengths):
    built = build_model(model, torch.device("cpu")).double()
    groups = [sample_group(i, length, [5, 1, 3]) for i, length in enumerate(prompt_lengths)]
    batch = pack_groups(groups)
    weight = torch.rand(batch.loss_mask.shape, dtype=torch.float64) * batch.loss_mask

    logprobs = logprobs_of(built, batch)
    (logprobs * weight).sum().backward()
    gradients = [parameter.grad.clone() for parameter in built.parameters()]
    built.zero_grad()
    expected = logprobs_of_whole_sequences(built, groups)
    (expected * weight).sum().backward()

    torch.testing.assert_close(logprobs * batch.loss_mask, expected, check_dtype=False, rtol=0, atol=ROUNDING)
    for gradient, parameter in zip(gradients, built.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=ROUNDING, atol=ROUNDING)


def test_a_completion_of_one_token_needs_its_prompt_alone(model):
    built = build_model(model, torch.device("cpu"))
    groups = [sample_group(0, 4, [1, 1, 1])]
    batch = pack_groups(groups)
    assert batch.completion_ids.shape == (GROUP_SIZE, 1)
    with torch.no_grad():
        logprobs = logprobs_of(built, batch)
        expected = logprobs_of_whole_sequences(built, groups)[:, :1]
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=ROUNDING)


def test_a_model_without_sdpa_has_its_own_attention(tmp_path):
    """Gemma 2 caps attention scores, which SDPA cannot, and half of its layers see a window of 4 tokens."""
    from transformers import Gemma2Config

    Gemma2Config(
        vocab_size=16,
        pad_token_id=0,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=4,
        attn_logit_softcapping=0.5,
    ).save_pretrained(tmp_path)
    built = build_model(ModelSettings(folder=str(tmp_path), has_weights=False), torch.device("cpu"))
    groups = [sample_group(i, length, [5, 1, 3]) for i, length in enumerate((6, 2))]
    batch = pack_groups(groups)
    with torch.no_grad():
        logprobs = logprobs_of(built, batch) * batch.loss_mask
        expected = logprobs_of_whole_sequences(built, groups)
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("prompt_lengths", [(4, 4), (2, 6)], ids=str)
def test_groups_of_different_sizes_equal_whole_sequences(model, prompt_lengths):
    built = build_model(model, torch.device("cpu")).double()
    groups = [sample_group(0, prompt_lengths[0], [5, 1, 3]), sample_group(1, prompt_lengths[1], [2, 4])]
    batch = pack_groups(groups)
    with torch.no_grad():
        logprobs, expected = logprobs_of(built, batch), logprobs_of_whole_sequences(built, groups)
    torch.testing.assert_close(logprobs * batch.loss_mask, expected, check_dtype=False, rtol=0, atol=ROUNDING)
