"""Options of pi0 in a recipe, checked before any process starts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

from typing_extensions import Self

from rlinf_envs import ActionSpec, FieldSpec
from rlinf_workers.policies.base import PolicyError
from rlinf_workers.policies.options import options_of

CHOICES = {
    "noise": ("flow-sde", "flow-noise"),
    "value": ("expert", "vision-language"),
    "trains": ("expert", "all"),
    "normalization": ("mean_std", "quantiles", "bounds"),
    "dtype": ("float32", "bfloat16"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Pi0Options:
    """Options of the policy; docs/policies/pi0.md gives the sources of the defaults."""

    folder: str | None = None
    """A folder that `PI0ForConditionalGeneration.save_pretrained` wrote, or one with openpi's or LeRobot's tensors (see
    openpi_files.py), with its tokenizer's files and `assets/<dataset>/norm_stats.json` or `<dataset>/norm_stats.json`.
    None: a small model with random weights and the sizes below."""
    horizon: int | None = None
    """Number of actions that the checkpoint predicts, for openpi's files without it in config.json (`action_horizon`;
    50 in openpi's `pi0_libero`, 10 in `pi05_libero`)."""
    dataset: str | None = None
    """Key of the normalisation statistics, with a checkpoint."""
    normalization: str | None = None
    """`mean_std` (default with a checkpoint), `quantiles`, or `bounds`, which scales the environment's action bounds to
    -1 and 1 and leaves states unchanged (default without a checkpoint)."""
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

    statistics_of_checkpoint: ClassVar[str] = "mean_std"
    """The default normalization with a checkpoint."""

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Self:
        """Raises: PolicyError for an unknown option or an invalid value."""
        filled: dict[str, Any] = {"normalization": "bounds", "trains": "all"}
        if options.get("folder") is not None:
            filled = {"normalization": cls.statistics_of_checkpoint, "trains": "expert"}
        chosen = options_of(cls, filled | {name: value for name, value in options.items() if value is not None})
        chosen._check()
        return chosen

    def _check(self) -> None:
        values = asdict(self)
        for name, choices in CHOICES.items():
            if values[name] not in choices:
                raise PolicyError(f"{name}={values[name]!r} is none of {', '.join(choices)}")
        sizes = ("chunk_size", "max_prompt_tokens", "num_denoising_steps", "value_width", "num_layers")
        for name in sizes:
            if not (isinstance(values[name], int) and values[name] >= 1):
                raise PolicyError(f"{name}={values[name]!r} must be a whole number from 1 on")
        if self.horizon is not None and not (isinstance(self.horizon, int) and self.horizon >= 1):
            raise PolicyError(f"horizon={self.horizon!r} must be a whole number from 1 on")
        if not 0 < self.noise_level < float("inf"):
            raise PolicyError(f"noise_level={self.noise_level} must be above 0")
        if not 0 < self.least_std < self.largest_std < float("inf"):
            raise PolicyError(
                f"least_std={self.least_std}, largest_std={self.largest_std}: the first must be above 0 and below the "
                "second"
            )
        if self.image_size % PATCH_SIZE or self.image_size < PATCH_SIZE:
            raise PolicyError(f"image_size={self.image_size} must be a multiple of {PATCH_SIZE}, the size of a patch")
        if self.width % 16 or self.width < 16:
            raise PolicyError(f"width={self.width} must be a multiple of 16")
        if self.folder is None and (self.dataset is not None or self.normalization != "bounds"):
            raise PolicyError("dataset and normalization name statistics of a checkpoint; set folder")
        if self.folder is None and self.horizon is not None:
            raise PolicyError("horizon is the number of actions that a checkpoint predicts; set folder")


PATCH_SIZE = 14
"""Patch size of SigLIP So400m/14, pi0's picture encoder, and of the small model."""


def check_spaces(options: Pi0Options, fields: Mapping[str, FieldSpec], actions: ActionSpec) -> None:
    """Checks that need no weights.

    Raises: PolicyError.
    """
    installed = version("transformers")
    if tuple(map(int, installed.split(".")[:2])) < FIRST_TRANSFORMERS:
        raise PolicyError(
            f"transformers {installed} has no pi0; install {'.'.join(map(str, FIRST_TRANSFORMERS))} or later"
        )
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


def check_checkpoint(options: Pi0Options, fields: Mapping[str, FieldSpec], actions: ActionSpec) -> None:
    """Checks that the folder contains pi0 with the needed sizes. Raises: PolicyError."""
    check_sizes(options, DEFAULT_SIZES | checkpoint_config(Path(str(options.folder))), fields, actions)


def check_sizes(
    options: Pi0Options, there: Mapping[str, Any], fields: Mapping[str, FieldSpec], actions: ActionSpec
) -> None:
    """Checks that the sizes of a checkpoint are large enough.

    Args:
        there: arguments of PI0Config; a model with the state in its prompt has no `max_state_dim`.

    Raises: PolicyError.
    """
    if options.horizon is not None and options.horizon != there["chunk_size"]:
        raise PolicyError(
            f"options.horizon={options.horizon}: {options.folder} predicts {there['chunk_size']} actions, by its "
            "config.json; leave horizon out"
        )
    sizes = {
        "max_state_dim": (fields["state"].shape[0], "numbers in 'state'"),
        "max_action_dim": (actions.low.numel(), "dimensions of an action"),
        "chunk_size": (options.chunk_size, "actions of policy.options.chunk_size"),
    }
    for key, (size, what) in sizes.items():
        if size > there.get(key, size):
            raise PolicyError(f"{options.folder} has {key}={there[key]}; here are {size} {what}")


FIRST_TRANSFORMERS = (5, 17)
DEFAULT_SIZES = {"max_state_dim": 32, "max_action_dim": 32, "chunk_size": 50}
"""Defaults of transformers' PI0Config, for a config.json that omits them."""
SENTENCEPIECE_FILES = ("tokenizer.model", "paligemma_tokenizer.model")
"""PaliGemma's tokenizer as sentencepiece has it; the second name is that of the file that openpi downloads."""
TOKENIZER_FILES = ("tokenizer.json", *SENTENCEPIECE_FILES, "tokenizer_config.json")
CONVERSION = (
    "openpi's examples/convert_jax_model_to_pytorch.py --checkpoint_dir FOLDER --config_name NAME --output_path NEW"
)


def checkpoint_config(folder: Path) -> dict[str, Any]:
    """config.json of a pi0 checkpoint.

    Raises: PolicyError for a folder with something else, or without a tokenizer.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise no_checkpoint(folder, "a folder that save_pretrained wrote, or a checkpoint of openpi's or LeRobot's pi0")
    config = json.loads(path.read_text())
    if config.get("model_type") != "pi0":
        raise PolicyError(f"{path} is of model_type {config.get('model_type')!r}; this policy loads 'pi0'")
    check_tokenizer(folder)
    return config


def no_checkpoint(folder: Path, hint: str) -> PolicyError:
    """The error for a folder without config.json and without safetensors files, which may be openpi's own format."""
    if (folder / "params").is_dir() or (folder / "_METADATA").is_file():
        return PolicyError(
            f"folder={str(folder)!r} has JAX weights (params, written by orbax), the format in which openpi publishes; "
            f"convert them with {CONVERSION}, and copy assets and PaliGemma's tokenizer into NEW"
        )
    return PolicyError(f"folder={str(folder)!r} has no config.json; give {hint}")


def check_tokenizer(folder: Path) -> None:
    """Raises: PolicyError for a folder without a tokenizer."""
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise PolicyError(f"{folder} has no tokenizer; put PaliGemma's {' or '.join(TOKENIZER_FILES[:3])} there")
