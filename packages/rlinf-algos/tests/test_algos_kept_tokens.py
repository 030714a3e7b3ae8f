"""Log-probabilities among kept tokens are those of logits in which all other tokens are banned."""

import pytest
import torch

from rlinf_algos import kept_tokens
from rlinf_algos.errors import AlgosError, NonFiniteError, ShapeError
from rlinf_algos.kept_tokens import kept_head_logprobs_and_entropy, kept_logprobs_and_entropy

NUM_TOKENS, WIDTH, VOCAB = 13, 6, 23


def sets(seed=0):
    """Token ids, kept ids and their numbers; of the first token all are kept, of the second one alone."""
    generator = torch.Generator().manual_seed(seed)
    is_kept = torch.rand(NUM_TOKENS, VOCAB, generator=generator) < 0.3
    ids = torch.randint(0, VOCAB, (NUM_TOKENS,), generator=generator)
    is_kept[0], is_kept[1] = True, False
    is_kept[torch.arange(NUM_TOKENS), ids] = True
    return ids, is_kept, is_kept.nonzero()[:, 1].int(), is_kept.sum(1).int()


def banned(logits, ids, is_kept, temperature):
    scores = (logits / temperature).masked_fill(~is_kept, float("-inf"))
    logprobs = scores.log_softmax(-1)
    safe = logprobs.masked_fill(~is_kept, 0.0)
    return logprobs.gather(1, ids[:, None])[:, 0], -(logprobs.exp() * safe).sum(-1)


@pytest.mark.parametrize("chunk", [1 << 22, 4 * WIDTH])
@pytest.mark.parametrize(("has_bias", "softcap"), [(False, None), (True, 3.0)])
def test_values_and_gradients_equal_those_with_the_other_tokens_banned(monkeypatch, chunk, has_bias, softcap):
    monkeypatch.setattr(kept_tokens, "_CHUNK_ELEMENTS", chunk)
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(NUM_TOKENS, WIDTH, generator=generator, dtype=torch.float64).requires_grad_()
    weight = torch.randn(VOCAB, WIDTH, generator=generator, dtype=torch.float64).requires_grad_()
    bias = torch.randn(VOCAB, generator=generator, dtype=torch.float64).requires_grad_() if has_bias else None
    ids, is_kept, kept_ids, num_kept = sets()
    logits = torch.nn.functional.linear(hidden, weight, bias)
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    computed = [
        banned(logits, ids, is_kept, 0.7),
        kept_logprobs_and_entropy(logits, ids, kept_ids, num_kept, 0.7),
        kept_head_logprobs_and_entropy(hidden, weight, ids, kept_ids, num_kept, 0.7, bias=bias, softcap=softcap),
    ]
    leaves = [hidden, weight] if bias is None else [hidden, weight, bias]
    weights = torch.linspace(-1.0, 2.0, NUM_TOKENS, dtype=torch.float64)
    grads = [
        torch.autograd.grad((weights * a + weights.flip(0) * b).sum(), leaves, retain_graph=True) for a, b in computed
    ]
    for values, of_leaves in zip(computed[1:], grads[1:], strict=True):
        torch.testing.assert_close(values, computed[0], rtol=0, atol=1e-12)
        torch.testing.assert_close(of_leaves, grads[0], rtol=0, atol=1e-12)


def test_bfloat16_states_give_the_float32_products():
    hidden = torch.randn(NUM_TOKENS, WIDTH, generator=torch.Generator().manual_seed(2)).bfloat16().requires_grad_()
    weight = torch.randn(VOCAB, WIDTH, generator=torch.Generator().manual_seed(3)).bfloat16().requires_grad_()
    ids, is_kept, kept_ids, num_kept = sets()
    logprobs, entropies = kept_head_logprobs_and_entropy(hidden, weight, ids, kept_ids, num_kept)
    assert logprobs.dtype == entropies.dtype == torch.float32
    expected, _ = banned(hidden.float() @ weight.float().T, ids, is_kept, 1.0)
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=2e-6)
    grads = torch.autograd.grad(logprobs.sum(), [hidden, weight])
    for computed, exact in zip(grads, torch.autograd.grad(expected.sum(), [hidden, weight]), strict=True):
        assert computed.dtype == torch.bfloat16
        torch.testing.assert_close(computed, exact, rtol=2**-7, atol=2**-8)


def test_the_gradient_is_that_of_the_expected_reward_by_enumeration():
    """A policy of two tokens, of which top-p 0.9 leaves a set that depends on the first: the gradient over all
    sequences that can be drawn equals that of the exact expectation. Over all tokens it does not."""
    vocab, generator = 6, torch.Generator().manual_seed(4)
    first = torch.randn(vocab, generator=generator, dtype=torch.float64).requires_grad_()
    second = torch.randn(vocab, vocab, generator=generator, dtype=torch.float64).requires_grad_()
    rewards = torch.randn(vocab, vocab, generator=generator, dtype=torch.float64)

    def kept_of(logits):
        ordered, order = logits.detach().softmax(-1).sort(descending=True)
        return sorted(order[(ordered.cumsum(-1) - ordered) < 0.9].tolist())

    sequences = [(a, b) for a in kept_of(first) for b in kept_of(second[a])]
    assert len(sequences) < vocab * vocab
    tokens = torch.tensor(sequences)

    def expected_reward():
        def restricted(logits):
            return torch.where(
                torch.isin(torch.arange(vocab), torch.tensor(kept_of(logits))), logits, float("-inf")
            ).softmax(-1)

        of_first = restricted(first)
        return torch.stack([of_first[a] * restricted(second[a])[b] * rewards[a, b] for a, b in sequences]).sum()

    exact = torch.autograd.grad(expected_reward(), [first, second])
    logits = torch.stack([row for a, _ in sequences for row in (first, second[a])])
    kept_sets = [ids for a, _ in sequences for ids in (kept_of(first), kept_of(second[a]))]
    logprobs, _ = kept_logprobs_and_entropy(
        logits,
        tokens.flatten(),
        torch.tensor([one for each in kept_sets for one in each]),
        torch.tensor([len(each) for each in kept_sets]),
    )
    of_sequences = logprobs.view(-1, 2).sum(1)
    sampled_loss = (of_sequences.detach().exp() * rewards[tokens[:, 0], tokens[:, 1]] * of_sequences).sum()
    for computed, right in zip(torch.autograd.grad(sampled_loss, [first, second]), exact, strict=True):
        torch.testing.assert_close(computed, right, rtol=0, atol=1e-12)


def test_what_does_not_fit_is_refused():
    ids, _, kept_ids, num_kept = sets()
    logits = torch.zeros(NUM_TOKENS, VOCAB)
    other = kept_ids.clone()
    other[num_kept[0]] = (other[num_kept[0]] + 1) % VOCAB  # the one kept token of the second row
    with pytest.raises(AlgosError, match=r"token_ids\[1\]=\d+ is 0 times among the tokens that sampling left"):
        kept_logprobs_and_entropy(logits, ids, other, num_kept)
    with pytest.raises(ShapeError, match="num_kept says"):
        kept_logprobs_and_entropy(logits, ids, kept_ids[:-1], num_kept)
    with pytest.raises(AlgosError, match=f"kept_ids has {VOCAB}"):
        kept_logprobs_and_entropy(logits, ids, torch.full_like(kept_ids, VOCAB), num_kept)
    logits[3] = float("nan")
    with pytest.raises(NonFiniteError, match="the kept logits of token 3"):
        kept_logprobs_and_entropy(logits, ids, kept_ids, num_kept)
