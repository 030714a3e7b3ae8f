"""What OpenVLA and OpenVLA-OFT share: embedding pictures and an instruction for Llama, action bins, the value head.

Legend: n rows, P positions of the context, A dimensions of an action, B bins, H width of the language model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rlinf_envs import ActionSpec, FieldSpec
from rlinf_workers.policies.added_weights import files_of, ignored_heads, is_head_of_rl
from rlinf_workers.policies.base import Fields, Policy, PolicyError
from rlinf_workers.policies.instructions import check_instructions
from rlinf_workers.policies.layers import VALUE_GAIN, in_own_dtype, tanh_tower
from rlinf_workers.policies.openvla.actions import (
    GRIPPERS,
    act_with_gripper,
    action_table,
    actions_of,
    bins_of,
    learn_with_gripper,
    with_published_gripper,
)
from rlinf_workers.policies.openvla.checkpoint import (
    NORMALIZATIONS,
    ModelSpec,
    TinyModelSizes,
    spec_of_folder,
    spec_of_sizes,
)
from rlinf_workers.policies.openvla.model import check_files, load_parts, make_parts
from rlinf_workers.policies.openvla.pixels import center_cropped, normalized, resized
from rlinf_workers.policies.openvla.prompts import PromptTokens, file_ids, word_ids
from rlinf_workers.policies.openvla.spec import SPEC
from rlinf_workers.policies.options import acting_options, check_choice
from rlinf_workers.policies.published import checkpoint_of, write_weights

DEFAULT_CONTEXT = 2048
"""Number of positions if `text_config` does not set it; the default of transformers' LlamaConfig."""
CROPPED_DATASETS = ("libero_",)
"""Prefixes of datasets on whose random crops published checkpoints were fine-tuned."""
ACTING = ("normalization", "gripper", "center_crop", "dtype")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedOptions(TinyModelSizes):
    """Options of both policies; those of `TinyModelSizes` apply to a model without a folder."""

    folder: str | None = None
    """A published checkpoint; None: a small model."""
    lora_folder: str | None = None
    """A LoRA adapter of that checkpoint, as peft saves it, which is added to its weights."""
    unnorm_key: str | None = None
    """The dataset in the checkpoint whose statistics scale the actions; None: the only one."""
    normalization: str = "quantiles"
    """With a checkpoint: which numbers of the dataset are scaled to -1 and 1, `quantiles` or `bounds`."""
    gripper: str | None = None
    """The environment's convention for the gripper, the last number of an action; checkpoints have 1 for open and 0 for
    closed. `open_is_minus_one` (LIBERO), `open_is_one` (ManiSkill's WidowX), or `as_is`. None: as it is, but a
    checkpoint whose range does not fit the environment is refused."""
    center_crop: bool = False
    """Crop pictures to the central 90 %, for checkpoints that were fine-tuned on random crops."""
    temperature: float = 1.0
    """Temperature of the action tokens, both for sampling and for their log-probabilities."""
    value_hidden_size: int = 256
    """Width of the two hidden layers of the value head."""
    detach_values: bool = False
    """Stop the value's gradient at the hidden states of the model."""
    dtype: str = "float32"
    """Data type of the weights."""

    @property
    def opens(self) -> float | None:
        """The value of `GRIPPERS` for `gripper`."""
        return GRIPPERS[self.gripper or "as_is"]


def checked_spec(fields: Mapping[str, FieldSpec], actions: ActionSpec, options: SharedOptions) -> ModelSpec:
    """The model that the options describe, after checks; reads no weights.

    Raises: PolicyError if the model cannot act here, WeightFilesError for incomplete files.
    """
    if "instruction" not in fields:
        raise PolicyError(f"it reads an 'instruction', but the environment provides {', '.join(sorted(fields))}")
    if actions.kind != "continuous":
        raise PolicyError("its tokens are bins of continuous actions, but the environment takes discrete ones")
    if not options.temperature > 0:
        raise PolicyError(f"options.temperature has to be above 0, not {options.temperature}")
    check_choice("dtype", options.dtype, tuple(DTYPES))
    check_choice("normalization", options.normalization, tuple(NORMALIZATIONS))
    if options.gripper is not None:
        check_choice("gripper", options.gripper, tuple(GRIPPERS))
    spec = spec_of(actions, options)
    if (num_dims := len(spec.statistics.low)) != actions.low.numel():
        raise PolicyError(f"its actions have {num_dims} numbers, but the environment takes {actions.low.numel()}")
    _check_gripper(spec, actions, options)
    if options.folder is not None:
        check_files(spec, files_of(options.folder, options.lora_folder))
    return spec


def checkpoint_notes(spec: ModelSpec, options: SharedOptions) -> tuple[str, ...]:
    """What a run should say about its checkpoint: weights that are not loaded, a crop that may be missing."""
    if options.folder is None:
        return ()
    crop: tuple[str, ...] = ()
    if (spec.dataset or "").startswith(CROPPED_DATASETS) and not options.center_crop:
        crop = (
            f"policy.options.center_crop is false: checkpoints fine-tuned on {spec.dataset} by the authors of OpenVLA, "
            "OpenVLA-OFT and SimpleVLA-RL are evaluated with the middle of the picture, center_crop: true; RLinf's own "
            "without",
        )
    return (*ignored_heads(files_of(options.folder, options.lora_folder)), *crop)


def acting_facts(
    spec: ModelSpec, options: SharedOptions, cameras: Sequence[str], names: Sequence[str] = ()
) -> dict[str, str]:
    """`Needs.acting`. The most likely tokens, with which it acts, do not depend on the temperature.

    Args:
        names: further options.
    """
    return acting_options(options, (*ACTING, *names), cameras, unnorm_key=spec.dataset)


def _check_gripper(spec: ModelSpec, actions: ActionSpec, options: SharedOptions) -> None:
    """Raises: PolicyError for a gripper that would move the wrong way, or that the environment does not have."""
    low, high = actions.low.flatten()[-1].item(), actions.high.flatten()[-1].item()
    first, last = spec.statistics.low[-1], spec.statistics.high[-1]
    if options.opens is not None and (low, high) != (-1, 1):
        raise PolicyError(
            f"options.gripper={options.gripper} acts with -1 and 1 as the last number, but the environment takes "
            f"{low} to {high} there; use as_is"
        )
    is_unsaid = options.gripper is None and options.folder is not None
    if is_unsaid and (low, high) == (-1, 1) and 0 <= first <= last <= 1:
        raise PolicyError(
            f"the last number of its actions is from {first} to {last}, like a gripper with 1 open and 0 closed, "
            "but the environment takes -1 to 1; set options.gripper to open_is_minus_one (LIBERO), open_is_one "
            "(ManiSkill's WidowX) or as_is"
        )


def check_prompts(fields: Mapping[str, FieldSpec], spec: ModelSpec, num_others: int) -> None:
    """Checks that the prompts of all known instructions fit in Llama's context.

    Args:
        num_others: positions that the prompt does not use.

    Raises: PolicyError if one does not.
    """
    prompts = PromptTokens(file_ids(spec.tokenizer) if spec.tokenizer else word_ids)
    room = spec.text_config.get("max_position_embeddings", DEFAULT_CONTEXT) - num_others

    def check(instruction: str) -> None:
        if (length := prompts.length(instruction)) > room:
            raise PolicyError(
                f"the instruction {instruction!r} makes a prompt of {length} tokens; the model's context has room for "
                f"{room} beside {num_others} of pictures and actions"
            )

    check_instructions(fields, check)


def num_patches(spec: ModelSpec) -> int:
    """Patches of one picture."""
    return spec.towers[0].num_patches ** 2


def spec_of(actions: ActionSpec, options: SharedOptions) -> ModelSpec:
    """Like `checked_spec`, but without its checks."""
    changed = [name for name in TinyModelSizes.__slots__ if getattr(options, name) != getattr(TinyModelSizes(), name)]
    if options.folder is None:
        if options.unnorm_key is not None:
            raise PolicyError("options.unnorm_key names statistics of a checkpoint; set options.folder, or neither")
        if options.lora_folder is not None:
            raise PolicyError("options.lora_folder is an adapter of a checkpoint; set options.folder, its base")
        return spec_of_sizes(options, actions if options.opens is None else with_published_gripper(actions))
    if changed:
        raise PolicyError(
            f"options {', '.join(changed)}: a model from options.folder has the sizes of its files; leave them out"
        )
    return spec_of_folder(options.folder, options.unnorm_key, options.normalization)


class PrismaticPolicy(Policy):
    """The model (after Prismatic, arXiv:2402.07865) with a value head; subclasses define how it acts and learns."""

    table: Tensor
    """[A, B] float32: the number that each bin stands for."""
    backbone = SPEC.adapted_modules

    def __init__(
        self,
        spec: ModelSpec,
        options: SharedOptions,
        cameras: Sequence[str],
        *,
        seed: int,
        num_values: int = 1,
    ) -> None:
        """
        Args:
            cameras: the fields with the pictures, in the order of their patches.
            num_values: number of outputs of the value head.
        """
        super().__init__()
        self._spec, self._cameras, self._crops = spec, tuple(cameras), options.center_crop
        self._folder = options.folder
        self._temperature = options.temperature
        self._opens = options.opens
        self._detach_values = options.detach_values
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            with _default_dtype(DTYPES[options.dtype]):
                parts = make_parts(spec)
            self.vision_backbone, self.projector = parts["vision_backbone"], parts["projector"]
            self.language_model = parts["language_model"]
            self._width = self.language_model.config.hidden_size
            hidden = (options.value_hidden_size, options.value_hidden_size)
            self.value_head = tanh_tower(self._width, hidden, num_values, VALUE_GAIN).to(DTYPES[options.dtype])
            with _default_dtype(DTYPES[options.dtype]):
                self.make_more()
        if options.folder is not None and not self.is_outline:
            load_parts(self, files_of(options.folder, options.lora_folder))
        self._prompts = PromptTokens(file_ids(spec.tokenizer) if spec.tokenizer else word_ids)
        self.register_buffer("table", action_table(spec.statistics, spec.num_bins), persistent=False)
        self._num_dims = len(self.table)

    def write_published(self, output: Path, dtype: torch.dtype | None = None) -> Sequence[str]:
        def name_of(name: str) -> str | None:
            return None if is_head_of_rl(name) else name

        return write_weights(checkpoint_of(self._folder), output, self, name_of, dtype)

    def action_range(self) -> tuple[Tensor, Tensor] | None:
        if self._folder is None:
            return None
        statistics = self._spec.statistics
        low, high = torch.tensor(list(statistics.low)), torch.tensor(list(statistics.high))
        scaled = torch.tensor(list(statistics.mask))
        return low.where(scaled, -torch.inf), high.where(scaled, torch.inf)

    def make_more(self) -> None:
        """Creates the additional modules of a policy."""
        return

    @property
    def is_outline(self) -> bool:
        """Whether the model is created without reading weights."""
        return self.projector.fc1.weight.is_meta

    def _embed(self, ids: Tensor) -> Tensor:
        """[...] -> [..., H]"""
        return self.language_model.model.embed_tokens(ids)

    def _embed_bins(self, bins: Tensor) -> Tensor:
        """[n, t] -> [n, t, H]. The last token of the vocabulary is the lowest bin."""
        return self._embed(self._spec.num_tokens - 1 - bins)

    def _acted(self, bins: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """[n, K, A] -> the actions for the environment, and the extras of the answer: the bins, if they cannot be
        recovered from the actions."""
        numbers = actions_of(self.table, bins.flatten(0, 1)).view(bins.shape)
        return act_with_gripper(numbers, self._opens), {} if self._opens is None else {"bins": bins}

    def _bins(self, actions: Tensor, extras: Mapping[str, Tensor]) -> Tensor:
        """[n, K, A]: the bins of an answer, the inverse of `_acted`; without extras, those of demonstrated actions."""
        if "bins" in extras:
            return extras["bins"]
        return bins_of(self.table, learn_with_gripper(actions, self._opens).flatten(0, 1)).view(actions.shape)

    def _see(self, fields: Fields, language: Tensor | None = None) -> Tensor:
        """[n, patches of all pictures, H].

        Args:
            language: [n, H], for towers whose features the instruction modulates.
        """
        dtype = self.projector.fc1.weight.dtype
        pictures = torch.stack([self._resized(fields[name]) for name in self._cameras], dim=1)
        flat = pictures.flatten(0, 1)
        for_towers = zip(self._spec.means, self._spec.stds, strict=True)
        dino, siglip = (normalized(flat, mean, std).to(dtype) for mean, std in for_towers)
        if language is not None:
            language = language.repeat_interleave(len(self._cameras), dim=0)
        patches = self.projector(self.vision_backbone(dino, siglip, language))
        return patches.unflatten(0, (-1, len(self._cameras))).flatten(1, 2)

    def _resized(self, pictures: Tensor) -> Tensor:
        images = resized(pictures, self._spec.image_size)
        return center_cropped(images) if self._crops else images

    def _logits(self, states: Tensor) -> Tensor:
        """[..., H] -> [..., B], at least float32: the logits of the bins from the lowest on, divided by the
        temperature."""
        last = self._spec.num_tokens
        logits = self.language_model.lm_head(states)[..., last - self._spec.num_bins : last]
        return logits.flip(-1).to(torch.promote_types(logits.dtype, torch.float32)) / self._temperature

    def _values(self, states: Tensor) -> Tensor:
        """[n, H] -> [n], or [n, several], float32 at least."""
        values = in_own_dtype(self.value_head, states.detach() if self._detach_values else states)
        return values[..., 0] if values.shape[-1] == 1 else values


def with_patches(embedded: Tensor, mask: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """The first token, the patches, and the rest of the prompt: embeddings [n, P, H] and their mask [n, P].

    Args:
        embedded, mask: embeddings and mask of the prompt, [n, T, H] and [n, T].
        seen: the embedded patches, [n, patches, H].
    """
    mask = torch.cat([mask[:, :1], mask.new_ones(seen.shape[:2]), mask[:, 1:]], dim=1)
    return torch.cat([embedded[:, :1], seen, embedded[:, 1:]], dim=1), mask


def positions_of(mask: Tensor) -> Tensor:
    """[n, P]: positions as if there were no padding."""
    return mask.cumsum(1) - 1


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
