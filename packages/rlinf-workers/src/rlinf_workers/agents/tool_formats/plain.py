"""Tiny models without a chat template: `[NAME:ARGUMENT]` at the end of a turn is a call."""

from __future__ import annotations

import json
import re

from rlinf_workers.agents.tool_formats.base import MalformedCall, Reading, Tools, WrittenCall, parameters_of

CALL = re.compile(r"\[([A-Za-z_][\w-]*):(.*)\]", re.DOTALL)


class Plain:
    """One call a turn, with one argument that is bare text."""

    name = "plain"
    ends: tuple[str, ...] = ()

    def read(self, text: str, tools: Tools) -> Reading:
        begin = re.search(r"\[[A-Za-z_][\w-]*:", text)
        if begin is None:
            return Reading(text)
        written = text[begin.start() :]
        call = CALL.fullmatch(written)
        if call is None:
            return Reading(text, (MalformedCall(written, "it does not end the turn with ]"),))
        name, argument = call.groups()
        return Reading(
            text[: begin.start()],
            (WrittenCall(name, json.dumps({_parameter(name, tools): argument}, ensure_ascii=False)),),
        )


def _parameter(name: str, tools: Tools) -> str:
    """The tool's single parameter; "input" for one that declares none or several, or that does not exist."""
    declared = list(parameters_of(name, tools))
    return declared[0] if len(declared) == 1 else "input"
