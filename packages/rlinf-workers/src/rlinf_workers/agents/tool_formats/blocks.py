"""Formats whose calls are blocks between two marks, which may stand anywhere in the text."""

from __future__ import annotations

from collections.abc import Callable

from rlinf_workers.agents.tool_formats.base import MalformedCall, Reading, WrittenCall, joined


def read_blocks(text: str, begin: str, end: str, read_call: Callable[[str], WrittenCall | str]) -> Reading:
    """Reads every block from `begin` to `end`.

    Args:
        read_call: a block's inside -> the call, or why it is none.
    """
    first, *blocks = text.split(begin)
    if not blocks:
        return Reading(text)
    outside = [first.rstrip("\n")]
    calls: list[WrittenCall | MalformedCall] = []
    for block in blocks:
        inside, closing, after = block.partition(end)
        call = read_call(inside) if closing else f"{end} is missing"
        if isinstance(call, str):
            written = begin + inside + closing
            calls.append(MalformedCall(written, call))
            outside.append(written)
        else:
            calls.append(call)
        outside.append(after)
    return Reading(joined(*outside) if any(text.strip() for text in outside[1:]) else outside[0], tuple(calls))
