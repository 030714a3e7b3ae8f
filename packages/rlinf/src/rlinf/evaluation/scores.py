"""Computes scores from samples: avg@k, pass@k and maj@k of each benchmark with their errors, and notes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rlinf.errors import UserError
from rlinf.evaluation.benchmarks import Benchmark
from rlinf_algos import Estimate, avg_at_k, maj_at_k, mean_over_problems, pass_at_k

RIGHT, WRONG, UNPARSEABLE = "right", "wrong", "unparseable"
DISCARDED = "discarded"
"""Of an episode that ended by what the policy cannot have caused; no score counts it."""


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
    causes: dict[str, int] = field(default_factory=dict)
    """Why episodes ended otherwise than by their own decision -> number of episodes."""
    mean_turns: float | None = None
    """None: completions."""

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
            **({} if self.mean_turns is None else {"causes": self.causes, "mean_turns": self.mean_turns}),
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
    counted = [[row for row in samples if row["outcome"] != DISCARDED] for samples in by_problem.values()]
    scored = [_problem_scores(samples, k, num_samples) for samples in counted if samples]
    if not scored:
        raise UserError(f"{benchmark.title}: all episodes were discarded", hint="samples.jsonl has their causes")
    names = dict.fromkeys(name for one in scored for name in one)
    of_problems = {
        name: torch.tensor([one[name] for one in scored if name in one], dtype=torch.float64) for name in names
    }
    turns = [row["num_turns"] for row in rows if "num_turns" in row]
    return BenchmarkScores(
        benchmark=benchmark,
        num_samples=num_samples,
        estimates={name: mean_over_problems(scores) for name, scores in of_problems.items()},
        outcomes=dict(Counter(row["outcome"] for row in rows).most_common()),
        num_truncated=sum(row["truncated"] for row in rows),
        mean_completion_tokens=sum(row["num_completion_tokens"] for row in rows) / len(rows),
        causes=dict(Counter(row["cause"] for row in rows if row.get("cause")).most_common()),
        mean_turns=sum(turns) / len(turns) if turns else None,
    )


def _problem_scores(samples: Sequence[Mapping[str, Any]], k: Sequence[int], num_samples: int) -> dict[str, float]:
    """The scores of a problem from its samples that count; without those of more samples than there are."""
    is_right = [row["outcome"] == RIGHT for row in samples]
    num_right, votes = torch.tensor([sum(is_right)]), ([row["answer"] for row in samples], is_right)
    sizes = [size for size in k if size <= len(samples)]
    return {
        f"avg@{num_samples}": float(avg_at_k(torch.tensor([is_right]))[0]),
        **{f"pass@{size}": float(pass_at_k(num_right, len(samples), size)[0]) for size in sizes},
        **{f"maj@{size}": float(maj_at_k(*votes, size)) for size in sizes},
    }


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
                *_episode_cells(one, num_rows),
            )
        )
    if all(one.mean_turns is not None for one in scores):
        table[0] = (*table[0], "turns", "causes")
    return table


def _episode_cells(scores: BenchmarkScores, num_rows: int) -> tuple[str, ...]:
    """Mean number of turns, and the causes of the episodes that had one."""
    if scores.mean_turns is None:
        return ()
    causes = ", ".join(f"{cause} {count / num_rows:.1%}" for cause, count in scores.causes.items())
    return f"{scores.mean_turns:.1f}", causes or "-"


def show(estimate: Estimate) -> str:
    """Formats a score as `12.3 ± 1.1 %`, or with its interval if the standard error is 0: one problem, or no
    variation."""
    if estimate.standard_error > 0:
        return f"{100 * estimate.value:.1f} ± {100 * estimate.standard_error:.1f} %"
    return f"{100 * estimate.value:.1f} ({100 * estimate.low:.1f} to {100 * estimate.high:.1f}) %"
