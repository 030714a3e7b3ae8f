"""The head without logits beside the plain formula: time and peak memory, forward and backward, on one thread.

    python -m benchmarks.algos.head [--tokens 8192] [--rounds 1] [--dtype float32] [--what both] [--output FILE]

Hidden 1,536, vocabulary 151,936 (Qwen2.5-1.5B). The plain formula: the product, log_softmax in float32, gather and
`-(p log p).sum`. Memory is what the process holds at most beside hidden states and weight; the gradients of both are
part of it on both sides. Ours keeps logits of the forward pass within a part of the memory target. Numbers of both are
compared, too.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch
from benchmarks.algos.peak_memory import peak_bytes
from benchmarks.harness import compare, interleave, report
from torch import Tensor

from rlinf_algos import head_logprobs, head_logprobs_and_entropy

HIDDEN, VOCAB = 1536, 151_936
KEPT_SHARE = 1 / 20
"""Share of the plain formula's memory at its least, three float32 tensors of the size of the logits."""

Function = Callable[[Tensor, Tensor, Tensor], Tensor]


def plain_logprobs(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    return (hidden @ weight.T).float().log_softmax(-1).gather(1, ids[:, None]).sum()


def plain_both(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    logprobs = (hidden @ weight.T).float().log_softmax(-1)
    return logprobs.gather(1, ids[:, None]).sum() - (logprobs.exp() * logprobs).sum()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--warmup", type=int, default=0)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--what", choices=["log-probability", "both"], default="both")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()

    dtype = getattr(torch, args.dtype)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(args.tokens, HIDDEN, generator=generator).to(dtype).requires_grad_()
    weight = (3 * HIDDEN**-0.5 * torch.randn(VOCAB, HIDDEN, generator=generator)).to(dtype).requires_grad_()
    ids = torch.randint(0, VOCAB, (args.tokens,), generator=generator)
    kept_bytes = int(KEPT_SHARE * 3 * 4 * args.tokens * VOCAB)

    def ours_logprobs(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
        return head_logprobs(hidden, weight, ids, kept_bytes=kept_bytes).sum()

    def ours_both(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
        logprobs, entropies = head_logprobs_and_entropy(hidden, weight, ids, kept_bytes=kept_bytes)
        return logprobs.sum() + entropies.sum()

    functions: dict[str, Function] = {"ours": ours_logprobs, "plain": plain_logprobs}
    if args.what == "both":
        functions = {"ours": ours_both, "plain": plain_both}
    memory: dict[str, int] = {}
    losses: dict[str, float] = {}

    def step(side: str) -> Callable[[int], float]:
        def run() -> None:
            loss = functions[side](hidden, weight, ids)
            loss.backward()
            losses[side] = loss.item()

        def timed(_: int) -> float:
            hidden.grad = weight.grad = None
            start = time.perf_counter()
            memory[side] = peak_bytes(run)
            return time.perf_counter() - start

        return timed

    samples_s = interleave({side: step(side) for side in functions}, num_warmup=args.warmup, num_rounds=args.rounds)
    report(
        f"algos-head-{args.what}-{args.dtype}-{args.tokens}",
        settings={
            "tokens": args.tokens,
            "hidden": HIDDEN,
            "vocabulary": VOCAB,
            "dtype": args.dtype,
            "what": args.what,
            "kept_bytes": kept_bytes,
            "threads": torch.get_num_threads(),
        },
        samples_s=samples_s,
        comparisons=[compare(samples_s, "ours", "plain")],
        findings={
            "peak_bytes": memory,
            "memory_ratio": memory["ours"] / memory["plain"],
            "loss": losses,
            "target": "at most 1/8 of the memory and 1.15 of the time, at 8,192 tokens",
        },
        output=args.output,
    )
    print(
        f"memory {memory['ours'] / 1e6:.0f} of {memory['plain'] / 1e6:.0f} MB: {memory['ours'] / memory['plain']:.3f}"
    )


if __name__ == "__main__":
    main()
