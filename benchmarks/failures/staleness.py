"""What random runs whose steps overlap have kept of their promises: `python -m benchmarks.failures.staleness LINES`.

LINES is what integration_tests/staleness_runs.py has printed, a row of JSON for each run: it does the runs, checks
their records and replays some. This writes the sums.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import report

Row = Mapping[str, Any]


def main() -> None:
    rows: list[Row] = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
    replayed = [row for row in rows if "replayed" in row]
    findings = {
        "runs": counts(rows),
        "steps": sum(row["num_steps"] for row in rows),
        "tokens_by_age": sums(rows, "tokens_by_age"),
        "groups_by_lateness": sums(rows, "groups_by_lateness"),
        "replayed": counts(replayed) | {"equal_weights": sum(row["replayed"] == "equal" for row in replayed)},
        "with_mistakes": [row for row in rows if row["mistakes"]],
    }
    report("staleness", settings={"recipe": "sort-grpo"}, samples_s={}, comparisons=[], findings=findings)


def counts(rows: Sequence[Row]) -> dict[str, Any]:
    """How many runs there are of which kind."""
    return {
        "number": len(rows),
        "by_max_staleness": by(rows, lambda row: row["max_staleness"]),
        "by_sampler": by(rows, lambda row: row["sampler"]),
        "by_rollout_ranks": by(rows, lambda row: row["num_ranks"]),
        "by_disturbance": by(rows, disturbance),
    }


def disturbance(row: Row) -> str:
    """What happened to a run, without ranks."""
    return re.sub(r"/\d+$", "", row.get("happened", "unknown"))


def by(rows: Sequence[Row], key: Callable[[Row], Any]) -> dict[str, int]:
    return {str(name): number for name, number in sorted(Counter(map(key, rows)).items())}


def sums(rows: Sequence[Row], key: str) -> dict[str, dict[str, int]]:
    """Kind of run -> age or lateness -> number."""
    totals: dict[str, Counter[str]] = defaultdict(Counter)
    for row in rows:
        totals[f"{row['sampler']}, max_staleness {row['max_staleness']}"].update(row.get(key, {}))
    return {kind: dict(sorted(total.items())) for kind, total in sorted(totals.items())}


if __name__ == "__main__":
    main()
