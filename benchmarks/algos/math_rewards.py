"""How often the math reward and math-verify are right about answers of public benchmarks, a row a phrasing, and how
many they check in a second of CPU time: `python -m benchmarks.algos.math_rewards --data FOLDER`.

Both in one run, batch by batch in turn: the reward with its pool, and plain calls of math-verify in one process, with
its own limits of time, as a loop of its README would do. Three collections: answers of public benchmarks in the
phrasings of `math_phrasings`, wrong answers with one thing changed (which math-verify is not asked about), and the hard
pairs of the tests, written by hand. The seconds of all processes count, those of the pool's start apart.
"""

from __future__ import annotations

import argparse
import logging
import os
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from benchmarks.algos.math_phrasings import PHRASINGS, Case, draw_cases, hard_cases, mutated_cases
from benchmarks.harness import compare, report

from rlinf_algos.rewards import MathReward

BATCH = 500
"""About as many completions as one training step hands over at once."""
SIDES = ("reward", "math-verify")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with the files that math_phrasings names")
    parser.add_argument("--num-gsm8k", type=int, default=200, help="rows of GSM8K; all of the other files are used")
    parser.add_argument("--share", type=float, default=1.0, help="of the cases, drawn by chance")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    collections = {
        "real": draw_cases(arguments.data, num_gsm8k=arguments.num_gsm8k, seed=arguments.seed, share=arguments.share),
        "mutated": mutated_cases(arguments.data, seed=arguments.seed),
        "hard": hard_cases(),
    }
    samples_s: dict[str, list[float]] = {side: [] for side in SIDES}
    outcomes: dict[str, dict[str, list[str]]] = {}
    with MathReward(num_processes=arguments.processes) as reward:
        start_s = _start(reward, arguments.processes)
        cpu_s: dict[str, float] = dict.fromkeys(SIDES, 0.0)
        for name, cases in collections.items():
            sides = SIDES[:1] if name == "mutated" else SIDES
            outcomes[name] = _check(reward, cases, sides, samples_s, cpu_s if name == "real" else None)
    findings = {
        "real": _by_phrasing(collections["real"], outcomes["real"]),
        "real, no plain integer": _rates(
            [c for c in collections["real"] if c.is_hard], *_hard_only(collections, outcomes)
        ),
        "mutated": _rates(collections["mutated"], outcomes["mutated"]["reward"]),
        "hard": _rates(collections["hard"], *outcomes["hard"].values()),
        "checks_per_cpu_second": {side: len(collections["real"]) / cpu_s[side] for side in SIDES},
        "cpu_seconds_of_the_pool's_start": start_s,
        "outcomes": {n: {side: dict(Counter(of_side)) for side, of_side in o.items()} for n, o in outcomes.items()},
        "disagreements": [
            {**asdict(case), "reference": case.reference[-120:], "outcome": outcome, "collection": name}
            for name, cases in collections.items()
            for case, outcome in zip(cases, outcomes[name]["reward"], strict=True)
            if (outcome == "right") != case.is_right
        ],
    }
    _show(findings)
    report(
        "math-rewards",
        settings={
            "num_cases": {name: len(cases) for name, cases in collections.items()},
            "sources": dict(Counter(case.source for case in collections["real"])),
            "references": len({case.reference for case in collections["real"]}),
            "processes": arguments.processes,
            "seed": arguments.seed,
        },
        samples_s=samples_s,
        comparisons=[compare(samples_s, "math-verify", "reward")],
        findings=findings,
        output=arguments.output,
    )


def _check(
    reward: MathReward,
    cases: list[Case],
    sides: tuple[str, ...],
    samples_s: dict[str, list[float]],
    cpu_s: dict[str, float] | None,
) -> dict[str, list[str]]:
    """The outcomes of the sides, in the order of the cases."""
    outcomes: dict[str, list[str]] = {side: [] for side in sides}
    for first in range(0, len(cases), BATCH):
        batch = cases[first : first + BATCH]
        begun_s, clock = _cpu_s(reward), time.perf_counter()
        results = reward.score_batch([c.completion for c in batch], [c.reference for c in batch])
        outcomes["reward"] += [result.outcome for result in results]
        middle_s, middle = _cpu_s(reward), time.perf_counter()
        if "math-verify" in sides:
            outcomes["math-verify"] += [_plain(case) for case in batch]
        end_s, end = _cpu_s(reward), time.perf_counter()
        if cpu_s is not None:
            samples_s["reward"].append(middle - clock)
            samples_s["math-verify"].append(end - middle)
            cpu_s["reward"] += middle_s - begun_s
            cpu_s["math-verify"] += end_s - middle_s
    return outcomes


def _start(reward: MathReward, num_processes: int) -> float:
    """Starts every process of the pool; the CPU seconds that this takes."""
    begun_s = time.process_time()
    plain_pair(r"\frac{a}{b}", r"\boxed{a/b}")
    own_s = time.process_time() - begun_s
    answers = [rf"\boxed{{\sqrt{{{i}}}}}" for i in range(2, 2 + 16 * num_processes)]
    reward.score_batch(answers, [r"\sqrt{99}"] * len(answers))
    return _cpu_s(reward) - begun_s - own_s


def _rates(cases: list[Case], *outcomes: list[str]) -> dict[str, dict[str, float | int]]:
    """The share of right answers that are found right, and of wrong ones that are."""
    rates: dict[str, dict[str, float | int]] = {}
    for side, side_outcomes in zip(SIDES, outcomes, strict=False):
        right = [outcome == "right" for outcome, case in zip(side_outcomes, cases, strict=True) if case.is_right]
        wrong = [outcome == "right" for outcome, case in zip(side_outcomes, cases, strict=True) if not case.is_right]
        rates[side] = {"num_right": len(right), "num_wrong": len(wrong)}
        rates[side] |= {"found_right": sum(right) / len(right)} if right else {}
        rates[side] |= {"false_positives": sum(wrong) / len(wrong)} if wrong else {}
        agreed = sum(right) + len(wrong) - sum(wrong)
        rates[side]["agreement"] = agreed / len(cases)
    return rates


def _by_phrasing(cases: list[Case], outcomes: dict[str, list[str]]) -> dict[str, dict[str, dict[str, float | int]]]:
    rows = {}
    for phrasing in PHRASINGS:
        indices = [i for i, case in enumerate(cases) if case.phrasing == phrasing]
        rows[phrasing] = _rates([cases[i] for i in indices], *([outcomes[side][i] for i in indices] for side in SIDES))
    return rows


def _hard_only(collections: dict[str, list[Case]], outcomes: dict[str, dict[str, list[str]]]) -> list[list[str]]:
    indices = [i for i, case in enumerate(collections["real"]) if case.is_hard]
    return [[outcomes["real"][side][i] for i in indices] for side in SIDES]


def _show(findings: dict) -> None:
    rows = {
        **findings["real"],
        **{name: findings[name] for name in ("real, no plain integer", "mutated", "hard")},
    }
    for name, rates in rows.items():
        for side in rates:
            shares = {key: f"{100 * share:.2f} %" for key, share in rates[side].items() if not key.startswith("num")}
            print(f"{name:<24} {side:<12} {shares}")
    print(f"checks a CPU second: {findings['checks_per_cpu_second']}")


def _cpu_s(reward: MathReward) -> float:
    """CPU time so far of this process, the keepers and processes that check and that read, dead ones included."""
    ticks = 0
    for keeper in (*reward._pool.process_ids, *reward._reader.process_ids):
        children = Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()
        for pid, fields in ((keeper, (13, 14, 15, 16)), *((child, (13, 14)) for child in children)):
            stat = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
            ticks += sum(int(stat[field - 2]) for field in fields)
    return ticks / os.sysconf("SC_CLK_TCK") + time.process_time()


def _plain(case: Case) -> str:
    return plain_pair(case.reference, case.completion)


def plain_pair(reference: str, completion: str) -> str:
    from math_verify import parse, verify

    try:
        gold = parse(reference) if "\\boxed" in reference or "####" in reference else parse(f"${reference}$")
        return "right" if verify(gold or parse(reference), parse(completion)) else "wrong"
    except Exception as e:  # noqa: BLE001 - the peer's crash is a finding, not an end
        return f"{type(e).__name__}"


if __name__ == "__main__":
    main()
