"""Limits that every tool has: the deadline of a call and the length of its text."""

from __future__ import annotations

from rlinf_workers.plugins import OptionError

NOTE = "\n[... {} characters left out ...]\n"
MIN_CHARACTERS = 100
"""The note must fit."""


def cut(text: str, max_characters: int) -> str:
    """The text, with a note in place of its middle if it is longer than `max_characters` (at least MIN_CHARACTERS)."""
    if len(text) <= max_characters:
        return text
    room = max_characters - len(NOTE.format(len(text)))
    tail = room // 2
    return text[: room - tail] + NOTE.format(len(text) - room) + text[len(text) - tail :]


def unicode_text(text: str) -> str:
    """Without lone surrogates, which no tokenizer and no file takes."""
    return text.encode("utf-8", "replace").decode("utf-8")


def check_limits(time_limit_s: float, max_characters: int) -> None:
    """Checks the options of these names. Raises: OptionError."""
    if not time_limit_s > 0:
        raise OptionError("time_limit_s", f"={time_limit_s!r} must be above 0")
    if max_characters < MIN_CHARACTERS:
        raise OptionError("max_characters", f"={max_characters!r} must be at least {MIN_CHARACTERS}")
