"""Tokens a second of the engine `huggingface` with rows that are refilled: benchmarks/results/refill.json.

    python -m benchmarks.throughput.refill

A Qwen2 of about a million parameters with random weights; prompts of 16 tokens, 8 completions each, whose lengths are
log-normal with mean 64 and cut at 512 (planted.py). Three ways take turns, one thread each:

    refilled        rows are refilled, as many at once as a batch has
    batches         whole batches of so many completions
    one batch       all completions in one batch, what the engine does where nobody sets a limit

All draw the same noise. The tokens of each completion are compared, and the log-probabilities. Beside seconds there is
CPU time, for machines that do other work too.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from benchmarks.harness import compare, interleave, report
from benchmarks.throughput.planted import SIGMA, PlantedEngine

from rlinf_workers.engines import Completions, SamplingSettings
from rlinf_workers.models import ModelSettings
from rlinf_workers.roles import Prompt
from rlinf_workers.testing.architectures import write_tokenizer

SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
REFILLED, BATCHES, ONE_BATCH = "refilled", "batches", "one batch"
CPU_TIME = "cpu time"
"""Of this process: what a busy machine takes away does not count."""
PROMPT_TOKENS = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--mean-tokens", type=float, default=64.0)
    parser.add_argument("--new-tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    sampling = SamplingSettings(group_size=options.group_size, max_new_tokens=options.new_tokens)
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(2, SHAPE["vocab_size"], (options.prompts, PROMPT_TOKENS), generator=generator)
    prompts = [Prompt(index=i, token_ids=row, reference_answer="") for i, row in enumerate(rows)]
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder))
        engines = {
            REFILLED: make(model, options, refill=True, max_batch_sequences=options.rows),
            BATCHES: make(model, options, max_batch_sequences=options.rows),
            ONE_BATCH: make(model, options, max_batch_sequences=options.prompts * options.group_size),
        }
        completions: dict[str, list[Completions]] = {}

        cpu_s: dict[str, list[float]] = {f"{name}, {CPU_TIME}": [] for name in engines}

        def step(name: str, index: int) -> float:
            began, began_cpu = time.perf_counter(), time.process_time()
            completions[name] = sample(engines[name], prompts, sampling, index)
            cpu_s[f"{name}, {CPU_TIME}"].append(time.process_time() - began_cpu)
            return time.perf_counter() - began

        for engine in engines.values():
            sample(engine, prompts[:1], sampling, 0)
        sides = {name: (lambda index, name=name: step(name, index)) for name in engines}
        samples_s = interleave(sides, num_warmup=0, num_rounds=options.rounds) | cpu_s
    tokens = sum(int(part.loss_mask.sum()) for part in completions[REFILLED])
    medians = {name: sorted(seconds)[len(seconds) // 2] for name, seconds in samples_s.items()}
    findings = {
        "tokens_of_the_last_round": tokens,
        "tokens_per_s": {name: tokens / seconds for name, seconds in medians.items()},
        "against_batches": {name: against(completions[REFILLED], completions[name]) for name in (BATCHES, ONE_BATCH)},
    }
    for name, finding in findings.items():
        print(name, finding)
    report(
        "refill",
        settings={
            "prompts": options.prompts,
            "prompt_tokens": PROMPT_TOKENS,
            "group_size": options.group_size,
            "rows": options.rows,
            "mean_tokens": options.mean_tokens,
            "sigma": SIGMA,
            "max_new_tokens": options.new_tokens,
            "threads": 1,
            "shape": SHAPE,
        },
        samples_s=samples_s,
        comparisons=[
            compare(samples_s, f"{other}{kind}", f"{REFILLED}{kind}")
            for kind in ("", f", {CPU_TIME}")
            for other in (BATCHES, ONE_BATCH)
        ],
        findings=findings,
        output=options.output,
    )


def write_model(folder: Path, **changes: Any) -> ModelSettings:
    """A model of `SHAPE` with a tokenizer of single characters.

    Args:
        changes: of its config.
    """
    from transformers import Qwen2Config

    write_tokenizer(folder)
    Qwen2Config(**SHAPE | changes).save_pretrained(folder)
    return ModelSettings(folder=str(folder), has_weights=False)


def make(model: ModelSettings, options: argparse.Namespace, **more: Any) -> PlantedEngine:
    return PlantedEngine(
        model, torch.device("cpu"), mean_tokens=options.mean_tokens, max_prompt_tokens=PROMPT_TOKENS, **more
    )


def sample(
    engine: PlantedEngine, prompts: Sequence[Prompt], sampling: SamplingSettings, step: int
) -> list[Completions]:
    """All completions, asked for as the rollout stage does."""
    waiting, completions, missing = list(prompts), [], 0
    while waiting or missing:
        while waiting and (room := engine.free_capacity(sampling.group_size)) > 0:
            engine.submit(waiting[:room], sampling, seed=0, step=step)
            missing += sampling.group_size * len(waiting[:room])
            waiting = waiting[room:]
        parts = engine.finished()
        missing -= sum(len(part.members) for part in parts)
        completions += parts
    return completions


def against(actual: Sequence[Completions], expected: Sequence[Completions]) -> dict[str, float]:
    """How many completions have other tokens, and the largest difference of a log-probability of those that do not."""
    ours, theirs = by_completion(actual), by_completion(expected)
    assert ours.keys() == theirs.keys(), "each completion came back once"
    same = [key for key in ours if torch.equal(ours[key][0], theirs[key][0])]
    worst = max(float((ours[key][1] - theirs[key][1]).abs().max()) for key in same)
    return {"completions": len(ours), "with_other_tokens": len(ours) - len(same), "largest_difference_nats": worst}


def by_completion(parts: Sequence[Completions]) -> dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]]:
    return {
        (part.index, member): (part.token_ids[i][part.loss_mask[i].bool()], part.logprobs[i][part.loss_mask[i].bool()])
        for part in parts
        for i, member in enumerate(part.members)
    }


if __name__ == "__main__":
    main()
