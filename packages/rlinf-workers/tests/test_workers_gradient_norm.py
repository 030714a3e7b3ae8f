"""The norm of a gradient is not rounded to bfloat16, and in float32 it is torch's own to the bit."""

import pytest
import torch
from torch import nn

from rlinf_workers.trainers.gradient_norm import gradient_norm


def drawn(dtype: torch.dtype) -> list[torch.Tensor]:
    source = torch.Generator().manual_seed(0)
    return [torch.randn(7 * size, size, generator=source).to(dtype) for size in (1, 30, 111)]


def test_norms_of_bfloat16_gradients_are_not_rounded_to_it():
    gradients = drawn(torch.bfloat16)
    exact = float(sum(one.double().square().sum() for one in gradients)) ** 0.5
    assert float(gradient_norm(gradients)) == pytest.approx(exact, rel=1e-6)
    assert float(nn.utils.get_total_norm(gradients)) != pytest.approx(exact, rel=1e-4), "otherwise use torch's"


def test_in_float32_it_is_torchs_own_to_the_bit():
    gradients = drawn(torch.float32)
    assert torch.equal(gradient_norm(gradients), nn.utils.get_total_norm(gradients))
    gradients[1][3, 4] = torch.nan
    assert bool(gradient_norm(gradients).isnan())
