"""Whether the instructions that an environment is known to give are short enough, asked before any process starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rlinf_envs import FieldSpec
from rlinf_workers.policies.base import PolicyError
from rlinf_workers.roles.records.embodied import MAX_TEXT_BYTES


def check_instructions(fields: Mapping[str, FieldSpec], check: Callable[[str], None]) -> None:
    """
    Args:
        check: raises PolicyError for an instruction that makes a prompt that is too long.

    Raises: PolicyError also for one that no field has room for.
    """
    for text in fields["instruction"].texts if "instruction" in fields else ():
        if (size := len(text.encode())) > MAX_TEXT_BYTES:
            raise PolicyError(
                f"the instruction {text[:60]!r}... has {size} bytes, and there is room for {MAX_TEXT_BYTES}"
            )
        check(text)
