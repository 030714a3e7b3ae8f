"""Advantages and losses of 256 x 4,096 tokens, as a share of a 3M-parameter model's pass forward and backward.

    pytest benchmarks/algos/test_algos_losses_benchmark.py --benchmark-json=benchmarks/results/algos-losses.json

The model is a causal transformer (4 layers of width 256 and a small vocabulary), run on one of the 256 rows; its time
is multiplied by 256, since the rows do not depend on each other. Losses are measured whole, forward and backward to
the log-probabilities, with a mask of ragged completions. The share is one of processor time, which a busy machine does
not stretch.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlinf_algos import (
    advantages,
    cispo_loss,
    clipped_value_loss,
    decoupled_ppo_loss,
    entropy_bonus,
    gspo_loss,
    kl_k3,
    policy_gradient_loss,
    ppo_clip_loss,
    sequence_mean_token_mean,
    token_mean,
)

B, T = 256, 4096
MODEL_ROWS = 1
VOCAB, WIDTH, LAYERS, HEADS = 512, 256, 4, 4
TARGET = 0.05


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        heads = self.qkv(self.norm1(hidden)).unflatten(-1, (3 * HEADS, -1)).transpose(1, 2)
        mixed = nn.functional.scaled_dot_product_attention(*heads.chunk(3, dim=1), is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).flatten(2))
        return hidden + self.down(nn.functional.silu(self.up(self.norm2(hidden))))


def model_seconds() -> tuple[float, int]:
    """Processor time of forward and backward over all B rows, and the number of parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(VOCAB, WIDTH), *(Block() for _ in range(LAYERS)), nn.Linear(WIDTH, VOCAB))
    ids = torch.randint(0, VOCAB, (MODEL_ROWS, T))
    samples = []
    for _ in range(3):
        start = time.process_time()
        model(ids).sum().backward()
        samples.append(time.process_time() - start)
    return min(samples) * B / MODEL_ROWS, sum(p.numel() for p in model.parameters())


@pytest.fixture(scope="module")
def model() -> tuple[float, int]:
    return model_seconds()


@pytest.fixture(scope="module")
def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    policy = -torch.rand(B, T, generator=generator)
    noise = 0.1 * torch.randn(3, B, T, generator=generator)
    lengths = torch.randint(T // 2, T + 1, (B, 1), generator=generator)
    return {
        "policy": policy.requires_grad_(),
        "proximal": policy.detach() + noise[0],
        "rollout": policy.detach() + noise[1],
        "ref": policy.detach() + noise[2],
        "advantages": torch.randn(B, generator=generator),
        "values": torch.randn(B, T, generator=generator).requires_grad_(),
        "old_values": torch.randn(B, T, generator=generator),
        "rewards": torch.randn(B, T, generator=generator),
        "mask": torch.arange(T) < lengths,
    }


def policy_loss(function: Callable[..., Any], **options: Any) -> Callable[[dict[str, Tensor]], Tensor]:
    def run(batch: dict[str, Tensor]) -> Tensor:
        extra = {name: batch[key] for name, key in options.items()}
        loss = function(batch["policy"], batch["proximal"], batch["advantages"], batch["mask"], **extra)
        return token_mean(loss.loss_terms, batch["mask"], B * T)

    return run


def grpo(batch: dict[str, Tensor]) -> Tensor:
    """Advantages of 32 groups of 8, the clipped loss with KL and entropy terms, the mean."""
    values = advantages.grpo_advantages(batch["advantages"].view(32, 8)).view(B)
    mask = batch["mask"]
    loss = ppo_clip_loss(batch["policy"], batch["proximal"], values, mask, clip_high=0.28, dual_clip=3.0)
    terms = loss.loss_terms + 0.001 * kl_k3(batch["policy"], batch["ref"], mask)
    return sequence_mean_token_mean(terms + entropy_bonus(-batch["policy"], mask, coef=0.01), mask, B)


def ppo(batch: dict[str, Tensor]) -> Tensor:
    """Token-level GAE, the clipped loss and the critic's."""
    mask = batch["mask"]
    values, returns = advantages.token_gae(batch["rewards"], batch["old_values"], mask, 1.0, 0.95)
    loss = ppo_clip_loss(batch["policy"], batch["proximal"], values, mask)
    critic = clipped_value_loss(batch["values"], batch["old_values"], returns, mask)
    return token_mean(loss.loss_terms, mask, B * T) + token_mean(critic.loss_terms, mask, B * T)


CASES: dict[str, Callable[[dict[str, Tensor]], Tensor]] = {
    "ppo_clip": policy_loss(ppo_clip_loss),
    "gspo": policy_loss(gspo_loss),
    "cispo": policy_loss(cispo_loss),
    "decoupled_ppo": policy_loss(decoupled_ppo_loss, rollout_logprobs="rollout"),
    "policy_gradient": policy_loss(policy_gradient_loss),
    "GRPO whole": grpo,
    "PPO whole": ppo,
}


@pytest.mark.parametrize("case", CASES)
def test_losses(benchmark: Any, case: str, batch: dict[str, Tensor], model: tuple[float, int]) -> None:
    samples = []

    def run() -> None:
        batch["policy"].grad = batch["values"].grad = None
        start = time.process_time()
        CASES[case](batch).backward()
        samples.append(time.process_time() - start)

    run()
    benchmark.pedantic(run, rounds=5)
    median_s = statistics.median(samples[1:])
    model_s, num_parameters = model
    benchmark.extra_info |= {
        "tokens": B * T,
        "threads": torch.get_num_threads(),
        "model_parameters": num_parameters,
        "processor_s": median_s,
        "model_s": model_s,
        "share": median_s / model_s,
        "target": TARGET,
    }
    print(f"\n{case}: {median_s * 1e3:.0f} ms, {median_s / model_s:.2%} of {model_s:.1f} s")
