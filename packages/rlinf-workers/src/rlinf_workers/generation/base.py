"""What every generation engine offers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from rlinf_workers.generation.sampling import SamplingSettings
from rlinf_workers.records.language import Prompt, SampleGroup


class GenerationEngine(Protocol):
    """Generates completions with a model whose weights are filled from outside."""

    def generate(
        self, prompts: Sequence[Prompt], settings: SamplingSettings, *, seed: int, step: int, policy_version: int
    ) -> list[SampleGroup]:
        """One group for each prompt. The same prompt, seed and step give the same tokens in any batch."""
        ...

    def weights(self) -> Mapping[str, Tensor]:
        """Canonical tensors that it serves; filled in place by a weight sync."""
        ...

    def onload(self) -> None: ...

    def offload(self) -> None: ...
