"""`rlinf plan PROBLEM`: predicts and explains the best execution of a flow on a cluster; nothing runs."""

from __future__ import annotations

import argparse
import difflib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlinf.cli.output_folder import cannot_write
from rlinf.cli.table import text_width
from rlinf.config.catalog import SUFFIXES, read_recipe, shipped_recipes
from rlinf.config.load import load_config
from rlinf.config.overrides import Override, parse_overrides
from rlinf.config.yaml_source import parse_file
from rlinf.console.live_line import LiveLine
from rlinf.errors import UserError
from rlinf.jobs.spec import job_spec

if TYPE_CHECKING:
    from rlinf.config.common import JobConfig
    from rlinf.planning.memory import Load
    from rlinf_sched import Problem
    from rlinf_sched.explain import PlanExplanation

MODES = ("auto", "collocated", "disaggregated", "hybrid")
PROBLEM_KEYS = ("flow", "profiles", "num_items")
"""Keys that only problem files have, not recipes."""


def add_parser(subparsers: Any) -> None:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "plan",
        help="predict and explain the best execution of a flow on a cluster",
        description="Plans a flow, predicts a step's time and memory, and explains both. Needs no GPU; nothing runs.",
        epilog="A problem file holds a flow, its profiles and a cluster: docs/problem-file.md, or --schema. "
        "A recipe needs --model.path, a robot's --policy.options.folder (a folder or a public name), "
        "--cluster.num_devices and --gpu; no data is read.",
    )
    parser.add_argument(
        "problem",
        nargs="?",
        help="a problem file (.json, .yaml), a shipped workload, or a recipe as in rlinf train",
    )
    parser.add_argument("--gpu", help="GPU that a recipe is planned for (default: H100)")
    parser.add_argument(
        "--env-step-s",
        type=float,
        metavar="SECONDS",
        help="for a robot's recipe: seconds per step of one environment on a core, including cameras "
        "(default: published figures of the simulator)",
    )
    parser.add_argument("--mode", choices=MODES, default="auto", help="plan this mode only (default: auto, the best)")
    parser.add_argument(
        "--draws",
        type=int,
        default=0,
        metavar="N",
        help="judge plans by the mean of N steps with drawn item costs; takes about N times as long "
        "(default: one step with typical costs)",
    )
    parser.add_argument("--what-if", action="store_true", help="also plan changed problems: more devices, longer items")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FOLDER",
        help="write plan.html, plan.json, explanation.json and trace.json there",
    )
    parser.add_argument("--json", action="store_true", help="print the explanation as JSON")
    parser.add_argument("--schema", action="store_true", help="print the JSON schema of problem files")
    parser.set_defaults(run=run, takes_overrides=True)


def run(args: argparse.Namespace) -> int:
    if args.schema:
        from rlinf_sched import problem_json_schema

        print(json.dumps(problem_json_schema(), indent=2))
        return 0
    if args.problem is None:
        raise UserError(
            "give a problem file or a recipe", hint="see rlinf plan --help; rlinf config list names recipes"
        )
    from rlinf_sched import SchedError
    from rlinf_sched.explain import explain_problem, explanation_text

    try:
        problem, config = _problem(args.problem, args.overrides, args.gpu, args.env_step_s)
        modes = None if args.mode == "auto" else (args.mode,)
        now = ["planning"]
        with LiveLine().doing(lambda: now[-1]):
            explanation = explain_problem(
                problem, modes=modes, num_draws=args.draws, asks_what_if=args.what_if, on_progress=now.append
            )
    except SchedError as error:
        raise UserError(str(error)) from error
    loads: Sequence[Load] = ()
    if config is not None:
        spec = job_spec(config)
        notes = (*config.notes, *spec.plan_notes(config, env_step_s=args.env_step_s), *explanation.notes)
        explanation = replace(explanation, notes=notes)
        loads = spec.loads(config, explanation.plan, explanation.problem.cluster)
    page = None if args.output is None else _write(explanation, loads, args.output)
    if args.json:
        print(explanation.to_json(), end="")
        return 0
    print(explanation_text(explanation, width=text_width()), end="")
    if loads:
        from rlinf.planning.memory import memory_text

        print(f"\n{memory_text(loads)}")
    print(f"\npage: {page}" if page else "\nfor the page with the timeline, add --output FOLDER")
    return 0


def _problem(
    name: str, overrides: list[str], gpu: str | None, env_step_s: float | None
) -> tuple[Problem, JobConfig | None]:
    """Returns the problem, and the config if it comes from a recipe."""
    from rlinf_sched import read_problem
    from rlinf_sched.derive import WORKLOADS, workload

    if name in WORKLOADS or _is_problem_file(Path(name)):
        if overrides:
            raise UserError(
                f"{overrides[0]}: only a recipe takes overrides", hint="see rlinf plan --help for its options"
            )
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
    from rlinf.planning.problems import problem_of_recipe

    parsed = parse_overrides(overrides)
    config = load_config(name, [*_unread_data(name, parsed), *parsed])
    check_names(config)
    return problem_of_recipe(config, gpu=gpu or "H100", env_step_s=env_step_s), config


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


def _write(explanation: PlanExplanation, loads: Sequence[Load], folder: Path) -> Path:
    from rlinf.plan_page import render
    from rlinf.run_folder.rows import write_file
    from rlinf_sched.explain import trace_json

    files = {
        "plan.json": explanation.plan.to_json(),
        "explanation.json": explanation.to_json(),
        "trace.json": trace_json(explanation.spans, explanation.plan, explanation.problem.flow),
        "plan.html": render(explanation, loads),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            write_file(folder / name, text)
    except OSError as error:
        raise cannot_write(folder, error) from error
    return folder / "plan.html"
