"""Calls of a vision-language model: what its vision tower reads, and the positions of what it sees.

A transformers model puts the features of its vision tower in place of the placeholders among its tokens. Here only
prompts have pictures: a placeholder that the policy sampled is a token like others, for the engine and the trainer
alike. Positions are always passed, because a model that computes them itself keeps some between its calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from rlinf_workers.models.picture_processor import PICTURE_TEXTS
from rlinf_workers.models.placement import HOST, to_device
from rlinf_workers.roles.records.pictures import Pictures

VISION_LANGUAGE = frozenset(PICTURE_TEXTS)
"""Architectures (`model_type`) that read pictures here."""
TILED = frozenset({"smolvlm"})
"""Those whose pictures are tiles, with a dimension for the batch before them."""


def auto_class(config: Any) -> Any:
    """transformers' class that loads models of a config: of text, or of pictures and text."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if config.model_type in VISION_LANGUAGE else AutoModelForCausalLM


def without_vision_tower(model: nn.Module) -> nn.Module:
    """The part of a model that every batch uses: the decoder of one that reads pictures."""
    config: Any = getattr(model, "config", None)
    reads_pictures = getattr(config, "model_type", None) in VISION_LANGUAGE
    return cast(Any, model).get_decoder() if reads_pictures else model


def freeze_vision_tower(model: Any) -> None:
    """Leaves the vision tower, with what projects its features, as it is in training."""
    trained = {*without_vision_tower(model).parameters(), *model.get_output_embeddings().parameters()}
    for parameter in model.parameters():
        if parameter not in trained:
            parameter.requires_grad_(False)


@contextmanager
def seen(
    model: Any, pictures: Sequence[Pictures | None], is_prompt: Tensor | None = None
) -> Iterator[dict[str, Tensor]]:
    """Arguments with which the model sees pictures; in this context, at the placeholders of prompts alone.

    On a CPU, its vision tower computes those of each prompt by themselves: together they would round differently, and
    the numbers of a prompt must not depend on the others of its batch.

    Args:
        pictures: of each prompt, in the order of the rows of the call; None: it is text alone.
        is_prompt: bool, of the shape of the call's token ids, or without its batch dimension; None: all.
    """
    there = [one for one in pictures if one is not None]
    if not there:
        yield {}
        return
    base, device = model.base_model, next(model.parameters()).device
    separate = [_arguments(model, [one], device) for one in there] if device == HOST else []
    replaced: dict[str, Any] = {}
    for kind in ("image", "video") if len(separate) > 1 else ():
        own = [part for one in separate if (part := _of_kind(one, kind))]
        if own:
            name = f"get_{kind}_features"
            replaced[name] = partial(_one_by_one, getattr(base, name), own)
    if is_prompt is not None:
        replaced["get_placeholder_mask"] = partial(
            _of_prompts, base.get_placeholder_mask, ~is_prompt, _plain_token(model.config)
        )
    vars(base).update(replaced)
    try:
        yield _arguments(model, there, device)
    finally:
        for name in replaced:
            delattr(base, name)


def _arguments(model: Any, pictures: Sequence[Pictures], device: torch.device) -> dict[str, Tensor]:
    """Those of the model's call, on the device."""
    names = dict.fromkeys(name for one in pictures for name in one.arguments)
    parts = {name: [one.arguments[name] for one in pictures if name in one.arguments] for name in names}
    joined = {name: to_device(torch.cat(tensors), device) for name, tensors in parts.items()}
    if model.config.model_type in TILED:
        joined = {name: tensor[None] for name, tensor in joined.items()}
    return joined


def _of_kind(arguments: Mapping[str, Tensor], kind: str) -> dict[str, Tensor]:
    """The arguments for pictures or for videos."""
    return {name: one for name, one in arguments.items() if ("video" in name) == (kind == "video")}


def _one_by_one(
    features: Callable[..., Any], arguments: Sequence[Mapping[str, Tensor]], *_: Any, **options: Any
) -> Any:
    """The features of the pictures of several prompts, as of one call.

    Args:
        arguments: of each prompt.
        options: further arguments of the model's call.
    """
    first, *others = [features(**one, **options) for one in arguments]
    for other in others:
        first.pooler_output = [*first.pooler_output, *other.pooler_output]
        if (layers := getattr(first, "deepstack_features", None)) is not None:
            pairs = zip(layers, other.deepstack_features, strict=True)
            first.deepstack_features = [[*mine, *theirs] for mine, theirs in pairs]
    return first


def _of_prompts(
    placeholders: Callable[..., Any], is_other: Tensor, plain: int, input_ids: Tensor, *arguments: Any, **options: Any
) -> Any:
    """The placeholders of a model, without those that the policy sampled."""
    return placeholders(input_ids.masked_fill(is_other, plain), *arguments, **options)


def _plain_token(config: Any) -> int:
    """A token that stands for no picture."""
    named = {getattr(config, f"{kind}_token_id", None) for kind in ("image", "video")}
    return next(token for token in range(3) if token not in named)


def rope_offset(pictures: Pictures | None) -> int:
    """How far the positions after a prompt differ from its number of tokens."""
    if pictures is None or pictures.position_ids is None:
        return 0
    return int(pictures.position_ids.max()) + 1 - pictures.position_ids.shape[1]


def rope_offsets(pictures: Sequence[Pictures | None]) -> Tensor | None:
    """[B] int64, the `rope_offset` of each prompt; None: all are text alone."""
    return torch.tensor([rope_offset(one) for one in pictures]) if any(pictures) else None


def rope_positions(pictures: Pictures | None, num_tokens: int) -> Tensor:
    """[3, num_tokens] int64, the positions of a sequence that begins with the prompt of these pictures."""
    positions = torch.arange(num_tokens).expand(3, -1)
    if pictures is None or pictures.position_ids is None:
        return positions
    own = pictures.position_ids
    return torch.cat([own, positions[:, own.shape[1] :] + rope_offset(pictures)], 1)


def has_rope_positions(pictures: Sequence[Pictures | None]) -> bool:
    """Whether some are at positions in time, rows and columns."""
    return any(one is not None and one.position_ids is not None for one in pictures)


def padded_positions(pictures: Sequence[Pictures | None], mask: Tensor) -> Tensor:
    """Positions of sequences that begin with prompts of these pictures, and are padded on the left: [B, L] int64, or
    [3, B, L] where some have pictures at positions in time, rows and columns.

    Args:
        mask: [B, L], 0 on padding.
    """
    if not has_rope_positions(pictures):
        return (mask.cumsum(-1) - 1).clamp_(min=0)
    width, lengths = mask.shape[1], mask.sum(-1).tolist()
    own = [rope_positions(one, length) for one, length in zip(pictures, lengths, strict=True)]
    return torch.stack([pad(positions, (width - positions.shape[1], 0)) for positions in own], 1)
