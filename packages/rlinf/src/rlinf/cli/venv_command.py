"""`rlinf venv create | list | check | remove`: manages venvs for roles."""

from __future__ import annotations

import argparse
from typing import Any

from rlinf.cli.finding_lines import print_findings
from rlinf.cli.main import OLD_NAMES
from rlinf.console.live_line import LiveLine
from rlinf.venvs import folder
from rlinf.venvs.catalog import KINDS


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "venv",
        aliases=[OLD_NAMES["venv"]],
        help="manage venvs for roles with conflicting packages",
        description="Creates and manages the venvs that a config names: venvs: {rollout: sglang}. "
        "They are in ~/.local/share/rlinf/venvs, or in $RLINF_VENVS.",
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    create = actions.add_parser("create", help="create a venv from a requirement list of rlinf")
    create.add_argument("name", help=", ".join(f"{kind.name} ({kind.purpose})" for kind in KINDS.values()))
    create.add_argument("--cpu", action="store_true", help="for CPU slots: without CUDA packages")
    create.add_argument("--python", metavar="P", help="its interpreter, a path or a command")
    create.set_defaults(run=run_create)
    actions.add_parser("list", help="list the existing venvs").set_defaults(run=run_list)
    check = actions.add_parser("check", help="check one venv, or all; exits with 1 if there is a problem")
    check.add_argument("name", nargs="?", help="default: all")
    check.set_defaults(run=run_check)
    remove = actions.add_parser("remove", help="delete a venv")
    remove.add_argument("name")
    remove.set_defaults(run=run_remove)


def run_create(args: argparse.Namespace) -> int:
    from rlinf.venvs.create import create

    venv = create(args.name, cpu=args.cpu, python=args.python, console=LiveLine())
    print(f"name it in a config: venvs: {{ROLE: {venv.path.name}}}")
    return 0


def run_list(args: argparse.Namespace) -> int:
    venvs = list(folder.venvs())
    for one in venvs:
        state = f"Python {one.stamp.python}" if one.stamp.is_complete else "its making was cut short"
        print(f"{one.title:<16}  {state:<24}  {one.path}")
    if not venvs:
        print(f"none in {folder.venvs_folder()}; rlinf venv create {'|'.join(sorted(KINDS))} [--cpu] makes one")
    return 0


def run_check(args: argparse.Namespace) -> int:
    from rlinf.venvs.examine import examine

    chosen = [folder.find(args.name)] if args.name else list(folder.venvs())
    if not chosen:
        return run_list(args)
    num_problems = 0
    for venv in chosen:
        print(f"{venv.title}  {venv.path}")
        num_problems += sum(finding.verdict == "problem" for finding in print_findings(examine(venv)))
    print(f"\n{num_problems or 'no'} problem{'' if num_problems == 1 else 's'} found")
    return 1 if num_problems else 0


def run_remove(args: argparse.Namespace) -> int:
    print(f"removed {folder.remove(args.name)}")
    return 0
