"""`rlinf data SOURCE...`: shows what a run would train on."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from rlinf.cli.data_tables import NO_MODEL
from rlinf.config.catalog import read_recipe
from rlinf.config.common import JobConfig
from rlinf.config.load import load_config
from rlinf.config.overrides import Override, parse_overrides
from rlinf.config.reasoning import ReasoningConfig
from rlinf.config.supervised import SupervisedConfig
from rlinf.errors import UserError

DEFAULT_RECIPE = "gsm8k-grpo"


def add_parser(subparsers: Any) -> None:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "data",
        help="show what a run would train on",
        description="Shows the rows of data files, or of data sets on the Hub, as a run would read them: columns, "
        "rendered prompts or examples, a histogram of lengths, and what is left out. Keys of a recipe apply: "
        "--model.path MODEL for its chat template and tokens, --task.columns.prompt NAME, --rollout.max_prompt_tokens "
        "N. With --recipe sft, dpo or reward-model the rows are examples, and the tokens with a loss are marked.",
        epilog="examples: rlinf data 'openai/gsm8k:main[train]' --model.path Qwen/Qwen2.5-0.5B-Instruct; "
        "rlinf data --recipe sft train.jsonl --model.path MODEL",
    )
    parser.add_argument("sources", nargs="+", metavar="SOURCE", help="file, folder, pattern or name on the Hub")
    parser.add_argument("--recipe", default=DEFAULT_RECIPE, help=f"whose keys are used (default: {DEFAULT_RECIPE})")
    parser.add_argument("--examples", type=int, default=5, metavar="N", help="rows to show (default: 5)")
    parser.set_defaults(run=run, takes_overrides=True)


def run(args: argparse.Namespace) -> int:
    config = _config(args.recipe, args.sources, parse_overrides(args.overrides))
    from rlinf.config.downloads import with_downloads

    config = with_downloads(config)
    if isinstance(config, SupervisedConfig):
        from rlinf.cli.data_examples import example_lines

        lines = example_lines(config, args.examples)
    else:
        from rlinf.cli.data_problems import problem_lines

        assert isinstance(config, ReasoningConfig)
        lines = problem_lines(config, args.examples)
    for line in lines:
        print(line)
    return 0


def _config(recipe: str, sources: Sequence[str], overrides: Sequence[Override]) -> JobConfig:
    """The recipe's config with the sources as its files."""
    task = read_recipe(recipe).values.get("task")
    if not isinstance(task, dict) or "train_files" not in task:
        raise UserError(
            f"--recipe {recipe}: it reads no data files", hint=f"use one that does, for example {DEFAULT_RECIPE} or sft"
        )
    files = "[" + ", ".join("'" + source.replace("'", "''") + "'" for source in sources) + "]"
    keys = ("train_files", "eval_files") if task.get("kind") == "files" else ("train_files",)
    placeholders = [Override(key=("task", key), text=files) for key in keys]
    if not any(override.key == ("model", "path") for override in overrides):
        placeholders.append(Override(key=("model", "path"), text=NO_MODEL))
    return load_config(recipe, [*placeholders, *overrides])
