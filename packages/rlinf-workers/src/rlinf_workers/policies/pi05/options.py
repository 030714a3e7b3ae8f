"""Options of pi0.5 in a recipe: those of pi0 with other defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rlinf_workers.policies.pi0.options import Pi0Options


@dataclass(frozen=True, kw_only=True, slots=True)
class Pi05Options(Pi0Options):
    """Options of the policy; docs/policies/pi05.md gives the sources of the defaults. `folder` must have openpi's or
    LeRobot's tensors, see pi0/openpi_files.py."""

    max_prompt_tokens: int = 200
    value: str = "vision-language"
    state_in_prompt: bool = True
    """False: use pi0's prompt and ignore the state, as in openpi's fine-tuning for LIBERO."""

    acting: ClassVar[tuple[str, ...]] = (*Pi0Options.acting, "state_in_prompt")
    normalization_of_checkpoint: ClassVar[str | None] = "quantiles"
