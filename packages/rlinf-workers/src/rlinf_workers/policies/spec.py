"""PolicySpec: the properties of a policy that are known before it is created."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlinf_sched.derive import ModelShape
from rlinf_workers.plugins import Spec

FOLDER_OPTIONS = ("folder", "lora_folder", "flow_folder")
"""Options of policies that are folders with weights, or names of such on the Hugging Face Hub."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ActingCost:
    """The cost of one answer of a policy, for planning.

    Example: a decoder that answers a picture and 30 tokens of text with one action:
        ActingCost(shape=find_model("OpenVLA-7B"), chunk_size=1, text_tokens=30)
    """

    shape: ModelShape
    chunk_size: int
    """Number of actions in an answer."""
    text_tokens: int
    """Number of tokens of an instruction with its template."""
    num_cameras: int = 1
    """Number of input pictures."""
    parallel_decoding: bool = False
    """Whether all tokens of an answer come from one forward pass."""
    predicted_actions: int = 0
    """Number of actions that the expert denoises; 0: there is no expert."""
    denoising_steps: int = 0
    trained_steps: int = 0
    """Number of denoised actions whose log-probabilities are trained."""
    trains_expert_alone: bool = False
    """Whether the decoder that reads pictures and text is frozen."""


@dataclass(frozen=True, kw_only=True)
class PolicySpec(Spec):
    """The spec of one policy. Neither this module nor one with a spec imports torch."""

    backbone: tuple[str, ...] | None = None
    """`Policy.backbone`; None: read from the class."""
    recipe_keys: Mapping[str, Any] = field(default_factory=dict)
    """Options that are keys of a recipe's section `policy`, next to `options`, with their defaults."""
    off_policy: bool = False
    """Whether off-policy algorithms train it: its class is a `rlinf_workers.policies.soft.SoftPolicy`."""
    published_model: str = ""
    """The published model whose checkpoint the option `folder` takes and `acting_cost` describes; "": none."""

    @property
    def adapted_modules(self) -> tuple[str, ...]:
        """Modules whose linear layers an adapter (`actor.lora`) may change; empty: the policy supports no adapter."""
        return getattr(self.load(), "backbone", ()) if self.backbone is None else self.backbone

    def convention_options(self, options: Mapping[str, Any]) -> Mapping[str, Sequence[Any]]:
        """Options that say what the inputs and outputs of a checkpoint mean, with their values, for `rlinf check`. The
        first value is the one that counts where the recipe does not set the option.

        Args:
            options: the recipe's.
        """
        return {}

    def acting_cost(self, options: Mapping[str, Any], env_options: Mapping[str, Any]) -> ActingCost | None:
        """The cost of an answer; None: unknown until it is profiled.

        Args:
            options: the recipe's `policy.options`, or its `recipe_keys`.
            env_options: the recipe's `env.options`.

        Raises: rlinf_sched's ProfileError for a checkpoint that is not one of this policy.
        """
        return None


def num_cameras(options: Mapping[str, Any], env_options: Mapping[str, Any]) -> int:
    """The number of cameras that the policy chooses, or of all cameras of the environment."""
    cameras: Any = options.get("cameras") or env_options.get("cameras") or "one"
    return len(cameras.split(",")) if isinstance(cameras, str) else len(cameras)
