"""Ratios of tokens, actions and chunks: sums of log-probabilities, repeated advantages, masks."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from rlinf_algos import AlgosError, NonFiniteError, ShapeError, at_level, logprobs_at_level, ppo_clip_loss

quick = settings(max_examples=60)
LEVELS = ["token", "action", "chunk"]


@quick
@given(
    st.lists(st.integers(0, 3), max_size=2),
    st.integers(0, 3),
    st.integers(0, 3),
    st.integers(0, 2),
    st.integers(0, 3),
    st.integers(0, 2**32 - 1),
)
def test_levels(leading, C, A, level, mask_level, seed):
    rng = np.random.default_rng(seed)
    shape = (*leading, C, A)
    depth = len(leading) + (2 - level)  # dimensions of an element's index
    policy, proximal = rng.normal(size=(2, *shape))
    advantages = rng.normal(size=shape[: len(leading) + rng.integers(0, 3 - level)])
    coarse = None if mask_level == 3 else rng.random(shape[: len(shape) - mask_level]) < 0.6
    mask = np.ones(shape, bool)
    if coarse is not None:
        mask[:] = coarse.reshape(*coarse.shape, *[1] * mask_level)
    expected = [np.zeros(shape[:depth]) for _ in range(3)]
    inside = np.zeros(shape[:depth], bool)
    for index in np.ndindex(*shape[:depth]):
        keep = mask[index]
        expected[0][index], expected[1][index] = policy[index][keep].sum(), proximal[index][keep].sum()
        expected[2][index] = advantages[index[: advantages.ndim]]
        inside[index] = keep.any()
    inputs = at_level(
        LEVELS[level],
        torch.tensor(np.where(mask, policy, np.nan)),
        torch.tensor(np.where(mask, proximal, np.inf)),
        torch.tensor(advantages),
        None if coarse is None else torch.tensor(coarse),
    )
    for tensor, reference in zip(inputs[:3], expected, strict=True):
        np.testing.assert_allclose(tensor.numpy(), reference, rtol=1e-6, atol=1e-12)
    assert (inputs.loss_mask.numpy() == inside).all()


def test_the_ratio_of_a_chunk_is_the_product_of_those_of_its_tokens():
    generator = torch.Generator().manual_seed(0)
    policy = torch.randn(2, 3, 4, 5, generator=generator, dtype=torch.float64).requires_grad_()
    proximal = policy.detach() + 0.1 * torch.randn(2, 3, 4, 5, generator=generator, dtype=torch.float64)
    advantages = torch.randn(2, 3, generator=generator, dtype=torch.float64)
    loss = ppo_clip_loss(*at_level("chunk", policy, proximal, advantages), clip_high=9.0, clip_low=1.0)
    ratio = (policy - proximal).exp().prod(dim=-1).prod(dim=-1)
    torch.testing.assert_close(loss.loss_terms, -advantages * ratio)
    (gradient,) = torch.autograd.grad(loss.loss_terms.sum(), policy)
    torch.testing.assert_close(gradient, (-advantages * ratio)[..., None, None].expand_as(policy).detach())


def test_refusals():
    logprobs = torch.zeros(2, 4, 3)
    with pytest.raises(AlgosError, match="level='step' is not known; use one of 'token', 'action', 'chunk'"):
        at_level("step", logprobs, logprobs, logprobs)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ShapeError, match=r"expected \[..., C, A\]"):
        logprobs_at_level("token", torch.zeros(3))
    with pytest.raises(ShapeError, match=r"advantages has shape \[2, 4\], finer than \[2\], that of level='chunk'"):
        at_level("chunk", logprobs, logprobs, torch.zeros(2, 4))
    with pytest.raises(ShapeError, match=r"advantages has shape \[3\]; expected \[2, 4\] or a coarser"):
        at_level("action", logprobs, logprobs, torch.zeros(3))
    with pytest.raises(ShapeError, match=r"loss_mask has shape \[\]"):
        at_level("action", logprobs, logprobs, torch.zeros(2), torch.ones(()))
    with pytest.raises(ShapeError, match="proximal_logprobs has shape"):
        at_level("action", logprobs, logprobs[:1], torch.zeros(2))
    with pytest.raises(NonFiniteError, match=r"logprobs\[0, 0, 0\]=nan"):
        logprobs_at_level("chunk", logprobs * float("nan"))
