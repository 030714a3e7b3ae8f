"""How often the math reward agrees with known verdicts, and how many it checks in a second:
`python -m benchmarks.algos.math_rewards --data FOLDER`.

Both in one run, batch by batch in turn: the reward with its pool, and plain calls of math-verify in one process, with
its own limits of time, as a loop of its README would do. Every disagreement with a label goes into the result. Checks
a CPU second (all processes counted) say what a busy machine hides.
"""

from __future__ import annotations

import argparse
import logging
import os
import time
from collections import Counter
from pathlib import Path

from benchmarks.algos.math_cases import Case, draw_cases
from benchmarks.harness import compare, report

from rlinf_algos.rewards.mathematics import MathReward

NUM_BATCHES = 2
"""About as many completions in each as one training step hands over at once."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with gsm8k_test, aime24, amc23, minerva_math")
    parser.add_argument("--num-cases", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=1, help="times that every batch is checked by both sides")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    cases = draw_cases(arguments.data, arguments.num_cases, arguments.seed)
    size = -(-len(cases) // NUM_BATCHES)
    batches = [cases[start : start + size] for start in range(0, len(cases), size)]
    logging.disable(logging.CRITICAL)
    samples_s: dict[str, list[float]] = {"reward": [], "math-verify": []}
    outcomes: dict[str, list[str]] = {"reward": [], "math-verify": []}
    with MathReward(num_processes=arguments.processes) as reward:
        reward(r"\sqrt{2}", r"\sqrt{3}")  # starts the pool
        _plain(cases[0])
        cpu_s, plain_cpu_s = -_cpu_s(reward), 0.0
        for round_index in range(arguments.rounds):
            for batch in batches:
                start = time.perf_counter()
                scored = reward.score_batch([c.completion for c in batch], [c.reference for c in batch])
                samples_s["reward"].append(time.perf_counter() - start)
                begun_s = time.process_time()
                start = time.perf_counter()
                plain = [_plain(case) for case in batch]
                samples_s["math-verify"].append(time.perf_counter() - start)
                plain_cpu_s += time.process_time() - begun_s
                if round_index == 0:
                    outcomes["reward"] += [result.outcome for result in scored]
                    outcomes["math-verify"] += plain
        cpu_s += _cpu_s(reward) - plain_cpu_s
    agreement = {
        side: sum((o == "right") == c.is_right for o, c in zip(found, cases, strict=True)) / len(cases)
        for side, found in outcomes.items()
    }
    per_second = {side: size / (sum(s) / len(s)) for side, s in samples_s.items()}
    per_cpu_second = {
        "reward": len(cases) * arguments.rounds / cpu_s,
        "math-verify": len(cases) * arguments.rounds / plain_cpu_s,
    }
    print(f"checks a CPU second: {per_cpu_second}")
    for side in samples_s:
        print(f"{side:<12} agreement {agreement[side]:.4f}, {per_second[side]:.0f} checks/s, {Counter(outcomes[side])}")
    disagreements = [
        {"reference": c.reference[-120:], "completion": c.completion, "label": c.is_right, "outcome": o,
         "source": c.source, "notation": c.notation}
        for o, c in zip(outcomes["reward"], cases, strict=True)
        if (o == "right") != c.is_right
    ]  # fmt: skip
    report(
        "math-rewards",
        settings={
            "num_cases": len(cases),
            "processes": arguments.processes,
            "seed": arguments.seed,
            "right": sum(c.is_right for c in cases),
        },
        samples_s=samples_s,
        comparisons=[compare(samples_s, "math-verify", "reward")],
        findings={
            "agreement": agreement,
            "checks_per_second": per_second,
            "checks_per_cpu_second": per_cpu_second,
            "outcomes": {side: dict(Counter(found)) for side, found in outcomes.items()},
            "disagreements": disagreements,
        },
        output=arguments.output,
    )


def _cpu_s(reward: MathReward) -> float:
    """CPU time so far of this process, the pool's keepers and their checking processes, dead ones included."""
    ticks = 0
    for keeper in reward._pool.process_ids:
        children = Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()
        for pid, fields in ((keeper, (13, 14, 15, 16)), *((child, (13, 14)) for child in children)):
            stat = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
            ticks += sum(int(stat[field - 2]) for field in fields)
    return ticks / os.sysconf("SC_CLK_TCK") + time.process_time()


def _plain(case: Case) -> str:
    from math_verify import parse, verify

    try:
        return "right" if verify(parse(case.reference), parse(case.completion)) else "wrong"
    except Exception as e:  # noqa: BLE001 - the peer's crash is a finding, not an end
        return f"{type(e).__name__}"


if __name__ == "__main__":
    main()
