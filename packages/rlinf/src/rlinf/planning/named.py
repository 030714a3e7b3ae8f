"""Plans what a name stands for: a recipe, a problem file or a workload that the planner knows."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rlinf.config.catalog import SUFFIXES, read_recipe, shipped_recipes
from rlinf.config.load import load_config
from rlinf.config.overrides import Override
from rlinf.config.yaml_source import parse_file
from rlinf.console.live_line import LiveLine
from rlinf.errors import UserError
from rlinf.jobs.spec import job_spec

if TYPE_CHECKING:
    from rlinf.config.common import JobConfig
    from rlinf_sched import Mode, Problem
    from rlinf_sched.explain import PlanExplanation

PROBLEM_KEYS = ("flow", "profiles", "num_items")
"""Keys that only problem files have, not recipes."""


def explain_named(
    name: str,
    overrides: Sequence[Override] = (),
    *,
    gpu: str | None = None,
    env_step_s: float | None = None,
    mode: Mode | Literal["auto"] = "auto",
    num_draws: int = 0,
    what_if: bool = False,
) -> tuple[PlanExplanation, JobConfig | None]:
    """Plans a recipe, a problem file or a workload, and explains the plan; the arguments are the options of `rlinf
    plan`.

    Returns: the explained plan, and the config of a recipe.
    Raises: UserError.
    """
    from rlinf_sched import SchedError
    from rlinf_sched.explain import explain_problem

    try:
        problem, config = _problem(name, overrides, gpu, env_step_s, mode)
        modes: tuple[Mode, ...] | None = None if mode == "auto" else (mode,)
        now = ["planning"]
        with LiveLine().doing(lambda: now[-1]):
            explain = partial(
                explain_problem, modes=modes, num_draws=num_draws, asks_what_if=what_if, on_progress=now.append
            )
            explanation = explain(problem)
            if config is not None:
                explanation = _beside_cuda(config, explanation, explain)
    except SchedError as error:
        raise UserError(str(error)) from error
    if config is not None:
        of_job = job_spec(config).plan_notes(config, problem.cluster, env_step_s=env_step_s)
        notes = (*config.notes, *of_job, *explanation.notes)
        explanation = replace(explanation, notes=notes)
    return explanation, config


def _beside_cuda(
    config: JobConfig, explanation: PlanExplanation, explain: Callable[[Problem], PlanExplanation]
) -> PlanExplanation:
    """The explained plan of a recipe; another one if it needs what CUDA takes of the GPUs in the plan's processes, as
    the check before a run counts it. Raises: SchedError if nothing fits beside that."""
    from rlinf.planning.memory import beside_cuda, cuda_bytes, device_place

    cluster = explanation.problem.cluster
    loads = job_spec(config).loads(config, explanation.plan, cluster)
    by_device = [[load for load in loads if index in load.devices] for index in range(len(cluster.devices))]
    places = [
        device_place(device.name, device.memory_bytes, own)
        for device, own in zip(cluster.devices, by_device, strict=True)
        if own
    ]
    if all(place.missing_bytes <= 0 for place in places):
        return explanation
    taken = max(map(cuda_bytes, by_device))
    beside = explain(replace(explanation.problem, cluster=beside_cuda(cluster, taken)))
    note = f"planned for what {taken / 2**30:.1f} GiB of CUDA's own memory leave of each GPU"
    return replace(beside, problem=replace(beside.problem, cluster=cluster), notes=(*beside.notes, note))


def _problem(
    name: str, overrides: Sequence[Override], gpu: str | None, env_step_s: float | None, mode: str
) -> tuple[Problem, JobConfig | None]:
    """Returns the problem, and the config if it comes from a recipe."""
    from rlinf_sched import read_problem
    from rlinf_sched.derive import WORKLOADS, workload

    if name in WORKLOADS or _is_problem_file(Path(name)):
        if overrides:
            key = ".".join(overrides[0].key)
            raise UserError(f"--{key}: only a recipe takes overrides", hint="see rlinf plan --help for its options")
        if gpu is not None:
            raise UserError(f"--gpu {gpu}: {name} says itself which GPUs it has", hint="--gpu is for recipes")
        if env_step_s is not None:
            raise UserError(f"--env-step-s {env_step_s}: {name} says itself what its stages take", hint="leave it out")
        return workload(name) if name in WORKLOADS else read_problem(name), None
    recipes = list(shipped_recipes())
    if name not in recipes and Path(name).suffix not in SUFFIXES:
        close = difflib.get_close_matches(name, [*WORKLOADS, *recipes], n=1, cutoff=0.5)
        raise UserError(
            f"{name!r} is no problem file, workload or recipe{f'; did you mean {close[0]}?' if close else ''}",
            hint=f"workloads: {', '.join(WORKLOADS)}\nrecipes: {', '.join(recipes)}",
        )
    from rlinf.jobs.checks import check_names
    from rlinf.planning.problems import problem_of_recipe, settled_for_plan

    of_mode = [] if mode == "auto" else [Override(key=("mode",), text=mode)]
    config = load_config(name, [*_unread_data(name, overrides), *overrides, *of_mode])
    check_names(config)
    gpu = gpu or "H100"
    config = settled_for_plan(config, gpu=gpu)
    return problem_of_recipe(config, gpu=gpu, env_step_s=env_step_s), config


def _unread_data(name: str, overrides: Sequence[Override]) -> list[Override]:
    """Returns placeholders for the data files that the user has to name; a plan does not read them."""
    task = read_recipe(name).values.get("task")
    if not isinstance(task, dict) or any(override.key == ("task", "kind") for override in overrides):
        return []
    unset = [key for key in ("train_files", "eval_files") if key in task and task[key] is None]
    return [Override(key=("task", key), text="[unread.jsonl]") for key in unset]


def _is_problem_file(path: Path) -> bool:
    """Returns whether a file is a problem file; YAML files are recognized by their keys. An unreadable file counts as a
    recipe, whose reader reports it."""
    if path.suffix == ".json":
        return True
    if path.suffix not in (".yaml", ".yml") or not path.is_file():
        return False
    try:
        values = parse_file(path.read_text(encoding="utf-8"), str(path)).values
    except UnicodeDecodeError:
        return False
    return any(key in values for key in PROBLEM_KEYS)
