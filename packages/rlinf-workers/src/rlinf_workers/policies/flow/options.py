"""Options that flow policies share, checked before any process starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from typing_extensions import Self

from rlinf_envs import ActionSpec, FieldSpec
from rlinf_workers.policies.base import PolicyError
from rlinf_workers.policies.options import options_of

PATCH_SIZE = 14
"""Patch size of SigLIP So400m/14, pi0's picture encoder, and of small models."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FlowOptions:
    """Options of a policy that denoises chunks of actions; docs/policies/pi0.md gives the sources of the defaults."""

    folder: str | None = None
    """The folder of a checkpoint. None: a small model with random weights and the sizes below."""
    dataset: str | None = None
    """Key of the normalisation statistics, with a checkpoint."""
    normalization: str | None = None
    """Which statistics of a checkpoint normalise, or `bounds`, which scales the environment's action bounds to -1 and 1
    and leaves states unchanged (default without a checkpoint)."""
    relative_to_state: bool = False
    """The model predicts all numbers but the last, the gripper, as differences to the first numbers of the state, as in
    openpi's `extra_delta_transform` for LIBERO; the statistics are those of the differences."""
    cameras: str | Sequence[str] | None = None
    """Names of cameras in the checkpoint's order, separated by commas. None: all cameras of the environment."""
    chunk_size: int = 5
    """K, the number of predicted actions that are executed."""
    max_prompt_tokens: int = 48
    noise: str = "flow-sde"
    noise_level: float = 0.5
    """Of flow-sde."""
    least_std: float = 0.08
    largest_std: float = 0.16
    """Bounds of the standard deviation that Flow-Noise learns."""
    num_denoising_steps: int = 4
    value: str = "expert"
    """The model whose features the value head reads."""
    value_width: int = 256
    detach_values: bool = False
    """Stop the value's gradient at these features."""
    trains: str | None = None
    """`expert` (default with a checkpoint): the vision-language model is frozen; `all` (default without)."""
    dtype: str = "float32"
    """Data type of the weights; chains, log-probabilities and values are always float32."""
    width: int = 64
    num_layers: int = 2
    image_size: int = 56
    """Picture side of the small model."""

    acting: ClassVar[tuple[str, ...]] = (
        "dataset",
        "normalization",
        "relative_to_state",
        "num_denoising_steps",
        "dtype",
    )
    """Options for `Needs.acting`."""
    normalizations: ClassVar[tuple[str, ...]] = ("bounds",)
    """Values of `normalization`."""
    normalization_of_checkpoint: ClassVar[str | None] = None
    """The default normalization with a checkpoint; None: the one that its files name."""
    picture_unit: ClassVar[int] = PATCH_SIZE
    """Pixels of a side of which the small model's pictures have a multiple."""

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Self:
        """Raises: PolicyError for an unknown option or an invalid value."""
        filled: dict[str, Any] = {"normalization": "bounds", "trains": "all"}
        if options.get("folder") is not None:
            filled = {"normalization": cls.normalization_of_checkpoint, "trains": "expert"}
        chosen = options_of(cls, filled | {name: value for name, value in options.items() if value is not None})
        chosen._check()
        return chosen

    def _check(self) -> None:
        values = asdict(self)
        for name, choices in self._choices().items():
            if values[name] not in choices:
                raise PolicyError(f"{name}={values[name]!r} is none of {', '.join(filter(None, choices))}")
        for name in ("chunk_size", "max_prompt_tokens", "num_denoising_steps", "value_width", "num_layers"):
            check_whole_number(name, values[name])
        if not 0 < self.noise_level < float("inf"):
            raise PolicyError(f"noise_level={self.noise_level} must be above 0")
        if not 0 < self.least_std < self.largest_std < float("inf"):
            raise PolicyError(
                f"least_std={self.least_std}, largest_std={self.largest_std}: the first must be above 0 and below the "
                "second"
            )
        unit = self.picture_unit
        if self.image_size % unit or self.image_size < unit:
            what = "the size of a patch" if unit == PATCH_SIZE else "the patches of one token"
            raise PolicyError(f"image_size={self.image_size} must be a multiple of {unit}, {what}")
        if self.width % 16 or self.width < 16:
            raise PolicyError(f"width={self.width} must be a multiple of 16")
        if self.folder is None and (self.dataset is not None or self.normalization != "bounds"):
            raise PolicyError("dataset and normalization name statistics of a checkpoint; set folder")

    def _choices(self) -> Mapping[str, tuple[str | None, ...]]:
        unnamed = (None,) if self.normalization_of_checkpoint is None else ()
        return {
            "noise": ("flow-sde", "flow-noise"),
            "value": ("expert", "vision-language"),
            "trains": ("expert", "all"),
            "normalization": (*self.normalizations, *unnamed),
            "dtype": ("float32", "bfloat16"),
        }


def check_whole_number(name: str, value: Any) -> None:
    """Raises: PolicyError unless the value is a whole number from 1 on."""
    if not (isinstance(value, int) and value >= 1):
        raise PolicyError(f"{name}={value!r} must be a whole number from 1 on")


def check_spaces(options: FlowOptions, fields: Mapping[str, FieldSpec], actions: ActionSpec) -> None:
    """Checks that need no weights.

    Raises: PolicyError.
    """
    if actions.kind != "continuous":
        raise PolicyError("it denoises continuous actions, but these are discrete")
    if "state" not in fields or len(fields["state"].shape) != 1:
        raise PolicyError("it reads 'state', a row of numbers, but the environment provides none")
    size, num_added = fields["state"].shape[0], actions.low.numel() - 1
    if options.relative_to_state and size < num_added:
        raise PolicyError(
            f"options.relative_to_state adds the state to all numbers of an action but the last, {num_added}, and the "
            f"environment's state has {size}"
        )


def check_sizes(
    options: FlowOptions, there: Mapping[str, Any], fields: Mapping[str, FieldSpec], actions: ActionSpec
) -> None:
    """Checks that the sizes of a checkpoint are large enough.

    Args:
        there: its `max_state_dim` (missing for a model with the state in its prompt), `max_action_dim`, `chunk_size`.

    Raises: PolicyError.
    """
    sizes = {
        "max_state_dim": (fields["state"].shape[0], "numbers in 'state'"),
        "max_action_dim": (actions.low.numel(), "dimensions of an action"),
        "chunk_size": (options.chunk_size, "actions of policy.options.chunk_size"),
    }
    for key, (size, what) in sizes.items():
        if size > there.get(key, size):
            raise PolicyError(f"{options.folder} has {key}={there[key]}; here are {size} {what}")
