"""`rlinf plan PROBLEM`: predicts and explains the best execution of a flow on a cluster; nothing runs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlinf.cli.output_folder import cannot_write
from rlinf.cli.table import text_width
from rlinf.config.overrides import parse_overrides
from rlinf.errors import UserError
from rlinf.jobs.spec import job_spec
from rlinf.planning.named import explain_named
from rlinf.run_folder.lock import check_folder

if TYPE_CHECKING:
    from rlinf.planning.memory import Load
    from rlinf_sched.explain import PlanExplanation

MODES = ("auto", "collocated", "disaggregated", "hybrid")


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
    from rlinf_sched.explain import explanation_text

    if args.output is not None:
        check_folder(args.output)
    explanation, config = explain_named(
        args.problem,
        parse_overrides(args.overrides),
        gpu=args.gpu,
        env_step_s=args.env_step_s,
        mode=args.mode,
        num_draws=args.draws,
        what_if=args.what_if,
    )
    loads: Sequence[Load] = ()
    if config is not None:
        loads = job_spec(config).loads(config, explanation.plan, explanation.problem.cluster)
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
