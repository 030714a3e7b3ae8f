"""`rlinf eval NAME[=FILE]... --model MODEL`: evaluates a model on benchmarks."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlinf.address_space import check_address_space
from rlinf.cli import eval_compare, eval_suite
from rlinf.cli.output_folder import new_folder, resumable_evaluation
from rlinf.cli.table import aligned
from rlinf.config.catalog import SUFFIXES
from rlinf.config.downloads import with_downloads
from rlinf.config.evaluation import EvalConfig
from rlinf.config.load import load_eval, load_eval_for_resume
from rlinf.config.overrides import Override, parse_overrides, refuse_misspelt_options
from rlinf.console.eval_progress import EvalProgress
from rlinf.errors import UserError
from rlinf.run_folder.lock import check_empty
from rlinf.tasks.published import published_set

OPTIONS = ("--suite", "--compare", "--protocol", "--force", "--output", "--resume", "--traceback", "--help")

DESCRIPTION = """Evaluates a model on benchmark problems, on all devices, and reports avg@k, pass@k and maj@k with
standard errors over problems; result.json also has 95 % intervals. Known benchmarks: gsm8k, aime24, aime25, math500,
gpqa_diamond, amc23, minerva_math, mmlu_stem; without =FILE they come from the Hugging Face Hub. Other names need a file
and --benchmarks.NAME.reward. Files are JSON lines, CSV, parquet, folders, or names of data sets on the Hub. With
--suite, evaluates a robot policy in environments that differ from training, and reports success by variant, with its
interval, compared with seen. With --compare, evaluates two robot policies on the same starts and tests their
difference. A robot policy is a run's folder, a checkpoint, or a recipe with a published checkpoint in
policy.options.folder; rlinf play scores a single one."""

EPILOG = """--model MODEL is required: a Hugging Face model (its folder, or its name on the Hub), a run's folder (its
newest checkpoint) or a checkpoint. A run's model gets the prompts of its training. Settings, with their defaults:
--k 1 (several: 1,8), --num_samples (the largest k), --temperature 0.6, --top_p 0.95, --top_k 0, --min_p 0, --stop,
--max_new_tokens 2048, --max_prompt_tokens, --long_prompts stop|keep_end|drop,
--on_bad_row stop|skip, --prompt_format auto|plain|chat, --system_prompt, --seed 0, --dtype float32,
--cluster.num_devices auto. A YAML file holds the same keys. docs/evaluation.md explains them.
With --suite: --only vision,execution (axes and variants), --suite.num_episodes 50, --suite.num_films 2, and the
settings of rlinf play; docs/playing.md explains them.
With --compare: --compare.num_episodes 100, --compare.first_seed, and the settings of rlinf play, which hold for both,
or with --a.KEY and --b.KEY for one; docs/evaluation-of-robots.md explains it."""


def add_parser(subparsers: Any) -> None:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "eval",
        help="evaluate a model on benchmarks (avg@k, pass@k, maj@k), or a robot policy out of distribution",
        usage="rlinf eval NAME[=FILE]... --model MODEL [--SETTING VALUE ...] [--output FOLDER] [--resume]\n"
        "       rlinf eval --suite SUITE RUN [--only AXES] [--SETTING VALUE ...] [--output FOLDER] [--resume]\n"
        "       rlinf eval --compare A B [--SETTING VALUE ...] [--output FOLDER] [--force] [--resume]",
        description=DESCRIPTION,
        epilog=EPILOG,
    )
    parser.add_argument(
        "benchmarks",
        nargs="*",
        metavar="NAME[=FILE]",
        help="a benchmark and its data; or one YAML file with settings",
    )
    parser.add_argument(
        "--suite",
        metavar="SUITE",
        help="suite for a robot policy: metaworld-ood, maniskill-ood, libero-ood, or a custom YAML file",
    )
    parser.add_argument(
        "--compare",
        nargs=2,
        metavar=("A", "B"),
        help="compare two robot policies on the same starts: runs, checkpoints, recipes with a published checkpoint, "
        "or folders that rlinf play wrote",
    )
    parser.add_argument(
        "--protocol",
        metavar="NAME",
        help="with --compare: evaluate LIBERO as openvla, openpi, lerobot or simplevla publish it",
    )
    parser.add_argument("--force", action="store_true", help="compare although the protocols of A and B differ")
    parser.add_argument("--output", type=Path, help="the evaluation's folder (default: runs/eval-<model>-<time>)")
    parser.add_argument("--resume", action="store_true", help="continue the evaluation in --output")
    parser.set_defaults(run=run, takes_overrides=True)


def run(args: argparse.Namespace) -> int:
    if args.resume and args.output is None:
        raise UserError("--resume needs --output FOLDER, the folder of the evaluation to go on with")
    if eval_compare.is_meant(args):
        return eval_compare.run(args)
    if args.force or args.protocol is not None:
        raise UserError(f"{'--force' if args.force else '--protocol'} is for --compare")
    if eval_suite.is_meant(args):
        return eval_suite.run(args)
    refuse_misspelt_options(args.overrides, OPTIONS, set(EvalConfig.model_fields), "rlinf eval")
    settings, benchmarks = _arguments(args.benchmarks)
    overrides = [*benchmarks, *parse_overrides(args.overrides)]
    if args.resume:
        if settings is not None:
            raise UserError(f"{settings}: a resumed evaluation has its settings already", hint="leave the file out")
        config = load_eval_for_resume(args.output, overrides)
    else:
        if settings is None and not benchmarks and not any(one.key[0] == "benchmarks" for one in overrides):
            raise UserError(
                "give at least one benchmark, NAME=FILE, or a YAML file with settings",
                hint="for example: rlinf eval gsm8k=gsm8k_test.jsonl --model FOLDER",
            )
        config = load_eval(settings, overrides)
    path = args.output or new_folder(f"eval-{config.model.name}")
    if not args.resume:
        check_empty(path)
    return _evaluate(config, path, resume=args.resume, command=["rlinf", *args.arguments])


def _evaluate(config: EvalConfig, path: Path, *, resume: bool, command: list[str]) -> int:
    check_address_space()
    from rlinf.jobs.checks import check_eval_references

    config = with_downloads(config)
    check_eval_references(config)
    progress = EvalProgress()
    with progress.doing("loading torch, then checking the model, the data and the devices"):
        from rlinf import evaluation  # imports torch
        from rlinf.evaluation.scores import score_table

        prepared = evaluation.prepare(config)
    with resumable_evaluation(path):
        scores = prepared.run(path, resume=resume, command=command, progress=progress)
    print(f"\n{aligned(score_table(scores))}\nresult: {path / 'result.json'}\nsamples: {path / 'samples.jsonl'}")
    return 0


def _arguments(arguments: Sequence[str]) -> tuple[Path | None, list[Override]]:
    """Returns the optional settings file and the benchmarks."""
    settings: Path | None = None
    overrides = []
    for argument in arguments:
        name, equals, file = argument.partition("=")
        if not equals and argument.endswith(SUFFIXES) and settings is None:
            settings = Path(argument)
        elif not equals and (published := published_set(argument)) is not None:
            overrides.append(Override(key=("benchmarks", published.name, "file"), text=published.source))
        elif not equals or not file or not re.fullmatch(r"[\w-]+", name):
            setting = f"a setting is --{name} {file}; " if "." in name and file else ""
            raise UserError(
                f"{argument!r} is no benchmark",
                hint=f"{setting}a benchmark is NAME=FILE, for example gsm8k=gsm8k_test.jsonl; "
                "one YAML file with settings may stand beside",
            )
        elif any(one.key[1] == name for one in overrides):
            raise UserError(
                f"the benchmark {name!r} is given twice", hint="a benchmark has one file; give the other another name"
            )
        else:
            overrides.append(Override(key=("benchmarks", name, "file"), text=file))
    return settings, overrides
