"""Mistral: `[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`, and the later `[TOOL_CALLS]NAME[ARGS]{...}`.

Some put an id of the call between `[CALL_ID]` and `[ARGS]`, or beside the name in the object.
"""

from __future__ import annotations

import json
import re

from rlinf_workers.agents.tool_formats.base import (
    MalformedCall,
    Reading,
    Tools,
    WrittenCall,
    call_of_json,
    call_of_value,
)

MARK = "[TOOL_CALLS]"
NAMED = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\](\w+))?\[ARGS\](.*)", re.DOTALL)


class Mistral:
    """One list of JSON objects, or a mark before each call."""

    name = "mistral"
    ends: tuple[str, ...] = ()

    def read(self, text: str, tools: Tools) -> Reading:
        content, *blocks = text.split(MARK)
        if not blocks:
            return Reading(text)
        calls: list[WrittenCall | MalformedCall] = []
        for block in blocks:
            read = _read_block(block)
            if isinstance(read, str):
                calls.append(MalformedCall(MARK + block, read))
                content += MARK + block
            else:
                calls += read
        return Reading(content, tuple(calls))


def _read_block(block: str) -> list[WrittenCall] | str:
    if named := NAMED.fullmatch(block):
        name, written_id, arguments = named.groups()
        call = call_of_json(f'{{"name": {json.dumps(name)}, "arguments": {arguments}}}')
        return call if isinstance(call, str) else [WrittenCall(call.name, call.arguments, written_id or "")]
    try:
        values = json.loads(block)
    except ValueError as error:
        return f"it is no JSON: {error}"
    if not isinstance(values, list) or not values:
        return "it is no list of calls"
    calls = [call_of_value(value) for value in values]
    problem = next((call for call in calls if isinstance(call, str)), None)
    return problem or [call for call in calls if not isinstance(call, str)]
