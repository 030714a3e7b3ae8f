"""Converts prompts and sampling settings to vLLM's requests, and its outputs to answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlinf_workers.engines.base import UnfinishedCompletion
from rlinf_workers.engines.completions import ServerAnswer, sampling_seed
from rlinf_workers.engines.picture_places import picture_places
from rlinf_workers.engines.sampling import SamplingSettings
from rlinf_workers.models.pictures import joined_arguments, rope_positions
from rlinf_workers.roles.records.language import Prompt
from rlinf_workers.roles.records.pictures import Pictures, ProcessedPicture

POSITIONS = {"image": "rlinf_positions", "video": "rlinf_video_positions"}
"""Names under which each picture, and each video, carries its own positions, [3, N + 1], those of its tokens and of the
one behind them, from which the extension makes those of a prompt. So all that vLLM knows of a picture follows from its
digest, and its core process needs it once."""
PIXELS = {"image": "pixel_values", "video": "pixel_values_videos"}
"""The argument of the model that has the patches or tiles of what is seen, one after the other."""
BESIDE_PIXELS = ("pixel_attention_mask",)
"""Arguments that have something for each of them."""


def prompt_input(prompt: Prompt, token_ids: list[int], placeholders: Mapping[str, int | None]) -> Any:
    """vLLM's input for a prompt and the tokens of its completion so far.

    Pictures and videos go as they are, with their places among the prompt's tokens: vLLM processes nothing again.

    Args:
        token_ids: the prompt's, then those of its completion.
        placeholders: of pictures and videos (`PIXELS`); between those of one there may be text, such as the time, or
            the place of a tile.
    Raises: ValueError if the prompt has other tokens where its pictures are.
    """
    if prompt.pictures is None:
        return {"prompt_token_ids": token_ids}
    from transformers.feature_extraction_utils import BatchFeature
    from vllm.inputs.engine import mm_input  # pyright: ignore[reportMissingImports]
    from vllm.multimodal.inputs import (  # pyright: ignore[reportMissingImports]
        MultiModalFieldConfig,
        MultiModalKwargsItems,
        PlaceholderRange,
    )

    arguments: dict[str, Tensor | list[Tensor]] = {}
    fields, digests, places = {}, {}, {}
    pairs = list(zip(prompt.pictures.pictures, picture_places(prompt), strict=True))
    for kind, pixels in PIXELS.items():
        own = [(picture, place) for picture, place in pairs if pixels in picture.arguments]
        if not own:
            continue
        sizes = torch.tensor([len(picture.arguments[pixels]) for picture, _ in own])
        of_kind: dict[str, Tensor | list[Tensor]] = {**joined_arguments([picture for picture, _ in own])}
        if any(picture.position_ids is not None for picture, _ in own):
            of_kind[POSITIONS[kind]] = [_positions(picture) for picture, _ in own]
        else:
            of_kind["num_patches"] = sizes  # vLLM calls tiles so
        for name in of_kind:
            is_flat = name in (pixels, *BESIDE_PIXELS)
            fields[name] = (
                MultiModalFieldConfig.flat_from_sizes(kind, sizes)
                if is_flat
                else MultiModalFieldConfig.batched(kind, keep_on_cpu=True)
            )
        arguments |= of_kind
        digests[kind] = [picture.digest for picture, _ in own]
        places[kind] = [
            PlaceholderRange(offset=first, length=length, is_embed=picture.token_ids == placeholders[kind])
            for picture, (first, length) in own
        ]
    items = MultiModalKwargsItems.from_hf_inputs(BatchFeature(arguments), fields)
    return mm_input(token_ids, items, digests, places)


def _positions(picture: ProcessedPicture) -> Tensor:
    """[3, N + 1], see `POSITIONS`."""
    return rope_positions(Pictures(pictures=(picture,), begins=(0,)), picture.num_tokens + 1)


def request_parameters(
    request: UnfinishedCompletion, sampling: SamplingSettings, stop_token_ids: Sequence[int]
) -> dict[str, Any]:
    """Arguments of vLLM's `SamplingParams` for the rest of a completion.

    A continued completion gets a seed of its own, since vLLM's generator begins anew with each request.
    """
    key, num_tokens = request.noise, len(request.token_ids)
    return {
        "max_tokens": sampling.max_new_tokens - num_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "stop_token_ids": list(stop_token_ids),
        "ignore_eos": True,  # the ids above are all that end a completion
        "logprobs": 0,  # those of the sampled tokens
        "flat_logprobs": True,
        "detokenize": False,
        "seed": sampling_seed(key.seed, key.step, key.index, request.member, *([num_tokens] if num_tokens else [])),
    }


def answer_of(output: Any) -> ServerAnswer:
    """Converts vLLM's output for a request (`CompletionOutput`)."""
    return ServerAnswer(
        token_ids=list(output.token_ids),
        logprobs=[] if output.logprobs is None else list(output.logprobs.logprobs),
        versions=[(span.end, span.version) for span in output.weight_versions or ()],
        reason=output.finish_reason,
        details=output.stop_reason,
    )
