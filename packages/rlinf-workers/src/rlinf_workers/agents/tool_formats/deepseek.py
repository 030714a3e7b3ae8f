"""DeepSeek: calls between marks of their own. V3 and R1 name the type and fence the JSON; V3.1 and later do neither.

V3:   CALLS_BEGIN BEGIN function SEPARATOR NAME \\n```json\\n {...} \\n``` END ... CALLS_END
V3.1: CALLS_BEGIN BEGIN NAME SEPARATOR {...} END ... CALLS_END
"""

from __future__ import annotations

import json
import re

from rlinf_workers.agents.tool_formats.base import MalformedCall, Reading, Tools, WrittenCall, call_of_json
from rlinf_workers.agents.tool_formats.blocks import read_blocks

BAR = "\uff5c"
"""A full-width vertical line; DeepSeek's special tokens are between two of them."""
CALLS_BEGIN, CALLS_END = f"<{BAR}tool▁calls▁begin{BAR}>", f"<{BAR}tool▁calls▁end{BAR}>"
BEGIN, SEPARATOR, END = f"<{BAR}tool▁call▁begin{BAR}>", f"<{BAR}tool▁sep{BAR}>", f"<{BAR}tool▁call▁end{BAR}>"
FENCED = re.compile(r"([^\n]*)\n```json\n(.*)\n```\s*", re.DOTALL)


class DeepSeek:
    """The calls come last in a turn.

    Args:
        fenced: as V3 writes them.
    """

    ends: tuple[str, ...] = ()

    def __init__(self, *, fenced: bool) -> None:
        self._fenced = fenced
        self.name = "deepseek-v3" if fenced else "deepseek-v3.1"

    def read(self, text: str, tools: Tools) -> Reading:
        content, begin, written = text.partition(CALLS_BEGIN)
        if not begin:
            return Reading(text)
        inside, end, after = written.partition(CALLS_END)
        blocks = read_blocks(inside, BEGIN, END, self._read_call)
        problem = f"{CALLS_END} is missing" if not end else "" if blocks.calls else f"nothing follows {CALLS_BEGIN}"
        if problem or blocks.content.strip():
            return Reading(text, (MalformedCall(begin + written, problem or _problem(blocks)),))
        return Reading(content + after, blocks.calls)

    def _read_call(self, block: str) -> WrittenCall | str:
        head, separator, tail = block.partition(SEPARATOR)
        if not separator:
            return f"{SEPARATOR} is missing"
        name, arguments = head, tail
        if self._fenced:
            fenced = FENCED.fullmatch(tail)
            if fenced is None:
                return "its arguments are not between ```json and ```"
            name, arguments = fenced.groups()
        return call_of_json(f'{{"name": {json.dumps(name.strip())}, "arguments": {arguments}}}')


def _problem(blocks: Reading) -> str:
    malformed = next((call for call in blocks.calls if isinstance(call, MalformedCall)), None)
    return malformed.problem if malformed else f"{blocks.content.strip()[:40]!r} stands between the calls"
