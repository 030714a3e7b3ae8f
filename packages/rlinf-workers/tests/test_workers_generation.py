"""Generation: equal to `model.generate`, independent of the batch, and honest about its log-probabilities."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlinf_comm.testing import assert_bitwise_equal
from rlinf_workers.generation.huggingface import HuggingFaceEngine
from rlinf_workers.generation.sampling import SamplingSettings, prompt_noise, sample_tokens
from rlinf_workers.models.sequences import completion_logprobs, pack_groups
from rlinf_workers.records.language import Prompt

GREEDY = SamplingSettings(group_size=1, max_new_tokens=6, temperature=0.0)
SAMPLING = SamplingSettings(group_size=4, max_new_tokens=6)


def prompts(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        Prompt(index=i, token_ids=torch.randint(2, 13, (length,), generator=generator), reference_answer="")
        for i, length in enumerate(lengths)
    ]


def engine(model, *, same_length=False, **changes):
    return HuggingFaceEngine(
        model, torch.device("cpu"), max_prompt_tokens=changes.pop("width", 8), same_length=same_length, **changes
    )


def generate(made, some_prompts, sampling=SAMPLING, step=0):
    return made.generate(some_prompts, sampling, seed=1, step=step, policy_version=7)


def test_greedy_equals_the_models_own_generate(model):
    made = engine(model)
    some = prompts([3, 8, 5])
    for prompt, group in zip(some, generate(made, some, GREEDY), strict=True):
        expected = made._model.generate(
            prompt.token_ids[None],
            attention_mask=torch.ones(1, len(prompt.token_ids)),
            do_sample=False,
            max_new_tokens=6,
        )[0, len(prompt.token_ids) :]
        length = int(group.loss_mask.sum())
        assert group.completion_ids[0, :length].tolist() == expected.tolist()


@pytest.mark.parametrize("same_length", [True, False])
def test_a_group_does_not_depend_on_its_batch(model, same_length):
    made = engine(model, same_length=same_length)
    some = prompts([8] * 12 if same_length else [3, 8, 5, 7, 8, 2, 4, 6, 8, 1, 5, 3])
    together = generate(made, some)
    for size in (1, 2, 5):
        apart = [g for start in range(0, 12, size) for g in generate(made, some[start : start + size])]
        for one, other in zip(together, apart, strict=True):
            assert_bitwise_equal(one.completion_ids, other.completion_ids)
            assert_bitwise_equal(one.rollout_logprobs, other.rollout_logprobs)


def test_splitting_by_max_batch_sequences_changes_nothing(model):
    some = prompts([8] * 6)
    whole, split = engine(model), engine(model, max_batch_sequences=8)
    for one, other in zip(generate(whole, some), generate(split, some), strict=True):
        assert_bitwise_equal(one.rollout_logprobs, other.rollout_logprobs)


def test_logprobs_are_those_of_a_training_forward(model):
    made = engine(model)
    groups = generate(made, prompts([3, 8, 5]))
    batch = pack_groups(groups, pad_id=0)
    with torch.no_grad():
        expected = completion_logprobs(made._model, batch, temperature=1.0)
    found = torch.cat([group.rollout_logprobs for group in groups])[:, : expected.shape[1]]
    torch.testing.assert_close(found * batch.loss_mask, expected * batch.loss_mask, rtol=1e-5, atol=1e-5)


def test_another_step_draws_other_noise_and_the_same_step_the_same(model):
    made, some = engine(model), prompts([8, 8])
    assert not torch.equal(generate(made, some)[0].completion_ids, generate(made, some, step=1)[0].completion_ids)
    assert torch.equal(generate(made, some)[0].completion_ids, generate(made, some)[0].completion_ids)


def test_after_the_end_token_nothing_counts(model):
    for group in generate(engine(model), prompts([8] * 16)):
        assert group.truncated is not None
        rows = zip(group.completion_ids, group.loss_mask, group.rollout_logprobs, group.truncated, strict=True)
        for ids, mask, logprobs, truncated in rows:
            length = int(mask.sum())
            assert bool(truncated) == (1 not in ids[:length].tolist()), "the end token may be the last one allowed"
            assert mask.tolist() == [1.0] * length + [0.0] * (6 - length)
            assert 1 not in ids[: length - 1].tolist()
            assert length == 6 or ids[length - 1] == 1
            assert ids[length:].tolist() == [0] * (6 - length)
            assert logprobs[length:].tolist() == [0.0] * (6 - length)
        assert group.policy_version == 7


def test_a_prompt_that_is_too_long_is_named(model):
    with pytest.raises(ValueError, match=r"prompt 1 has 9 tokens; rollout.max_prompt_tokens allows 8"):
        generate(engine(model), prompts([3, 9]))


def test_sampling_follows_the_distribution():
    logits = torch.log(torch.tensor([0.1, 0.0, 0.6, 0.3])).expand(20_000, 4)
    uniform = prompt_noise(0, 0, range(5_000), SamplingSettings(group_size=4, max_new_tokens=1))[:, 0]
    tokens, logprobs = sample_tokens(logits, uniform, SAMPLING)
    frequency = np.bincount(tokens.numpy(), minlength=4) / len(tokens)
    np.testing.assert_allclose(frequency, [0.1, 0.0, 0.6, 0.3], atol=0.02)
    torch.testing.assert_close(logprobs.exp(), torch.tensor([0.1, 0.0, 0.6, 0.3])[tokens])


def test_top_p_never_draws_the_tail_and_reports_the_full_distribution():
    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05])).expand(1000, 4)
    uniform = torch.linspace(0, 1 - 1e-6, 1000)
    settings_top_p = SamplingSettings(group_size=1, max_new_tokens=1, top_p=0.7)
    tokens, logprobs = sample_tokens(logits, uniform, settings_top_p)
    assert set(tokens.tolist()) == {0, 1}
    torch.testing.assert_close(logprobs.exp().unique(), torch.tensor([0.3, 0.5]))


@given(uniform=st.floats(0, 1, exclude_max=True, width=32), seed=st.integers(0, 1000))
def test_a_draw_is_the_inverse_of_the_cumulative_distribution(uniform, seed):
    logits = torch.randn(1, 9, generator=torch.Generator().manual_seed(seed))
    token, _ = sample_tokens(logits, torch.tensor([uniform]), SAMPLING)
    cumulative = np.cumsum(np.exp(logits[0].double().numpy()) / np.exp(logits[0].double().numpy()).sum())
    low = cumulative[token - 1] if token > 0 else 0.0
    assert low - 1e-6 <= uniform <= cumulative[token] + 1e-6
