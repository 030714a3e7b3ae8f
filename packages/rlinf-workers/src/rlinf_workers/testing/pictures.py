"""Tiny vision-language models, and prompts with pictures and videos for them."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlinf_workers.models.language_model import ModelSettings, build_model
from rlinf_workers.models.packed import pack_without_padding
from rlinf_workers.models.pictures import auto_class
from rlinf_workers.roles.records.language import Prompt, SampleGroup
from rlinf_workers.roles.records.pictures import ProcessedPicture, pictures_of
from rlinf_workers.testing.architectures import SIZES, save_random, write_tokenizer
from rlinf_workers.testing.backends import NUM_ROWS
from rlinf_workers.testing.language_backends import LENGTH, LanguageSubject

IMAGE = 15
"""Token of the tiny models that stands for a picture."""
VIDEO = 16
"""That of a video."""
START = 17
END = 18
PATCH = 8
MERGE = 2
SECONDS = 1.5
"""Between the groups of frames of a video."""
_TEXT = {**SIZES, "hidden_size": 32, "tie_word_embeddings": False, "max_position_embeddings": 256}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
_TOWER = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": PATCH}
_TOWER |= {"out_hidden_size": 32, "spatial_merge_size": MERGE, "temporal_patch_size": 2}
_TOKENS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END}
_SPECIAL = {"image": "<|image_pad|>", "video": "<|video_pad|>"}
_SPECIAL |= {"vision_start": "<|vision_start|>", "vision_end": "<|vision_end|>"}
_QWEN3 = {
    "text_config": {**_TEXT, "rope_parameters": {**_ROPE, "mrope_interleaved": True}},
    "vision_config": {**_TOWER, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64},
    **_TOKENS,
}
_CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {
        "text_config": {**_TEXT, "rope_parameters": _ROPE},
        "vision_config": {**_TOWER, "window_size": 4 * PATCH, "fullatt_block_indexes": [1]},
        **_TOKENS,
    },
    "qwen3_vl": _QWEN3,
    "qwen3_vl_moe": {
        **_QWEN3,
        "text_config": {
            **_QWEN3["text_config"],
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "decoder_sparse_step": 1,
        },
    },
    "smolvlm": {
        "text_config": {**_TEXT, "model_type": "llama"},
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 4 * PATCH,
            "patch_size": PATCH,
        },
        "image_token_id": IMAGE,
        "scale_factor": MERGE,
        "pad_token_id": 0,
    },
}


def tiny_vision_language(
    name: str, folder: Path, *, head_dim: int = 8, intermediate_size: int | None = None
) -> ModelSettings:
    """Writes a model of an architecture of `models.pictures.VISION_LANGUAGE`, with random weights, a tokenizer and an
    image processor.

    Args:
        head_dim: of its decoder, a multiple of 8; its hidden size is four times as much.
        intermediate_size: of the MLPs in decoder and tower.
    """
    from transformers import AutoConfig

    parts = copy.deepcopy(_CONFIGS[name])
    text, eighth = parts["text_config"], head_dim // 8
    text |= {"hidden_size": 4 * head_dim, "head_dim": head_dim}
    if intermediate_size is not None:
        text["intermediate_size"] = parts["vision_config"]["intermediate_size"] = intermediate_size
    if "rope_parameters" in text:
        text["rope_parameters"]["mrope_section"] = [eighth, eighth, 2 * eighth]
        parts["vision_config"]["out_hidden_size"] = 4 * head_dim
    config = AutoConfig.for_model(name, tie_word_embeddings=False, **parts)
    settings = save_random(auto_class(config).from_config(config, dtype=torch.float32), folder)
    special = {token: ids for key, token in _SPECIAL.items() if (ids := config.to_dict().get(f"{key}_token_id"))}
    write_tokenizer(folder, special)
    if name == "smolvlm":
        pictures: dict[str, Any] = {"image_processor_type": "SmolVLMImageProcessor"}
        pictures |= {"size": {"longest_edge": 12 * PATCH}, "max_image_size": {"longest_edge": 4 * PATCH}}
    else:
        pictures = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": PATCH, "merge_size": MERGE}
        pictures |= {"min_pixels": (MERGE * PATCH) ** 2, "max_pixels": (8 * MERGE * PATCH) ** 2}
    (folder / "preprocessor_config.json").write_text(json.dumps(pictures))
    return settings


def random_picture(model: Any, size: tuple[int, ...], generator: torch.Generator) -> ProcessedPicture:
    """A picture, or a video, of random numbers.

    Args:
        size: rows and columns of its placeholders, behind the number of its groups of frames if it is a video; of a
            tiled model, pictures of more than two have two tiles with text before each, and none is a video.
    """
    if model.config.model_type == "smolvlm":
        num_tiles, side = 1 + (math.prod(size) > 2), 4 * PATCH
        token_ids = torch.tensor([[2 + tile, *[IMAGE] * MERGE * MERGE] for tile in range(num_tiles)]).flatten()
        is_picture = torch.ones(num_tiles, side, side, dtype=torch.bool)
        is_picture[-1, (4 - size[-1] % 2) * PATCH :] = False  # of an odd one, the last row of patches is beside it
        pixels = torch.randn(num_tiles, 3, side, side, generator=generator)
        arguments = {"pixel_attention_mask": is_picture, "pixel_values": pixels}
    else:
        *groups, rows, columns = size
        pixels = torch.randn(math.prod(size) * MERGE * MERGE, 3 * 2 * PATCH * PATCH, generator=generator)
        grid = torch.tensor([[*(groups or [1]), MERGE * rows, MERGE * columns]])
        if groups:
            arguments = {"pixel_values_videos": pixels, "video_grid_thw": grid}
        else:
            arguments = {"pixel_values": pixels, "image_grid_thw": grid}
        if not groups:
            token_ids = torch.full((rows * columns,), IMAGE)
        elif model.config.model_type == "qwen2_5_vl":
            token_ids = torch.full((math.prod(size),), VIDEO)
        else:  # each group has its time before it
            frames = [[2 + group, 3, START, *[VIDEO] * (rows * columns), END] for group in range(groups[0])]
            token_ids = torch.tensor(frames).flatten()
    positions = own_positions(model, torch.cat([token_ids, torch.zeros(1, dtype=torch.int64)]), arguments)
    sha = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in arguments.values()))
    return ProcessedPicture(
        token_ids=token_ids,
        arguments=arguments,
        position_ids=None if positions is None else positions[:, :-1],
        next_position=None if positions is None else int(positions[0, -1]),
        digest=sha.hexdigest(),
    )


def prompt_with_pictures(
    model: Any, index: int, sizes: Sequence[tuple[int, ...]], *, num_words: int = 3, seed: int | None = None
) -> Prompt:
    """A prompt of words, with a picture of random numbers after each of the first.

    Args:
        sizes: of the pictures, as for `random_picture`.
        seed: of the pictures; None: the index.
    """
    generator = torch.Generator().manual_seed(index if seed is None else seed)
    words = torch.randint(2, 13, (max(num_words, len(sizes)),), generator=torch.Generator().manual_seed(len(sizes)))
    placed: list[tuple[int, ProcessedPicture]] = []
    token_ids: list[int] = []
    for number, word in enumerate(words.tolist()):
        token_ids.append(word)
        if number < len(sizes):
            picture = random_picture(model, sizes[number], generator)
            placed.append((len(token_ids) + 1, picture))
            token_ids += [START, *picture.token_ids.tolist(), END]
    return Prompt(index=index, token_ids=torch.tensor(token_ids), reference_answer="", pictures=pictures_of(placed))


def own_positions(
    model: Any, token_ids: Tensor, arguments: Mapping[str, Tensor], places: Tensor | None = None
) -> Tensor | None:
    """[3, L] int64, transformers' own positions; None: they are as for text.

    Args:
        arguments: the model's, of the pictures.
        places: [L] bool, the tokens of pictures; None: all placeholders.
    """
    if not hasattr(model.model, "get_rope_index"):
        return None
    types = (token_ids == IMAGE).int() + 2 * (token_ids == VIDEO).int()
    grids = {name: arguments[name] for name in ("image_grid_thw", "video_grid_thw") if name in arguments}
    if "video_grid_thw" in grids:
        grids["second_per_grid_ts"] = torch.full((len(grids["video_grid_thw"]),), SECONDS)
    types = types if places is None else types * places
    return model.model.get_rope_index(token_ids[None], mm_token_type_ids=types[None], **grids)[0][:, 0]


class SeeingSubject(LanguageSubject):
    """A Qwen3-VL for the conformance suite of training backends; every second prompt is text alone, so that ranks and
    micro-batches differ in what they see."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._model = replace(tiny_vision_language("qwen3_vl", Path(self._folder.name)), has_weights=False)
        model = build_model(self._model, torch.device("cpu"))
        sizes = [[(1, 1 + row % 3)] if row % 2 else [] for row in range(NUM_ROWS)]
        self._groups = [_one_completion(prompt_with_pictures(model, row, each)) for row, each in enumerate(sizes)]

    def rows(self, which: slice) -> Any:
        return pack_without_padding(self._groups[which])


def _one_completion(prompt: Prompt) -> SampleGroup:
    mask = (torch.arange(LENGTH) <= prompt.index % LENGTH).float()[None]
    ids = torch.randint(2, 13, mask.shape, generator=torch.Generator().manual_seed(prompt.index)) * mask.long()
    zeros = torch.zeros_like(mask)
    return SampleGroup(prompt=prompt, completion_ids=ids, loss_mask=mask, rollout_logprobs=zeros, policy_version=0)
