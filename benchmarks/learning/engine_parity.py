"""Greedy tokens of an engine against transformers, before and after 20 syncs: benchmarks/results/ENGINE-parity.json.

    python -m benchmarks.learning.engine_parity sglang        with the Python of the venv that has the engine
    python -m benchmarks.learning.engine_parity vllm --models "Qwen2, TP1"

Tiny models with random weights in float32 on CPU slots. Each sync changes every number of the model; afterwards the
completions of 8 prompts, at most 16 tokens each, are compared with `generate` of transformers, and the
log-probability of each token with a plain forward. Target: the same tokens, log-probabilities within 1e-5.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from benchmarks.harness import report

sys.path.append(str(Path(__file__).parents[2] / "engine_tests"))

from rlinf_workers.roles import Prompt
from trained_engine import LOGPROB_BOUND, SIZES, MismatchVerdict, TrainedEngine  # pyright: ignore[reportMissingImports]

MODELS = {
    "Qwen2, TP1": ("qwen2", 1),
    "Qwen3, TP1": ("qwen3", 1),
    "Qwen3-MoE, TP1": ("qwen3_moe", 1),
    "Qwen2, TP2": ("qwen2", 2),
}
NUM_SYNCS = 20
MAX_NEW_TOKENS = 16
PROMPT_LENGTHS = (3, 8, 5, 1, 2, 7, 4, 6)
VOCABULARY = 64
"""Of which one token ends a completion, so that most of them are long."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("engine", choices=sorted(SIZES))
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS), metavar="NAME")
    parser.add_argument("--output", type=Path, help="JSON to write instead of benchmarks/results/ENGINE-parity.json")
    options = parser.parse_args()
    findings = {}
    for name in options.models:
        architecture, tp = MODELS[name]
        with tempfile.TemporaryDirectory() as folder:
            findings[name] = agreements(options.engine, architecture, tp, Path(folder))
        print(name, findings[name], flush=True)
    settings = {
        "num_syncs": NUM_SYNCS,
        "bound": LOGPROB_BOUND,
        "prompt_lengths": PROMPT_LENGTHS,
        "max_new_tokens": MAX_NEW_TOKENS,
        "sizes": SIZES[options.engine] | {"vocab_size": VOCABULARY},
    }
    name = f"{options.engine}-parity"
    report(name, settings=settings, samples_s={}, comparisons=[], findings=findings, output=options.output)


def agreements(engine: str, architecture: str, tp: int, folder: Path) -> dict[str, Any]:
    """What came of one model: with the weights of its files, and after all syncs together."""
    trained = TrainedEngine(architecture, folder, tp=tp, engine=engine, vocab_size=VOCABULARY)
    before = compare(trained)
    after = []
    for _ in range(NUM_SYNCS):
        trained.serve()
        after.append(compare(trained))
    trained.close()
    return {
        "before": summary([before]),
        "after_syncs": summary(after),
        "num_syncs": len(after),
        "holds": all(one.holds for one in (before, *after)),
    }


def compare(trained: TrainedEngine) -> MismatchVerdict:
    """With other prompts for each version."""
    generator = torch.Generator().manual_seed(trained.version)
    ids = [torch.randint(2, VOCABULARY, (length,), generator=generator) for length in PROMPT_LENGTHS]
    prompts = [Prompt(index=i, token_ids=one, reference_answer="") for i, one in enumerate(ids)]
    return trained.compare_tokens(prompts, MAX_NEW_TOKENS)


def summary(agreements: list[MismatchVerdict]) -> dict[str, float]:
    return {
        "num_completions": len(PROMPT_LENGTHS) * len(agreements),
        "num_other_completions": sum(one.num_other for one in agreements),
        "num_tokens": sum(one.num_tokens for one in agreements),
        "worst_logprob_distance": max(one.worst_distance for one in agreements),
    }


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    main()
