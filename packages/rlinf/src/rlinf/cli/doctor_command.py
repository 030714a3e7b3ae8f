"""`rlinf doctor`: checks what a machine or a cluster has, what works, and how to fix the rest."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlinf import doctor
from rlinf.cli.finding_lines import print_findings
from rlinf.config.load import load_config
from rlinf.errors import UserError


def add_parser(subparsers: Any) -> None:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "doctor",
        help="check this machine, or a cluster",
        description="Checks this machine, or every node of a cluster, for everything that runs need. Exits with 1 if "
        "there is a problem.",
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument("--output", type=Path, default=Path("runs"), metavar="FOLDER", help="folder for runs")
    parser.add_argument("--recipe", metavar="RECIPE", help="check the custom environments of this recipe, too")
    parser.add_argument(
        "--cluster",
        nargs="?",
        const="",
        metavar="ADDRESS",
        help="check the nodes and the network of the cluster at ADDRESS, or of this machine's cluster",
    )
    parser.add_argument(
        "--launcher",
        metavar="NAME",
        help="with --cluster: its launcher, a name or an import path as in cluster.launcher",
    )
    parser.add_argument(
        "--links", type=Path, metavar="FILE", help="with --cluster: write the measured network into this profile"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.cluster is not None:
        from rlinf.cli import doctor_cluster

        return doctor_cluster.run(args.cluster, launcher=args.launcher, as_json=args.json, links=args.links)
    if args.links is not None:
        raise UserError("--links is of --cluster: the network between nodes is what is measured")
    if args.launcher is not None:
        raise UserError("--launcher is of --cluster: it says whose cluster is looked at")
    looks = doctor.examine(args.output, None if args.recipe is None else load_config(args.recipe))
    findings = list(looks) if args.json else print_findings(looks)
    num_problems = sum(finding.verdict == "problem" for finding in findings)
    if args.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1, ensure_ascii=False))
    else:
        print(f"\n{num_problems or 'no'} problem{'' if num_problems == 1 else 's'} found")
    return 1 if num_problems else 0
