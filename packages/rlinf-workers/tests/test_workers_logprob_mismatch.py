"""The gap between engine and actor: sums that add up, quantiles within their bound, the worst token."""

import math

import numpy as np
import pytest
import torch

from rlinf_workers.roles.language.logprob_mismatch import (
    NUM_SUMS,
    LogprobMismatch,
    WorstToken,
    mismatch_sums,
    worst_token,
)


def drift_of(num_rows, num_tokens, scale, seed=0):
    generator = np.random.default_rng(seed)
    return torch.tensor(generator.normal(size=(num_rows, num_tokens)) * scale * generator.gamma(0.5, size=num_tokens))


@pytest.mark.parametrize("scale", [1e-7, 1e-3, 0.5])
def test_mean_kl_and_quantile_are_those_of_all_tokens(scale):
    drift = drift_of(400, 32, scale)
    mask = (torch.rand(400, 32, generator=torch.Generator().manual_seed(1)) < 0.7).float()
    gap = LogprobMismatch.of([mismatch_sums(part, m) for part, m in zip(drift.split(37), mask.split(37), strict=True)])
    tokens = drift[mask != 0].numpy().astype(np.longdouble)
    assert gap is not None
    assert gap.num_tokens == len(tokens)
    assert gap.mean == pytest.approx(float(np.abs(tokens).mean()), rel=1e-12)
    assert gap.kl == pytest.approx(float((np.expm1(tokens) - tokens).mean()), rel=1e-6, abs=1e-18)
    for share in (0.5, 0.99, 0.999):
        exact = np.quantile(np.abs(tokens), share, method="inverted_cdf")
        assert gap.quantile(share) == pytest.approx(float(exact), rel=0.0219)


def test_however_the_tokens_are_cut_the_sums_are_the_same():
    drift, mask = drift_of(64, 8, 1e-2), torch.ones(64, 8)
    whole = LogprobMismatch.of([mismatch_sums(drift, mask)])
    parts = LogprobMismatch.of([mismatch_sums(part, torch.ones_like(part)) for part in reversed(drift.split(5))])
    assert whole is not None and parts is not None
    assert parts.counts == whole.counts
    assert parts.kl == pytest.approx(whole.kl, rel=1e-12)


def test_no_token_has_no_gap():
    sums = mismatch_sums(torch.ones(2, 3).double(), torch.zeros(2, 3))
    assert len(sums) == NUM_SUMS
    assert LogprobMismatch.of([sums]) is None
    assert LogprobMismatch.of([]) is None


def test_equal_tokens_are_no_distance_apart_and_huge_distances_are_counted():
    gap = LogprobMismatch.of(
        [mismatch_sums(torch.tensor([[0.0] * 7 + [1e-40, -500.0, math.nan]]).double(), torch.ones(1, 10))]
    )
    assert gap is not None
    assert gap.quantile(0.8) == 0.0
    assert gap.quantile(0.9) == gap.quantile(1.0) == 2.0**6
    assert math.isnan(gap.kl)


def test_the_worst_token_comes_with_its_neighbours():
    actor = -torch.ones(2, 6)
    rollout = actor.clone()
    rollout[1, 2] = -3.0
    rollout[0, 5] = -50.0  # behind the end
    mask = torch.tensor([[1.0, 1, 1, 0, 0, 0], [1, 1, 1, 1, 0, 0]])
    ids = torch.arange(12).view(2, 6)
    expected = WorstToken(
        gap=2.0,
        prompt=9,
        position=2,
        actor_logprob=-1.0,
        rollout_logprob=-3.0,
        before=(6, 7),
        token=8,
        after=(9,),
    )
    assert worst_token(actor, rollout, ids, mask, (4, 9)) == expected
    assert worst_token(actor, rollout, ids, torch.zeros(2, 6), (4, 9)) is None
    rollout[0, 1] = math.nan
    worst = worst_token(actor, rollout, ids, mask, (4, 9))
    assert worst is not None and worst.gap == math.inf and worst.token == 1
    assert worst.order < expected.order


def test_the_worst_token_after_a_tools_output_has_it_before():
    mask, ids = torch.tensor([[1.0, 0, 0, 1, 1, 0]]), torch.arange(6)[None]
    actor, rollout = -torch.ones(1, 6), torch.tensor([[-1.0, -9, -9, -2, -1, -9]])
    worst = worst_token(actor, rollout, ids, mask, (4,))
    assert worst is not None
    assert (worst.before, worst.token, worst.after) == ((0, 1, 2), 3, (4,))
