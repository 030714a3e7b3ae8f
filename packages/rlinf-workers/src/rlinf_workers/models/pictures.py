"""Calls of a vision-language model: what its vision tower reads, and the positions of what it sees.

A transformers model puts the features of its vision tower in place of the placeholders among its tokens. Here it is
known which of them stand for pictures: a placeholder that the policy sampled is a token like others, for the engine and
the trainer alike. Positions are always passed, because a model that computes them itself keeps some between its calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from rlinf_workers.models.picture_texts import PICTURE_TEXTS, TILED
from rlinf_workers.models.placement import HOST, to_device
from rlinf_workers.roles.records.pictures import Pictures, ProcessedPicture

VISION_LANGUAGE = frozenset(PICTURE_TEXTS)
"""Architectures (`model_type`) that read pictures here."""
OF_VIDEOS = {"pixel_values_videos": "pixel_values", "video_grid_thw": "image_grid_thw"}
"""Arguments of a model for videos -> those for pictures of `get_image_features`, which computes both alike."""


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
    model: Any, pictures: Sequence[Pictures | None], places: Tensor | None = None, parts: Sequence[slice] = ()
) -> Iterator[dict[str, Tensor]]:
    """Arguments with which the model sees pictures; in this context, at their own placeholders alone.

    On a CPU, its vision tower computes each picture by itself: together they would round differently, and the numbers
    of a sequence must not depend on the others of its batch.

    Args:
        pictures: of each sequence, in the order of the rows of the call; None: it is text alone.
        places: bool, of the shape of the call's token ids, or without its batch dimension: the tokens of these
            pictures. None: all placeholders are theirs.
        parts: of each picture, those of its tokens that the call has; empty: all of them. Its pictures are not tiled.
    """
    there = [picture for one in pictures if one is not None for picture in one.pictures]
    if not there:
        yield {}
        return
    base, device = model.base_model, next(model.parameters()).device
    replaced: dict[str, Any] = {}
    for method, places_of_kind in _by_kind(there).items():
        # not the model's own method for videos: transformers' Qwen3-VL calls that of pictures in it
        features = whole = base.get_image_features
        if device == HOST and len(there) > 1:
            separate = [as_of_pictures(_arguments(model, [there[place]], device)) for place in places_of_kind]
            features = partial(_one_by_one, whole, separate)
        if parts:
            assert model.config.model_type not in TILED, "refused before: the features of tiles are not in a row"
            of_kind = [_features_of(there[place], parts[place], model.config) for place in places_of_kind]
            features = partial(_parts_of, features, of_kind)
        if features is not whole:
            replaced[method] = features
    if places is not None:
        # SmolVLM finds them where it merges features, in releases of transformers that vLLM takes (5.19)
        finds = "get_placeholder_mask" if hasattr(base, "get_placeholder_mask") else "inputs_merger"
        plain = _plain_token(model.config)
        replaced[finds] = partial(_of_places, getattr(base, finds), ~places.to(device), plain)
    vars(base).update(replaced)
    try:
        yield _arguments(model, there, device)
    finally:
        for name in replaced:
            delattr(base, name)


def _by_kind(pictures: Sequence[ProcessedPicture]) -> dict[str, list[int]]:
    """Name of the model's method for pictures, and for videos, as far as there are some -> their places."""
    by_kind: dict[str, list[int]] = {}
    for place, picture in enumerate(pictures):
        kind = "video" if OF_VIDEOS.keys() & picture.arguments.keys() else "image"
        by_kind.setdefault(f"get_{kind}_features", []).append(place)
    return by_kind


def as_of_pictures(arguments: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The model's arguments for a picture or a video, with the names of those for pictures."""
    return {OF_VIDEOS.get(name, name): tensor for name, tensor in arguments.items()}


def have_features(picture: ProcessedPicture, config: Any) -> Tensor:
    """Which tokens of a picture or video stand for a feature of the tower: bool, [N]. The others are text.

    Args:
        config: of the model.
    """
    ids = picture.token_ids
    return (ids == config.image_token_id) | (ids == config.video_token_id)


def _features_of(picture: ProcessedPicture, part: slice, config: Any) -> slice:
    """Which features of a picture belong to some of its tokens: between the frames of a video there is text."""
    has_one = have_features(picture, config)
    return slice(int(has_one[: part.start].sum()), int(has_one[: part.stop].sum()))


def _arguments(model: Any, pictures: Sequence[ProcessedPicture], device: torch.device) -> dict[str, Tensor]:
    """Those of the model's call, on the device."""
    joined = {name: to_device(tensor, device) for name, tensor in joined_arguments(pictures).items()}
    if model.config.model_type in TILED:
        joined = {name: tensor[None] for name, tensor in joined.items()}
    return joined


def joined_arguments(pictures: Sequence[ProcessedPicture]) -> dict[str, Tensor]:
    """The model's arguments for several pictures."""
    names = dict.fromkeys(name for one in pictures for name in one.arguments)
    return {name: torch.cat([one.arguments[name] for one in pictures if name in one.arguments]) for name in names}


def _one_by_one(
    features: Callable[..., Any], arguments: Sequence[Mapping[str, Tensor]], *_: Any, **options: Any
) -> Any:
    """The features of several pictures, as of one call.

    Args:
        arguments: of each picture.
        options: further arguments of the model's call.
    """
    first, *others = [features(**one, **options) for one in arguments]
    pooled = [one.pooler_output for one in (first, *others)]
    # SmolVLM has its tiles in one tensor in releases of transformers that vLLM takes (5.19)
    is_tensor = isinstance(pooled[0], Tensor)
    first.pooler_output = torch.cat(pooled) if is_tensor else [feature for own in pooled for feature in own]
    for other in others:
        if (layers := getattr(first, "deepstack_features", None)) is not None:
            pairs = zip(layers, other.deepstack_features, strict=True)
            first.deepstack_features = [[*mine, *theirs] for mine, theirs in pairs]
    return first


def _parts_of(features: Callable[..., Any], parts: Sequence[slice], *arguments: Any, **options: Any) -> Any:
    """The features of some tokens of each picture."""
    outputs = features(*arguments, **options)
    outputs.pooler_output = [one[part] for one, part in zip(outputs.pooler_output, parts, strict=True)]
    if (layers := getattr(outputs, "deepstack_features", None)) is not None:
        outputs.deepstack_features = [[one[part] for one, part in zip(each, parts, strict=True)] for each in layers]
    return outputs


def _of_places(
    placeholders: Callable[..., Any], is_other: Tensor, plain: int, input_ids: Tensor, *arguments: Any, **options: Any
) -> Any:
    """The placeholders of a model, without those that stand for no picture."""
    return placeholders(input_ids.masked_fill(is_other, plain), *arguments, **options)


def _plain_token(config: Any) -> int:
    """A token that stands for no picture."""
    named = {getattr(config, f"{kind}_token_id", None) for kind in ("image", "video")}
    return next(token for token in range(3) if token not in named)


def rope_offset(pictures: Pictures | None) -> int:
    """How far the positions after a sequence differ from its number of tokens."""
    return 0 if pictures is None else sum(map(_offset, pictures.pictures))


def _offset(picture: ProcessedPicture) -> int:
    positions = picture.position_ids
    if positions is None:
        return 0
    following = int(positions.max()) + 1 if picture.next_position is None else picture.next_position
    return following - positions.shape[1]


def rope_offsets(pictures: Sequence[Pictures | None]) -> Tensor | None:
    """[B] int64, the `rope_offset` of each sequence; None: all are text alone."""
    return torch.tensor([rope_offset(one) for one in pictures]) if any(pictures) else None


def rope_positions(pictures: Pictures | None, num_tokens: int) -> Tensor:
    """[3, num_tokens] int64, the positions of a sequence with these pictures, from 0 on."""
    positions = torch.arange(num_tokens).repeat(3, 1)
    for begin, picture in () if pictures is None else zip(pictures.begins, pictures.pictures, strict=True):
        if picture.position_ids is not None and begin < num_tokens:
            end = begin + picture.num_tokens
            positions[:, begin:end] = picture.position_ids[:, : num_tokens - begin] + int(positions[0, begin])
            positions[:, end:] += _offset(picture)
    return positions


def picture_places(pictures: Pictures | None, num_tokens: int) -> Tensor:
    """[num_tokens] bool, the tokens of pictures."""
    places = torch.zeros(num_tokens, dtype=torch.bool)
    for begin, picture in () if pictures is None else zip(pictures.begins, pictures.pictures, strict=True):
        places[begin : begin + picture.num_tokens] = True
    return places


def has_rope_positions(pictures: Sequence[Pictures | None]) -> bool:
    """Whether some are at positions in time, rows and columns."""
    return any(picture.position_ids is not None for one in pictures if one is not None for picture in one.pictures)


def padded_positions(pictures: Sequence[Pictures | None], mask: Tensor) -> Tensor:
    """Positions of sequences with these pictures that are padded on the left: [B, L] int64, or [3, B, L] where some
    have pictures at positions in time, rows and columns.

    Args:
        mask: [B, L], 0 on padding.
    """
    if not has_rope_positions(pictures):
        return (mask.cumsum(-1) - 1).clamp_(min=0)
    width, lengths = mask.shape[1], mask.sum(-1).tolist()
    own = [rope_positions(one, length) for one, length in zip(pictures, lengths, strict=True)]
    return torch.stack([pad(positions, (width - positions.shape[1], 0)) for positions in own], 1)


def padded_places(pictures: Sequence[Pictures | None], mask: Tensor) -> Tensor | None:
    """[B, L] bool, as `picture_places`; None: all are text alone. The arguments are those of `padded_positions`."""
    if not any(pictures):
        return None
    width, lengths = mask.shape[1], mask.sum(-1).tolist()
    own = [picture_places(one, length) for one, length in zip(pictures, lengths, strict=True)]
    return torch.stack([pad(places, (width - len(places), 0)) for places in own])
