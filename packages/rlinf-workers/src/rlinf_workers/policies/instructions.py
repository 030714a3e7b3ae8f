"""Checks before any process starts that an environment's known instructions are short enough."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rlinf_envs import FieldSpec
from rlinf_workers.policies.base import PolicyError
from rlinf_workers.roles.records.embodied import MAX_TEXT_BYTES


def check_instructions(fields: Mapping[str, FieldSpec], check: Callable[[str], None]) -> None:
    """
    Args:
        check: raises PolicyError if the prompt of an instruction is too long.

    Raises: PolicyError also for an instruction that does not fit in its field.
    """
    for text in fields["instruction"].texts if "instruction" in fields else ():
        if (size := len(text.encode())) > MAX_TEXT_BYTES:
            raise PolicyError(f"the instruction {text[:60]!r}... has {size} bytes; the maximum is {MAX_TEXT_BYTES}")
        check(text)
