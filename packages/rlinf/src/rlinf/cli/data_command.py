"""`rlinf data SOURCE...`: shows what a run would train on."""

from __future__ import annotations

import argparse
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from rlinf.cli.table import aligned, text_width
from rlinf.config.catalog import read_recipe
from rlinf.config.load import load_config
from rlinf.config.overrides import Override, parse_overrides
from rlinf.config.reasoning import ReasoningConfig
from rlinf.config.tasks import FilesTask
from rlinf.errors import UserError

DEFAULT_RECIPE = "gsm8k-grpo"
NO_MODEL = "."
"""Stands for the model where none is named; `model.path` may not be empty."""
MAX_CHARACTERS = 1200
"""Of a prompt on the screen."""
NUM_BARS, BAR_WIDTH = 8, 40


def add_parser(subparsers: Any) -> None:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "data",
        help="show what a run would train on",
        description="Shows the rows of data files, or of data sets on the Hub, as a run would read them: columns, "
        "rendered prompts, lengths, and what is left out. Keys of a recipe apply: --model.path MODEL for its chat "
        "template and tokens, --task.columns.prompt NAME, --rollout.max_prompt_tokens N.",
        epilog="example: rlinf data 'openai/gsm8k:main[train]' --model.path Qwen/Qwen2.5-0.5B-Instruct",
    )
    parser.add_argument("sources", nargs="+", metavar="SOURCE", help="file, folder, pattern or name on the Hub")
    parser.add_argument("--recipe", default=DEFAULT_RECIPE, help=f"whose keys are used (default: {DEFAULT_RECIPE})")
    parser.add_argument("--examples", type=int, default=5, metavar="N", help="prompts to show (default: 5)")
    parser.set_defaults(run=run, takes_overrides=True)


def run(args: argparse.Namespace) -> int:
    config = _config(args.recipe, args.sources, parse_overrides(args.overrides))
    from rlinf.config.downloads import with_downloads

    config = with_downloads(config)
    for line in _lines(config, args.examples):
        print(line)
    return 0


def _config(recipe: str, sources: Sequence[str], overrides: Sequence[Override]) -> ReasoningConfig:
    """The recipe's config with the sources as its files."""
    task = read_recipe(recipe).values.get("task")
    if not isinstance(task, dict) or task.get("kind") != "files":
        raise UserError(
            f"--recipe {recipe}: it reads no data files", hint=f"use one that does, for example {DEFAULT_RECIPE}"
        )
    files = "[" + ", ".join("'" + source.replace("'", "''") + "'" for source in sources) + "]"
    placeholders = [Override(key=("task", key), text=files) for key in ("train_files", "eval_files")]
    if not any(override.key == ("model", "path") for override in overrides):
        placeholders.append(Override(key=("model", "path"), text=NO_MODEL))
    return cast(ReasoningConfig, load_config(recipe, [*placeholders, *overrides]))


def _lines(config: ReasoningConfig, num_examples: int) -> Iterator[str]:
    from rlinf.tasks.files import column_reader
    from rlinf.tasks.prompts import template_of
    from rlinf.tasks.questions import load_problems

    task = config.task
    assert isinstance(task, FilesTask)
    encoder, settings = _encoder(config), task.row_settings()
    reader = column_reader(settings, needs_answer=False)
    to_prompt = template_of(settings.prompt_template, settings.placeholder)
    for source in task.train_files:
        loaded = load_problems(source, reader, to_prompt, on_bad_row=task.on_bad_row)
        problems = loaded.problems
        yield f"{source}: {len(problems):,} problems" + (f", {loaded.num_found:,} bad rows" if loaded.num_found else "")
        first = problems[0]
        rows = [("column", "type", "used as", "first row")]
        columns = reader.columns_of(first.row)
        for name, value in first.row.items():
            use = " and ".join(what for what, column in columns.items() if column and column.partition(".")[0] == name)
            rows.append((str(name), _type(value), use, textwrap.shorten(str(value), 40, placeholder=" ...")))
        yield aligned(rows)
        for note in loaded.notes:
            yield f"note: {note}"
        if without := sum(not problem.answer for problem in problems):
            yield f"note: {without:,} rows have no answer; only a reward that compares with nothing can use them"
        yield ""
        if encoder is None:
            lengths, unit = [len(problem.prompt) for problem in problems], "characters"
        else:
            lengths, unit = encoder.num_tokens([problem.content for problem in problems]), "tokens"
        yield f"prompts have {min(lengths):,} to {max(lengths):,} {unit}:"
        yield from _histogram(lengths)
        limit = config.rollout.max_prompt_tokens
        if encoder is not None and (num_long := sum(length > limit for length in lengths)):
            rule = f"task.long_prompts={task.long_prompts}"
            yield f"{num_long:,} are longer than rollout.max_prompt_tokens={limit}: {rule}"
        step = max(1, len(problems) // max(1, num_examples))
        for problem, length in list(zip(problems, lengths, strict=True))[::step][:num_examples]:
            text = problem.prompt if encoder is None else encoder.text(problem.content)
            yield f"\n-- {problem.place}: {length:,} {unit}, answer {problem.answer[-80:]!r} " + "-" * 10
            yield text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]} ... ({len(text):,} characters)"
        yield ""
    if encoder is None:
        yield "add --model.path MODEL to see the prompts in its chat template, and their tokens"


def _encoder(config: ReasoningConfig) -> Any:
    """The model's encoder of prompts; None without a model."""
    assert config.model.path is not None and isinstance(config.task, FilesTask)
    if config.model.path == Path(NO_MODEL).absolute():
        return None
    from rlinf.jobs.generation import make_encoder
    from rlinf.tasks.language import load_checkpoint_tokenizer

    tokenizer = load_checkpoint_tokenizer(config.model.path)
    return make_encoder(config.task, tokenizer, config.model.path, "task.")


def _type(value: Any) -> str:
    if isinstance(value, list):
        return f"list of {len(value)}"
    return {"str": "text", "int": "number", "float": "number", "dict": "object"}.get(
        type(value).__name__, type(value).__name__
    )


def _histogram(lengths: Sequence[int]) -> Iterator[str]:
    """Bars of equal width between the shortest and the longest."""
    low, width = min(lengths), max(1, -(-(max(lengths) - min(lengths) + 1) // NUM_BARS))
    counts = Counter((length - low) // width for length in lengths)
    scale, columns = max(counts.values()), min(BAR_WIDTH, text_width() - 40)
    for bar in range(max(counts) + 1):
        begin, count = low + bar * width, counts[bar]
        yield f"  {begin:>8,} to {begin + width - 1:>8,}  {count:>9,}  {'#' * -(-columns * count // scale)}"
