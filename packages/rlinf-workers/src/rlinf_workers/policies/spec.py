"""PolicySpec: what is known of a policy before it is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlinf_sched.derive import ModelShape
from rlinf_workers.plugins import Spec


@dataclass(frozen=True, kw_only=True, slots=True)
class ActingCost:
    """What one answer of a policy costs, for planning.

    Example: a decoder that answers one action of a picture and 30 tokens of text:
        ActingCost(shape=find_model("OpenVLA-7B"), chunk_size=1, text_tokens=30)
    """

    shape: ModelShape
    chunk_size: int
    """Actions of an answer."""
    text_tokens: int
    """Tokens of an instruction with its template."""
    num_cameras: int = 1
    """Pictures that it looks at."""
    parallel_decoding: bool = False
    """Whether all tokens of an answer come out of one forward pass."""
    predicted_actions: int = 0
    """Actions that its expert denoises; 0: it has no expert."""
    denoising_steps: int = 0
    trained_steps: int = 0
    """Those of them whose log-probabilities are trained."""
    trains_expert_alone: bool = False
    """Whether the decoder that reads pictures and text stays as it is."""


@dataclass(frozen=True, kw_only=True)
class PolicySpec(Spec):
    """One policy. Neither this nor a module of a spec imports torch."""

    backbone: tuple[str, ...] | None = None
    """`Policy.backbone`; None: the class is asked."""
    recipe_keys: Mapping[str, Any] = field(default_factory=dict)
    """Options that are keys of a recipe's section `policy`, beside `options`, with their defaults."""
    published_model: str = ""
    """The published model whose checkpoint its option `folder` takes and `acting_cost` describes; "": it needs none."""

    @property
    def adapted_modules(self) -> tuple[str, ...]:
        """Modules whose linear layers an adapter (`actor.lora`) may change; none: it takes no adapter."""
        return getattr(self.load(), "backbone", ()) if self.backbone is None else self.backbone

    def acting_cost(self, options: Mapping[str, Any], env_options: Mapping[str, Any]) -> ActingCost | None:
        """What an answer costs; None: unknown before it is profiled.

        Args:
            options: the recipe's `policy.options`, or its `recipe_keys`.
            env_options: the recipe's `env.options`.

        Raises: rlinf_sched's ProfileError for a checkpoint that is not one of this policy.
        """
        return None


def num_cameras(options: Mapping[str, Any], env_options: Mapping[str, Any]) -> int:
    """The cameras that the policy chooses, else all that the environment shows."""
    cameras: Any = options.get("cameras") or env_options.get("cameras") or "one"
    return len(cameras.split(",")) if isinstance(cameras, str) else len(cameras)
