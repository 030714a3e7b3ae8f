"""How far each constant of the derived profiles moves the paper's cases: benchmarks/results/calibration.json, and the
tables of docs/calibration.md on standard output.

    python -m benchmarks.sched.calibration

Nothing is measured: step times are simulated ones of the planner's plans.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rlinf_sched import Problem, ProfileError, best_plan
from rlinf_sched.derive import GPUS, WORKLOADS, embodied, find_gpu, grpo, workload, workloads

RESULT = Path(__file__).parents[1] / "results" / "calibration.json"
PAPER = {
    "grpo-qwen2.5-7b-64": "collocated",
    "ppo-qwen2.5-7b-32": "apart",
    "grpo-qwen3-30b-a3b-128": "collocated",
    "grpo-qwen3-30b-a3b-32": "apart",
    "libero-openvla-oft-8": "collocated",
    "libero-openvla-oft-16": "collocated",
    "libero-openvla-oft-32": "collocated",
    "maniskill-openvla-8": "apart",
    "maniskill-openvla-16": "apart",
    "maniskill-openvla-32": "apart",
}
"""Which placement arXiv:2509.15965 found faster. Apart: hybrid or disaggregated."""
PUBLISHED = (
    ("Qwen3-30B-A3B", 32, 3203, 4096, 192.0),
    ("Qwen3-30B-A3B", 32, 3154, 4096, 225.0),
)
"""Model, H100s, mean and longest sequence, seconds of an on-policy step of 2,048 sequences with four optimizer steps
(NeMo RL, performance summaries of 0.6 and 0.4); 64 prompts with 32 answers each."""
STEPS = (1.25, 1.5, 2.0, 4.0, 8.0)
"""Factors tried for a flip, up and down, before it is bisected."""


@dataclass(frozen=True, kw_only=True)
class Constant:
    """A number of `rlinf_sched.derive`, and how far it could be off."""

    name: str
    low: float
    high: float
    """Plausible values; the page says why."""
    owner: str = ""
    """The record whose field of that name it is; empty: a name of the modules."""


CONSTANTS = (
    Constant(name="DENSE_UTILISATION", low=0.30, high=0.50),
    Constant(name="MOE_UTILISATION", low=0.165, high=0.40),
    Constant(name="NODE_LINK_SHARE", low=0.475, high=1.0),
    Constant(name="NETWORK_SHARE", low=0.43, high=1.0),
    Constant(name="GRADIENT_BYTES_PER_PARAMETER", low=2, high=4),
    Constant(name="num_minibatches", owner="Reasoning", low=1, high=8),
    Constant(name="sigma", owner="Lengths", low=0.5, high=1.0),
    Constant(name="MEAN_SHARE_OF_LIMIT", low=0.15, high=0.4),
    Constant(name="prompt_tokens", owner="Lengths", low=100, high=512),
    Constant(name="BANDWIDTH_UTILISATION", low=0.5, high=0.85),
    Constant(name="EAGER_LAYER_S", low=0.3e-3, high=1.2e-3),
    Constant(name="GRAPH_LAYER_S", low=10e-6, high=40e-6),
    Constant(name="ALL_REDUCE_S", low=5e-6, high=20e-6),
    Constant(name="ENGINE_MEMORY_SHARE", low=0.5, high=0.9),
    Constant(name="max_running_sequences", owner="Reasoning", low=64, high=512),
    Constant(name="LAYER_ACTIVATION_BYTES", low=17, high=68),
    Constant(name="RULE_REWARD_S", low=0.2e-3, high=0.1),
    Constant(name="SYNC_BYTES_PER_S", low=4.7e9, high=61e9),
    Constant(name="substep_s", owner="simulator", low=3.5e-3, high=8.8e-3),
    Constant(name="env_render_s", owner="simulator", low=0.5e-3, high=2e-3),
    Constant(name="step_s", owner="simulator", low=7e-3, high=28e-3),
    Constant(name="draw_s", owner="simulator", low=6e-3, high=75e-3),
    Constant(name="BUSY_CORE_LOSS", low=0.0, high=0.5),
    Constant(name="cores_per_device", owner="simulator", low=8, high=24),
    Constant(name="node_cores", owner="Gpu", low=64, high=192),
)


def main() -> None:
    base = {name: (problem := workload(name), outcome(problem)) for name in WORKLOADS}
    content: dict[str, Any] = {
        "base": {name: result for name, (_, result) in base.items()},
        "published": [compared(*row) for row in PUBLISHED],
        "constants": [moved(constant, base) for constant in CONSTANTS],
        "flips": {},
    }
    RESULT.write_text(json.dumps(content, indent=2) + "\n")
    for name, (problem, result) in base.items():
        if not agrees(name, result):
            content["flips"][name] = flips(name, problem)
            RESULT.write_text(json.dumps(content, indent=2) + "\n")
    print("\n".join(table(content)))


def table(content: dict[str, Any]) -> Iterator[str]:
    """Rows of docs/calibration.md: a constant, its range, the largest changes of a step, and rankings that change."""
    for one in content["constants"]:
        cells, changed = [], []
        for end in ("low", "high"):
            cases = {name: min(modes.values()) for name, modes in one["cases"][end].items()}
            moves = {name: seconds / min(content["base"][name].values()) - 1 for name, seconds in cases.items()}
            most = max(moves, key=lambda name: abs(moves[name]), default="")
            cells.append(f"{moves[most]:+.1%} ({most})" if most else "0")
            for name, modes in one["cases"][end].items():
                if agrees(name, modes) != agrees(name, content["base"][name]):
                    changed.append(f"{name} at {one[end]:g}")
        row = (
            f"`{one['name']}`",
            f"{one['value']:.3g}",
            f"{one['low']:g} to {one['high']:g}",
            *cells,
            ", ".join(changed),
        )
        yield f"| {' | '.join(row)} |"


def outcome(problem: Problem) -> dict[str, float]:
    """Seconds of a step of the best plan of each mode, and of the best with simulator and policy apart."""
    plan = best_plan(problem)
    assert plan.prediction is not None
    steps_s = {plan.mode: plan.prediction.step_s} | {other.mode: other.step_s for other in plan.prediction.runners_up}
    return {mode: round(seconds, 3) for mode, seconds in sorted(steps_s.items())}


def agrees(name: str, modes: dict[str, float]) -> bool:
    others = min(modes.get("hybrid", math.inf), modes.get("disaggregated", math.inf))
    return (modes["collocated"] < others) == (PAPER[name] == "collocated")


def compared(model: str, num_devices: int, mean: int, longest: int, published_s: float) -> dict[str, Any]:
    problem = grpo(
        model=model,
        num_devices=num_devices,
        num_prompts=64,
        group_size=32,
        sequence_tokens=longest,
        mean_tokens=mean - 256,
    )
    plan = best_plan(problem, modes=["collocated"])
    assert plan.prediction is not None
    return {"model": model, "devices": num_devices, "published_s": published_s, "derived_s": plan.prediction.step_s}


@contextmanager
def with_value(constant: Constant, value: float) -> Iterator[Callable[[str], Problem]]:
    """Gives the workloads with that value in place of the constant's."""
    if constant.owner == "simulator":
        yield lambda name: workload_with_simulator(name, constant.name, value)
        return
    if constant.owner == "Gpu":
        sheet = find_gpu("H100")
        GPUS["H100"] = replace(sheet, **{constant.name: int(value)})
        try:
            yield workload
        finally:
            GPUS["H100"] = sheet
        return
    modules = [module for key, module in sys.modules.items() if key.startswith("rlinf_sched.derive")]
    if constant.owner:
        owner = getattr(workloads, constant.owner)
        whole = isinstance(owner.__dataclass_fields__[constant.name].default, int)
        changed = {constant.name: int(value) if whole else value}
        old = {workloads: owner}
        name, new = constant.owner, partial(_made_with, owner, changed)
    else:
        name, new = constant.name, value
        old = {module: vars(module)[name] for module in modules if name in vars(module)}
    try:
        for module in old:
            setattr(module, name, new)
        yield workload
    finally:
        for module, before in old.items():
            setattr(module, name, before)


def _made_with(owner: Callable[..., Any], changed: dict[str, Any], **arguments: Any) -> Any:
    return owner(**{**arguments, **changed})


def workload_with_simulator(name: str, field: str, value: float) -> Problem:
    """The workload, with another value in its simulator's record where it has such a field."""
    job = workloads.MANISKILL if "maniskill" in name else workloads.LIBERO_OFT if "libero" in name else None
    if job is None or not hasattr(job.simulator, field):
        return workload(name)
    same_type = type(getattr(job.simulator, field))(value)
    changed = replace(job, simulator=replace(job.simulator, **{field: same_type}))
    model = "OpenVLA-7B" if "maniskill" in name else "OpenVLA-OFT"
    return embodied(changed, model=model, num_devices=int(name.rpartition("-")[2]))


def present(constant: Constant) -> float:
    if constant.owner == "simulator":
        jobs = (workloads.MANISKILL, workloads.LIBERO_OFT)
        return next(getattr(job.simulator, constant.name) for job in jobs if hasattr(job.simulator, constant.name))
    if constant.owner == "Gpu":
        return getattr(find_gpu("H100"), constant.name)
    if constant.owner:
        return getattr(workloads, constant.owner).__dataclass_fields__[constant.name].default
    return next(
        vars(module)[constant.name]
        for key, module in sys.modules.items()
        if key.startswith("rlinf_sched.derive.") and constant.name in vars(module)
    )


def moved(constant: Constant, base: dict[str, tuple[Problem, dict[str, float]]]) -> dict[str, Any]:
    """What the lowest and the highest plausible value make of each workload that they change."""
    ends: dict[str, Any] = {}
    for end, value in (("low", constant.low), ("high", constant.high)):
        with with_value(constant, value) as make:
            problems = {name: make(name) for name in base}
            ends[end] = {name: outcome(new) for name, new in problems.items() if new != base[name][0]}
    print(constant.name, file=sys.stderr, flush=True)
    return {"name": constant.name, "owner": constant.owner, "value": present(constant), "low": constant.low,
            "high": constant.high, "cases": ends}  # fmt: skip


def flips(name: str, problem: Problem) -> dict[str, float]:
    """Constant -> a value nearest to its own at which the paper's placement is the faster one; none beyond 8 times."""
    flip_values = {}
    for constant in CONSTANTS:
        value = present(constant)

        def agrees_at(factor: float, constant: Constant = constant, value: float = value) -> bool | None:
            with with_value(constant, factor * value) as make:
                try:
                    new = make(name)
                except ProfileError:  # a value that cannot be
                    return None
                return None if new == problem else agrees(name, outcome(new))

        for factors in (STEPS, [1 / factor for factor in STEPS]):
            inside = 1.0
            for factor in factors:
                is_share = constant.high <= 1 and constant.low > 0.05
                answer = None if is_share and factor * value > 1 else agrees_at(factor)
                if answer is None:
                    break
                if answer:
                    flip_values[constant.name] = value * _bisected(agrees_at, inside, factor)
                    break
                inside = factor
        print(name, constant.name, flip_values.get(constant.name), file=sys.stderr, flush=True)
    return flip_values


def _bisected(agrees_at: Callable[[float], bool | None], inside: float, outside: float) -> float:
    for _ in range(4):
        middle = math.sqrt(inside * outside)
        inside, outside = (inside, middle) if agrees_at(middle) else (middle, outside)
    return outside


if __name__ == "__main__":
    main()
