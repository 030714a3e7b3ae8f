"""What a recipe may say about pi0.5: what it may say about pi0, with other defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rlinf_workers.policies.pi0.options import Pi0Options


@dataclass(frozen=True, kw_only=True, slots=True)
class Pi05Options(Pi0Options):
    """Options of the policy; docs/policies/pi05.md says where the defaults come from. `folder` is one with openpi's or
    LeRobot's tensors, see pi0/openpi_files.py."""

    max_prompt_tokens: int = 200
    value: str = "vision-language"
    state_in_prompt: bool = True
    """False: the prompt is pi0's and the state is not read, as openpi fine-tuned for LIBERO."""

    statistics_of_checkpoint: ClassVar[str] = "quantiles"
