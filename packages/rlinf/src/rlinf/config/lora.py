"""Config of LoRA adapters (`actor.lora`) for language models and for policies with a backbone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from rlinf.config.base import Conflict, Section


class LoraConfig(Section):
    """Low-rank updates of linear layers (LoRA), which are trained instead of the model's weights."""

    rank: int = Field(ge=1, description="Rank of each layer's update; decides how many weights are trained.")
    alpha: float = Field(default=32.0, gt=0, description="An update is scaled by alpha / rank.")
    dropout: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Must be 0: the policy samples without dropout, so a gradient with dropout would be that of "
        "another policy.",
    )
    targets: tuple[Annotated[str, Field(min_length=1)], ...] | Literal["all-linear"] = Field(
        default="all-linear",
        description="Layers to adapt, by module names or their ends, for example [q_proj, v_proj]; all-linear: every "
        "linear layer but the head; for a policy, every linear layer that it trains in its backbone.",
    )

    def conflicts(self) -> Iterator[Conflict]:
        if self.dropout:
            yield Conflict(
                keys=("actor.lora.dropout",),
                text=f"={self.dropout}: the policy is sampled without dropout, and with it the gradient, the ratios "
                "and the KL would be those of another policy; use 0",
            )
        if not self.targets:
            yield Conflict(keys=("actor.lora.targets",), text=" is empty; name layers, or use all-linear")
