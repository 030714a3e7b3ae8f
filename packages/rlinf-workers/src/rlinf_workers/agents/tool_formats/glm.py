"""GLM 4.5 and later: a block with the name, then keys and values in turn.

    <tool_call>NAME
    <arg_key>KEY</arg_key>
    <arg_value>VALUE</arg_value>
    </tool_call>

A turn with calls ends with the role of the results, which the model writes itself.
"""

from __future__ import annotations

import json
import re

from rlinf_workers.agents.tool_formats.base import Reading, Tools, WrittenCall, typed_value
from rlinf_workers.agents.tool_formats.blocks import read_blocks

ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)


class Glm:
    """Values are bare text; the tool's declaration decides whether one is text or JSON."""

    name = "glm"
    ends: tuple[str, ...] = ("<|observation|>", "<|user|>")

    def read(self, text: str, tools: Tools) -> Reading:
        return read_blocks(text, "<tool_call>", "</tool_call>", lambda block: _read_call(block, tools))


def _read_call(block: str, tools: Tools) -> WrittenCall | str:
    name, mark, rest = block.partition("<arg_key>")
    name, inside = name.strip(), mark + rest
    if not name or "<" in name:
        return "it does not begin with the name of a tool"
    if left := ARGUMENT.sub("", inside).strip():
        return f"{left[:40]!r} is no <arg_key>...</arg_key> with its <arg_value>...</arg_value>"
    values = {key.strip(): typed_value(value, name, key.strip(), tools) for key, value in ARGUMENT.findall(inside)}
    return WrittenCall(name, json.dumps(values, ensure_ascii=False))
