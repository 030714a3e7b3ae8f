"""The reference page of the commands of `rlinf`, made from their argument parsers."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterator

from rlinf.cli.main import make_parser

INTRODUCTION = """# Commands

`rlinf COMMAND --help` prints the same. Commands that take a recipe also take every key of it as an option, for example
`--rollout.temperature 0.8`: [keys of the reasoning job](keys-reasoning.md), [keys of the embodied
job](keys-embodied.md). `rlinf eval` takes the [keys of an evaluation](keys-evaluation.md)."""


def command_page() -> dict[str, str]:
    """Returns path below docs/ -> Markdown."""
    os.environ["COLUMNS"] = "100"  # the width of the usage lines
    parser = make_parser()
    parts = [INTRODUCTION, *_options("Options of every command", parser)]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, command in _commands(action):
                parts += _command(name, command, "##")
    return {"reference/commands.md": "\n\n".join([*parts, ""])}


def _commands(action: argparse._SubParsersAction) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yields each command once, under its first name: an older name of it has the same parser."""
    parsers: list[argparse.ArgumentParser] = []
    for name, parser in action.choices.items():
        if parser not in parsers:
            parsers.append(parser)
            yield name, parser


def _command(name: str, parser: argparse.ArgumentParser, heading: str) -> Iterator[str]:
    yield f"{heading} {parser.prog}"
    inner = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if parser.description:
        yield _escaped(parser.description)
    if inner:
        for action in inner:
            for below, command in _commands(action):
                yield from _command(below, command, heading + "#")
        return
    yield f"```text\n{parser.format_usage().removeprefix('usage: ').rstrip()}\n```"
    yield from _options("", parser)
    if parser.epilog:
        yield _escaped(parser.epilog)


def _options(title: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yields a list of the arguments and options with their help."""
    formatter = parser._get_formatter()
    rows = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction | argparse._HelpAction) or action.help == argparse.SUPPRESS:
            continue
        names = ", ".join(action.option_strings) or str(action.metavar or action.dest)
        value = (
            formatter._format_args(action, action.dest.upper()) if action.option_strings and action.nargs != 0 else ""
        )
        text = formatter._expand_help(action) if action.help else ""
        rows.append(f"- **`{f'{names} {value}'.strip()}`**: {_escaped(text)}")
    if title:
        yield f"## {title}"
    if rows:
        yield "\n".join(rows)


def _escaped(text: str) -> str:
    text = " ".join(text.split()).replace("<", "&lt;").replace("*", "\\*")
    return re.sub(r"docs/([\w/-]+\.md)", r"[\1](../\1)", text)
