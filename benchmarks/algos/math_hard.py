"""How often the math reward and math-verify agree with a person about hard pairs, a row a kind:
`python -m benchmarks.algos.math_hard`.

The pairs were written and judged by hand by people who had not seen the code (`hard_pairs.jsonl` of the tests), in
sets of 252. Each set was worked on after it had been scored once, so other pairs of these kinds are judged right less
often. Both read the same texts.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.algos.math_rewards import SIDES, plain_pair
from benchmarks.harness import report

from rlinf_algos.rewards import MathReward

SET = 252
PAIRS = Path(__file__).parents[2] / "packages/rlinf-algos/tests/data/hard_pairs.jsonl"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=Path, default=PAIRS)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    rows = [json.loads(line) for line in arguments.pairs.read_text(encoding="utf-8").splitlines()]
    with MathReward() as reward:
        results = reward.score_batch([row["completion"] for row in rows], [row["reference"] for row in rows])
    outcomes = {
        SIDES[0]: [result.outcome for result in results],
        SIDES[1]: [plain_pair(row["reference"], row["completion"]) for row in rows],
    }
    findings = {side: _rates(rows, outcomes[side]) for side in SIDES}
    for side, rates in findings.items():
        rates["sets"] = [_rates(rows[i : i + SET], outcomes[side][i : i + SET]) for i in range(0, len(rows), SET)]
        print(f"{side:<12} {rates}")
    report(
        "math-hard",
        settings={"num_pairs": len(rows), "num_right": sum(row["right"] for row in rows)},
        samples_s={},
        comparisons=[],
        findings=findings,
        output=arguments.output,
    )


def _rates(rows: list[dict], outcomes: list[str]) -> dict[str, Any]:
    """The share that is judged as the person did, of each kind and of all, and the errors of both sorts."""
    agreed, total = Counter(), Counter(row["kind"] for row in rows)
    refused = accepted = 0
    for row, outcome in zip(rows, outcomes, strict=True):
        agreed[row["kind"]] += (outcome == "right") == row["right"]
        refused += row["right"] and outcome != "right"
        accepted += not row["right"] and outcome == "right"
    return {
        "agreement_by_kind": {kind: agreed[kind] / total[kind] for kind in total},
        "agreement": sum(agreed.values()) / len(rows),
        "right_ones_refused": refused,
        "wrong_ones_accepted": accepted,
    }


if __name__ == "__main__":
    main()
