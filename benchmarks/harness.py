"""What every comparison here shares: two or more sides measured step by step in one run, medians and ratios, one JSON.

A busy machine is busy for all sides when they take turns (A B A B ...), so what counts is the ratio. Two are given: of
the medians, and the median of the ratios within a round, which a drift of the machine's load does not move.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlinf.run_folder.manifest import describe_machine, git_state, installed_packages, timestamp
from rlinf_workers import Span

RESULTS_FOLDER = Path(__file__).parent / "results"
PACKAGES = ("torch", "transformers", "numpy", "msgspec", "mani_skill", "ray", "rlinf", "rlinf-workers", "rlinf-comm")
"""Packages whose versions are written into a result."""

Step = Callable[[int], float]
"""Does round i of one side and returns the seconds that it took."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """How long one side takes in terms of another.

    Example: seconds 3, 6, 4 over 2, 3, 4: ratio_of_medians = 4 / 3, median_of_ratios = 1.5
    """

    numerator: str
    denominator: str
    ratio_of_medians: float
    median_of_ratios: float
    """Median over the rounds of the ratio in each round."""


def interleave(sides: Mapping[str, Step], *, num_warmup: int, num_rounds: int) -> dict[str, list[float]]:
    """Runs the sides in turn, round by round; prints a line each.

    Args:
        sides: name -> step; called with 0, 1, ... (warm-up included), so that every side gets the same input.
        num_warmup: rounds that do not count.

    Returns: seconds by side, `num_rounds` each.
    """
    samples_s: dict[str, list[float]] = {name: [] for name in sides}
    for round_index in range(num_warmup + num_rounds):
        spent_s = {name: step(round_index) for name, step in sides.items()}
        if round_index >= num_warmup:
            for name, seconds in spent_s.items():
                samples_s[name].append(seconds)
        label = "warm-up" if round_index < num_warmup else f"round {round_index - num_warmup + 1}/{num_rounds}"
        print(label, " ".join(f"{name} {seconds:.4f} s" for name, seconds in spent_s.items()), flush=True)
    return samples_s


def compare(samples_s: Mapping[str, Sequence[float]], numerator: str, denominator: str) -> Comparison:
    """Seconds of `numerator` over seconds of `denominator`."""
    above, below = samples_s[numerator], samples_s[denominator]
    return Comparison(
        numerator=numerator,
        denominator=denominator,
        ratio_of_medians=statistics.median(above) / statistics.median(below),
        median_of_ratios=statistics.median(a / b for a, b in zip(above, below, strict=True)),
    )


def cpu_seconds(process_ids: Iterable[int]) -> float:
    """Time that all threads of these processes have spent on a core so far, to the nanosecond (Linux).

    On a machine that does other work too it says more than the wall clock, of which a side with more processes gets
    more.
    """
    total_ns = 0
    for process_id in process_ids:
        for thread in Path(f"/proc/{process_id}/task").iterdir():
            total_ns += int((thread / "schedstat").read_text().split()[0])
    return total_ns / 1e9


def mean_seconds(spans: Iterable[Span], num_runs: int) -> dict[str, float]:
    """Seconds in a run by `category: name, worker`, the longest first; spans of the same worker may overlap."""
    totals: dict[str, float] = defaultdict(float)
    for span in spans:
        totals[f"{span.category}: {span.name}, {span.worker}"] += span.duration_s / num_runs
    return dict(sorted(totals.items(), key=lambda pair: -pair[1]))


def report(
    name: str,
    *,
    settings: Mapping[str, Any],
    samples_s: Mapping[str, Sequence[float]],
    comparisons: Sequence[Comparison],
    findings: Mapping[str, Any],
    output: Path | None = None,
) -> Path:
    """Prints medians and ratios and writes them, with all samples, machine, versions and commit.

    Args:
        findings: whatever else was seen, JSON values.
        output: results/<name>.json beside this file by default.
    """
    medians_s = {side: statistics.median(samples) for side, samples in samples_s.items()}
    for side, seconds in medians_s.items():
        print(f"{side:<28} median {seconds:.4f} s  (min {min(samples_s[side]):.4f}, max {max(samples_s[side]):.4f})")
    for c in comparisons:
        print(
            f"{c.numerator} / {c.denominator}: {c.ratio_of_medians:.3f} of medians, "
            f"{c.median_of_ratios:.3f} median over rounds"
        )
    content = {
        "benchmark": name,
        "date": timestamp(),
        "machine": describe_machine() | {"load_average_1_min": os.getloadavg()[0]},
        "python": platform.python_version(),
        "packages": installed_versions(),
        "git": git_state(Path(__file__).resolve()),
        "settings": dict(settings),
        "medians_s": medians_s,
        "comparisons": [asdict(comparison) for comparison in comparisons],
        "findings": dict(findings),
        "samples_s": {side: list(samples) for side, samples in samples_s.items()},
    }
    path = output or RESULTS_FOLDER / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    print(f"written to {path}")
    return path


def installed_versions() -> dict[str, str]:
    """Package -> version, for those of PACKAGES that are installed."""
    packages = installed_packages()
    return {package: packages[package] for package in PACKAGES if package in packages}
