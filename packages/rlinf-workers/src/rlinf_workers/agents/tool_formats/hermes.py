"""Hermes and Qwen (2.5, 3): `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, one block a call."""

from __future__ import annotations

from rlinf_workers.agents.tool_formats.base import Reading, Tools, call_of_json
from rlinf_workers.agents.tool_formats.blocks import read_blocks


class Hermes:
    """Each block holds one JSON object."""

    name = "hermes"
    ends: tuple[str, ...] = ()

    def read(self, text: str, tools: Tools) -> Reading:
        return read_blocks(text, "<tool_call>", "</tool_call>", call_of_json)
