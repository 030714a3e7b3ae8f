"""The part of docs/performance.md about the mathematics: tables of what pytest-benchmark wrote."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.sched.report import Measured

LOSSES, LOGPROBS = "algos-losses", "algos-logprobs"


def sections(results: Path) -> Iterator[str]:
    """Lines of the page."""
    for name, lines in ((LOSSES, _losses), (LOGPROBS, _logprobs)):
        path = results / f"{name}.json"
        if path.exists():
            yield from lines(Measured(path))
    yield from _heads([json.loads(path.read_text()) for path in sorted(results.glob("algos-head-*.json"))])


def _losses(measured: Measured) -> Iterator[str]:
    cases = measured.cases["losses"]
    first = cases[0]
    threads = f"{first['threads']} thread{'s' * (first['threads'] > 1)}"
    yield (
        f"\nTime of advantages and losses of {first['tokens']:,} tokens, forward and backward, as a share of the same "
        f"passes of a model of {first['model_parameters'] / 1e6:.1f}M parameters, {first['model_s']:.0f} s, both in "
        f"processor time on {threads}. Target: {first['target']:.0%} ({measured.origin}).\n"
    )
    yield "| loss | time | share |\n|---|---|---|"
    for case in cases:
        yield f"| {case['case']} | {case['processor_s'] * 1e3:.0f} ms | {case['share']:.3%} |"
    yield ""


def _logprobs(measured: Measured) -> Iterator[str]:
    cases = measured.cases["logprobs"]
    first = cases[0]
    yield (
        f"\nLog-probabilities and entropies of {first['rows']} tokens over a vocabulary of {first['vocabulary']:,}, "
        "forward and backward, over the plain formula in the same run; memory in addition to the logits. Target: "
        f"{first['target']} ({measured.origin}).\n"
    )
    yield "| function, dtype of the logits | time / plain | peak memory / plain | peak memory |\n|---|---|---|---|"
    for case in cases:
        name = case["case"].replace("-float32", ", float32").replace("-bfloat16", ", bfloat16")
        yield (
            f"| {name} | {case['time_ratio']:.2f} | {case['memory_ratio']:.2f} "
            f"| {case['peak_bytes']['ours'] / 1e6:.0f} MB |"
        )
    yield ""


def _heads(results: list[dict[str, Any]]) -> Iterator[str]:
    if not results:
        return
    first = results[0]["settings"]
    machine = results[0]["machine"]
    yield (
        f"\nLog-probabilities and entropies from hidden states of width {first['hidden']:,} and the head's weight, "
        f"vocabulary {first['vocabulary']:,}, forward and backward, over product and plain formula in the same run, on "
        f"{first['threads']} thread{'s' * (first['threads'] > 1)}; memory with the gradients of both. Target: "
        f"{results[0]['findings']['target']} ({machine['processor']}, {results[0]['date'][:10]}).\n"
    )
    yield "| function, dtype | tokens | time / plain | peak memory / plain | peak memory |\n|---|---|---|---|---|"
    for result in sorted(results, key=lambda one: (one["settings"]["tokens"], one["benchmark"])):
        settings, findings = result["settings"], result["findings"]
        yield (
            f"| {settings['what']}, {settings['dtype']} | {settings['tokens']:,} "
            f"| {result['comparisons'][0]['ratio_of_medians']:.2f} | {findings['memory_ratio']:.3f} "
            f"| {findings['peak_bytes']['ours'] / 1e6:,.0f} of {findings['peak_bytes']['plain'] / 1e6:,.0f} MB |"
        )
    yield ""
