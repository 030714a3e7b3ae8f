"""The planning part of docs/performance.md: tables and a plot, from what pytest-benchmark wrote."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.targets import marked

PLANNER, SIMULATOR, ON_GPU = "sched-planner", "sched-simulator", "gpu-steps"


class Measured:
    """One JSON file; what each benchmark kept, by test."""

    def __init__(self, path: Path) -> None:
        content = json.loads(path.read_text())
        machine = content["machine_info"]
        self.origin = (
            f"{machine['cpu'].get('brand_raw', machine['processor'])}, {content['datetime'][:10]}, commit "
            f"{content['commit_info']['id'][:7]}, load {machine.get('load', ['?'])[0]}"
        )
        self.cases: dict[str, list[dict[str, Any]]] = {}
        for benchmark in content["benchmarks"]:
            test, _, case = benchmark["name"].removeprefix("test_").rstrip("]").partition("[")
            row = {"case": case, "seconds": benchmark["stats"]["median"], **benchmark["extra_info"]}
            self.cases.setdefault(test, []).append(row)


def sections(results: Path, images: Path) -> Iterator[str]:
    """Lines of the page; the plot is written beside."""
    for name, lines in ((PLANNER, _planning), (SIMULATOR, _simulation)):
        path = results / f"{name}.json"
        if path.exists():
            yield from lines(Measured(path), images)
    path = results / f"{ON_GPU}.json"
    if path.exists():
        yield from _on_gpu(json.loads(path.read_text()))


def _on_gpu(result: dict[str, Any]) -> Iterator[str]:
    yield (
        f"\nSteps of recipes with GSM8K's settings on one GPU ({result['settings']['device']}, {result['date'][:10]}), "
        "models of Qwen2.5's shapes with random weights: measured seconds / seconds predicted from a profile of four "
        "probe steps / seconds that `rlinf plan RECIPE --gpu` derives from the shape and the datasheet.\n"
    )
    yield "| model, prompts x answers x tokens | step | rollout | reference | actor |\n|---|---|---|---|---|"
    for name, row in result["findings"]["workloads"].items():
        profile, derived = (row["predicted"][source] for source in ("profile", "derived"))
        cells = [f"{row['step_s']:.2f} / {profile['step_s']:.2f} / {derived['step_s']:.2f}"]
        for stage in ("rollout", "reference", "actor"):
            times = [source["stages_s"].get(stage) for source in (row, profile, derived)]
            cells.append(" / ".join(f"{seconds:.2f}" for seconds in times if seconds is not None))
        yield f"| {name} | {' | '.join(cells)} |"
    yield ""


def _planning(measured: Measured, images: Path) -> Iterator[str]:
    by_devices = sorted(measured.cases["by_devices"], key=lambda case: case["devices"])
    by_stages = sorted(measured.cases["by_stages"], key=lambda case: case["stages"])
    yield (
        "\nPlanning time of a PPO graph, including search and simulation of the best plans; medians "
        f"({measured.origin}).\n"
    )
    yield from _table("devices", by_devices)
    yield ""
    yield from _table("stages", by_stages)
    yield from _predictions(measured.cases.get("against_simulator", []))
    _draw(by_devices, by_stages, images / "planning-time.svg")
    yield "\n![Planning time by devices and by stages](images/planning-time.svg)\n"


def _simulation(measured: Measured, images: Path) -> Iterator[str]:
    yield f"\nEvents that the simulator executes per second. Target: 1,000,000 ({measured.origin}).\n"
    yield "| case | events/s |\n|---|---|"
    for case in measured.cases["events"]:
        yield f"| {case['case']} | {case['events_per_s']:,} |"
    for case in measured.cases["events_of_simpy"]:
        yield f"| SimPy, without leases, batching and spans | {case['events_per_s']:,} |"
    yield ""


def _table(what: str, cases: list[dict[str, Any]]) -> Iterator[str]:
    fixed = {"devices": "stages", "stages": "devices"}[what]
    yield (
        f"| {what} ({cases[0][fixed]:,} {fixed}) | planning | first time | target | plan | simulated step "
        "| search's estimate |"
    )
    yield "|---|---|---|---|---|---|---|"
    for case in cases:
        target = _target(case) if "target_s" in case else ""
        yield (
            f"| {case[what]:,} | {case['median_s']:.2f} s | {case['first_s']:.2f} s | {target} | {case['mode']} "
            f"| {case['step_s']:.1f} s | {_error(case)} |"
        )


def _target(case: dict[str, Any]) -> str:
    return marked(f"{case['target_s']:g} s", meets=case["median_s"] <= case["target_s"])


def _error(case: dict[str, Any]) -> str:
    """Of the search's estimate, which it has of plans that it proposed only."""
    return "-" if case["estimate_s"] is None else f"{case['estimate_s'] / case['step_s'] - 1:+.1%}"


def _predictions(cases: list[dict[str, Any]]) -> Iterator[str]:
    if not cases:
        return
    yield (
        "\nPrediction from typical costs, compared with the mean of simulated steps with 20 seeds. Target: "
        "within 5 %.\n"
    )
    yield "| workload | plan | predicted step | mean (standard deviation) | prediction | search's estimate |"
    yield "|---|---|---|---|---|---|"
    for case in cases:
        yield (
            f"| {case['case']} | {case['mode']} | {case['step_s']:.1f} s "
            f"| {case['mean_s']:.1f} s ({case['deviation_s'] / case['mean_s']:.1%}) "
            f"| {case['step_s'] / case['mean_s'] - 1:+.1%} | {_error(case)} |"
        )


def _draw(by_devices: list[dict[str, Any]], by_stages: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "rlinf"  # the same file from the same numbers
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.5, 3.8), sharey=True)
    for axes, what, cases in ((left, "devices", by_devices), (right, "stages", by_stages)):
        axes.plot([case[what] for case in cases], [case["median_s"] for case in cases], marker="o", label="planning")
        targets = [case for case in cases if "target_s" in case]
        if targets:
            axes.plot([c[what] for c in targets], [c["target_s"] for c in targets], "v", color="gray", label="target")
            axes.legend(fontsize=8)
        axes.set(xlabel=what, yscale="log")
        axes.grid(alpha=0.3)
    left.set(xscale="log", ylabel="seconds")
    right.set_xticks([case["stages"] for case in by_stages])
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
