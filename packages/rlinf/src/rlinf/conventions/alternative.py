"""Alternative: one convention that a set-up might have got wrong, and what it would be instead."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from rlinf.conventions.frames import ComparedFrames

Observe = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
"""Observations as they are -> as they would be under another convention."""
Convert = Callable[[Tensor, ComparedFrames], Tensor]
"""Predicted actions [F, A] -> as they would be under another convention."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Alternative:
    """One change of a set-up.

    Example: Alternative(convention="gripper sign", change="the last number, negated", setting=
        "--policy.options.gripper open_is_one", convert=...)
    """

    convention: str
    """What is changed; of two alternatives with the same convention only one can be right."""
    change: str
    """What it is changed to."""
    setting: str
    """What the user has to change."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the policy that differ."""
    observe: Observe | None = None
    convert: Convert | None = None

    @property
    def needs_forward(self) -> bool:
        """Whether the policy has to answer again."""
        return bool(self.options) or self.observe is not None
