"""Llama 3.1 to 3.3: the whole turn is one JSON object with a name and parameters, which `<|python_tag|>` may precede.

Several calls are separated by `;`, as Meta's documentation of 3.1 has it. A turn that does not begin with the tag or
with an object that has a name is plain text.
"""

from __future__ import annotations

import json
import re

from rlinf_workers.agents.tool_formats.base import MalformedCall, Reading, Tools, WrittenCall, call_of_value

TAG = "<|python_tag|>"
OBJECT = re.compile(r'\s*\{\s*"(name|type|function|parameters|arguments)"')


class Llama3:
    """JSON objects, nothing else beside them."""

    name = "llama3"
    ends: tuple[str, ...] = ("<|eom_id|>",)

    def read(self, text: str, tools: Tools) -> Reading:
        before, tag, after = text.partition(TAG)
        written = after if tag else text
        if not tag and not OBJECT.match(text):
            return Reading(text)
        calls = _read_objects(written)
        if isinstance(calls, str):
            return Reading(text, (MalformedCall(tag + written, calls),))
        return Reading(before.rstrip("\n") if tag else "", tuple(calls))


def _read_objects(text: str) -> list[WrittenCall] | str:
    decoder, calls, rest = json.JSONDecoder(), list[WrittenCall](), text.strip()
    while rest:
        try:
            value, end = decoder.raw_decode(rest)
        except ValueError as error:
            return f"it is no JSON: {error}"
        call = call_of_value(value, arguments_keys=("parameters", "arguments"))
        if isinstance(call, str):
            return call
        calls.append(call)
        rest = rest[end:].lstrip().removeprefix(";").lstrip()
    return calls or f"nothing follows {TAG}"
