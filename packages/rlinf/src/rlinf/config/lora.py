"""Config of adapters (`actor.lora`), which language models and policies of several parts can have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from rlinf.config.base import Conflict, Section


class LoraConfig(Section):
    """Low-rank changes of the model's linear layers (LoRA), which are trained in place of the model."""

    rank: int = Field(ge=1, description="Rank of the change of a layer; decides how many weights are trained.")
    alpha: float = Field(default=32.0, gt=0, description="A change is scaled by alpha / rank.")
    dropout: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Only 0: the policy is sampled without dropout, so a gradient with it is that of another policy.",
    )
    targets: tuple[Annotated[str, Field(min_length=1)], ...] | Literal["all-linear"] = Field(
        default="all-linear",
        description="Layers that are changed, by module names or their ends, for example [q_proj, v_proj]; all-linear: "
        "every linear layer but the head; of a policy, every one that it trains in its backbone.",
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
