"""Qwen 3.5 and later, Qwen3-Coder, Nemotron 3: a block with a tag for the function and one for each parameter.

<tool_call>
<function=NAME>
<parameter=KEY>
VALUE
</parameter>
</function>
</tool_call>
"""

from __future__ import annotations

import json
import re

from rlinf_workers.agents.tool_formats.base import Reading, Tools, WrittenCall, typed_value
from rlinf_workers.agents.tool_formats.blocks import read_blocks

FUNCTION = re.compile(r"\s*<function=([^>\n]+)>\s*(.*?)\s*</function>\s*", re.DOTALL)
PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)


class Tagged:
    """Values are bare text; the tool's declaration decides whether one is text or JSON."""

    name = "tagged"
    ends: tuple[str, ...] = ()

    def read(self, text: str, tools: Tools) -> Reading:
        return read_blocks(text, "<tool_call>", "</tool_call>", lambda block: _read_call(block, tools))


def _read_call(block: str, tools: Tools) -> WrittenCall | str:
    function = FUNCTION.fullmatch(block)
    if function is None:
        return "it is no <function=NAME> ... </function>"
    name, inside = function.groups()
    if rest := PARAMETER.sub("", inside).strip():
        return f"{rest[:40]!r} is no <parameter=KEY> ... </parameter>"
    values = {key: typed_value(value, name, key, tools) for key, value in PARAMETER.findall(inside)}
    return WrittenCall(name, json.dumps(values, ensure_ascii=False))
