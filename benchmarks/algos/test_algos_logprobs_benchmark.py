"""Log-probabilities and entropies over a vocabulary of 150,000: ours beside the plain formula, time and peak memory.

    pytest benchmarks/algos/test_algos_logprobs_benchmark.py --benchmark-json=benchmarks/results/algos-logprobs.json

Forward and backward to the logits, in turn with the plain formula (log_softmax, gather, `-(p log p).sum`) in float32.
Memory is what the process holds at most, beside the logits: for both sides the gradient of the logits is part of it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from benchmarks.algos.peak_memory import peak_bytes
from torch import Tensor

from rlinf_algos import entropy_of_logits, logprobs_and_entropy, token_logprobs

VOCAB, NUM_ROWS = 150_000, 128
NUM_ROUNDS = 5
TARGETS = "at most 1.2 of the time, 0.5 of the memory"

Function = Callable[[Tensor, Tensor], Tensor]


def plain_logprobs(logits: Tensor, ids: Tensor) -> Tensor:
    return logits.float().log_softmax(-1).gather(1, ids[:, None]).sum()


def plain_entropy(logits: Tensor, ids: Tensor) -> Tensor:
    logprobs = logits.float().log_softmax(-1)
    return -(logprobs.exp() * logprobs).sum()


def plain_both(logits: Tensor, ids: Tensor) -> Tensor:
    logprobs = logits.float().log_softmax(-1)
    return logprobs.gather(1, ids[:, None]).sum() - (logprobs.exp() * logprobs).sum()


def ours_both(logits: Tensor, ids: Tensor) -> Tensor:
    logprobs, entropies = logprobs_and_entropy(logits, ids)
    return logprobs.sum() + entropies.sum()


CASES: dict[str, tuple[Function, Function]] = {
    "log-probability": (lambda logits, ids: token_logprobs(logits, ids).sum(), plain_logprobs),
    "entropy": (lambda logits, ids: entropy_of_logits(logits).sum(), plain_entropy),
    "both": (ours_both, plain_both),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_logprobs(benchmark: Any, case: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(NUM_ROWS, VOCAB, generator=generator)).to(dtype).requires_grad_()
    ids = torch.randint(0, VOCAB, (NUM_ROWS,), generator=generator)

    def once(function: Function) -> Callable[[], None]:
        def run() -> None:
            logits.grad = None
            function(logits, ids).backward()

        return run

    ours, plain = (once(function) for function in CASES[case])
    for side in (ours, plain):
        side()
    ratios, plain_s = [], []

    def measured() -> None:
        start = time.perf_counter()
        plain()
        middle = time.perf_counter()
        ours()
        plain_s.append(middle - start)
        ratios.append((time.perf_counter() - middle) / plain_s[-1])

    for _ in range(NUM_ROUNDS):
        measured()
    logits.grad = None
    memory = {"ours": peak_bytes(ours)}
    logits.grad = None
    memory["plain"] = peak_bytes(plain)
    benchmark.pedantic(ours, rounds=3)
    benchmark.extra_info |= {
        "rows": NUM_ROWS,
        "vocabulary": VOCAB,
        "threads": torch.get_num_threads(),
        "plain_s": statistics.median(plain_s),
        "time_ratio": statistics.median(ratios),
        "peak_bytes": memory,
        "memory_ratio": memory["ours"] / memory["plain"],
        "target": TARGETS,
    }
    print(
        f"\n{case}, {dtype}: {statistics.median(ratios):.2f} of the time, "
        f"{memory['ours'] / 1e6:.0f} of {memory['plain'] / 1e6:.0f} MB"
    )
