"""Tools by name, and by import path, with their options."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlinf_algos import AlgosError
from rlinf_workers.agents.tools.base import Tool
from rlinf_workers.agents.tools.checked import CheckedTool
from rlinf_workers.agents.tools.custom import FUNCTION, FunctionTool
from rlinf_workers.plugins import Plugins, Spec

TOOLS: Plugins[Spec] = Plugins(
    "tool",
    {
        "python": "rlinf_workers.agents.tools.python:SPEC",
        "shell": "rlinf_workers.agents.tools.shell:SPEC",
        "search": "rlinf_workers.agents.tools.search:SPEC",
        "mcp": "rlinf_workers.agents.tools.mcp:SPEC",
    },
    base="rlinf_workers.plugins:Spec",
)
"""Tools, for the key `tools`. A custom one is a function or a class; see `make_tools`."""


def make_tools(entries: Sequence[str | Mapping[str, Any]]) -> list[CheckedTool]:
    """Creates the tools of a run; `start_tools` starts them.

    Args:
        entries: names, import paths, or mappings with the key `tool` and the tool's options:
            ["python", {"tool": "search", "path": "corpus.jsonl", "top_k": 5}, "my_module:weather"].
            An import path leads to a function with annotations (see custom.py, whose `FunctionOptions` it takes), to a
            class of tools, which takes the options as keyword arguments, or to a `Tool`, which takes none.

    Raises:
        AlgosError: no such name (the message suggests a similar one), or an import path that does not lead to a tool.
        OptionError: an unknown option, or one with an invalid value.
    """
    return [CheckedTool(_make(*_read(entry))) for entry in entries]


def check_tools(entries: Sequence[str | Mapping[str, Any]]) -> Iterator[tuple[int, str, str]]:
    """The problems of entries, without importing custom tools: number of the entry, option ("" for the tool itself) and
    message."""
    for index, entry in enumerate(entries):
        try:
            name, options = _read(entry)
            TOOLS.locate(name)
        except AlgosError as error:
            yield index, "", str(error)
            continue
        if ":" not in name:
            yield from ((index, option, text) for option, text in TOOLS.spec(name).problems(options))


def _read(entry: str | Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    if isinstance(entry, str):
        return entry, {}
    options = dict(entry)
    name = options.pop("tool", None)
    if not isinstance(name, str):
        raise AlgosError(f"a tool with options needs the key `tool`, its name or import path; got {sorted(entry)}")
    return name, options


def _make(name: str, options: Mapping[str, Any]) -> Tool:
    spec = TOOLS.spec(name)
    plugin: Any = spec.load()
    if spec.options is not None:
        return plugin(spec.read(options))
    if inspect.isclass(plugin):
        try:
            tool: Any = plugin(**options)
        except TypeError as error:
            raise AlgosError(f"the tool {name!r} with options {dict(options)}: {error}") from error
        return tool
    if hasattr(plugin, "specs"):
        if options:
            raise AlgosError(f"the tool {name!r} is an object and takes no options, got {sorted(options)}")
        return plugin
    if not inspect.isroutine(plugin):
        raise AlgosError(f"the tool {name!r} is a {type(plugin).__name__}, neither a function nor a class of tools")
    return FunctionTool(plugin, FUNCTION.read(options))
