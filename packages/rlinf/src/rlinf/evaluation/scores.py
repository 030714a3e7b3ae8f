"""Computes scores from samples: avg@k, pass@k and maj@k of each benchmark with their errors, and notes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rlinf.evaluation.benchmarks import Benchmark
from rlinf_algos import Estimate, avg_at_k, maj_at_k, mean_over_problems, pass_at_k

RIGHT, UNPARSEABLE = "right", "unparseable"


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchmarkScores:
    """Scores of one benchmark."""

    benchmark: Benchmark
    num_samples: int
    """Samples of each problem."""
    estimates: dict[str, Estimate]
    """avg@n of all samples, then pass@k and maj@k for each k."""
    outcomes: dict[str, int]
    """Outcome of the check -> number of samples; truncated ones are counted by their outcome, too."""
    num_truncated: int
    mean_completion_tokens: float

    def to_json(self) -> dict[str, Any]:
        """Returns the benchmark's part of result.json."""
        benchmark = self.benchmark
        return {
            "title": benchmark.title,
            "file": benchmark.file,
            "reward": benchmark.reward.rule,
            "num_problems": len(benchmark.problems),
            "num_samples_per_problem": self.num_samples,
            "num_bad_rows": benchmark.num_bad_rows,
            "num_long_prompts": benchmark.num_long_prompts,
            "scores": {
                name: {part: getattr(estimate, part) for part in ("value", "standard_error", "low", "high")}
                for name, estimate in self.estimates.items()
            },
            "outcomes": self.outcomes,
            "num_truncated": self.num_truncated,
            "mean_completion_tokens": self.mean_completion_tokens,
            "notes": list(benchmark.notes),
        }


def score_benchmark(
    benchmark: Benchmark, rows: Sequence[Mapping[str, Any]], *, k: Sequence[int], num_samples: int
) -> BenchmarkScores:
    """Computes the scores of a benchmark from its rows of samples.jsonl."""
    by_problem: dict[int, list[Mapping[str, Any]]] = {problem.number: [] for problem in benchmark.problems}
    for row in rows:
        by_problem[row["problem"]].append(row)
    assert all(len(samples) == num_samples for samples in by_problem.values()), "every problem has all its samples"
    is_right = torch.tensor([[row["outcome"] == RIGHT for row in samples] for samples in by_problem.values()])
    num_right = is_right.sum(-1)
    votes = [
        ([row["answer"] for row in samples], [row["outcome"] == RIGHT for row in samples])
        for samples in by_problem.values()
    ]
    of_problems = {f"avg@{num_samples}": avg_at_k(is_right)}
    of_problems |= {f"pass@{size}": pass_at_k(num_right, num_samples, size) for size in k}
    for size in k:
        of_problems[f"maj@{size}"] = torch.tensor([maj_at_k(*vote, size) for vote in votes], dtype=torch.float64)
    return BenchmarkScores(
        benchmark=benchmark,
        num_samples=num_samples,
        estimates={name: mean_over_problems(scores) for name, scores in of_problems.items()},
        outcomes=dict(Counter(row["outcome"] for row in rows).most_common()),
        num_truncated=sum(row["truncated"] for row in rows),
        mean_completion_tokens=sum(row["num_completion_tokens"] for row in rows) / len(rows),
    )


def score_table(scores: Sequence[BenchmarkScores]) -> list[tuple[str, ...]]:
    """Returns rows of cells, the header first; a score is `12.3 ± 1.1 %` with its standard error.

    pass@1 and maj@1 are left out: both are avg@k.
    """
    names = [name for name in scores[0].estimates if name not in ("pass@1", "maj@1")]
    table: list[tuple[str, ...]] = [("benchmark", "problems", *names, "truncated", "no answer", "unchecked", "tokens")]
    for one in scores:
        num_problems = len(one.benchmark.problems)
        num_rows = num_problems * one.num_samples
        checked = sum(one.outcomes.get(outcome, 0) for outcome in (RIGHT, "wrong", UNPARSEABLE))
        table.append(
            (
                one.benchmark.title,
                str(num_problems),
                *(show(one.estimates[name]) for name in names),
                f"{one.num_truncated / num_rows:.1%}",
                f"{one.outcomes.get(UNPARSEABLE, 0) / num_rows:.1%}",
                str(num_rows - checked),
                f"{one.mean_completion_tokens:.0f}",
            )
        )
    return table


def show(estimate: Estimate) -> str:
    """Formats a score as `12.3 ± 1.1 %`, or with its interval if the standard error is 0: one problem, or no
    variation."""
    if estimate.standard_error > 0:
        return f"{100 * estimate.value:.1f} ± {100 * estimate.standard_error:.1f} %"
    return f"{100 * estimate.value:.1f} ({100 * estimate.low:.1f} to {100 * estimate.high:.1f}) %"
