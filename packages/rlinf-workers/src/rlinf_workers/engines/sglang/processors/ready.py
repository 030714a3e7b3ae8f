"""Pictures of prompts, which come processed, on their way into SGLang."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import (  # pyright: ignore[reportMissingImports]
    Modality,
    MultimodalDataItem,
    MultimodalProcessorOutput,
)
from sglang.srt.models.qwen2_5_vl import (  # pyright: ignore[reportMissingImports]
    Qwen2_5_VLForConditionalGeneration,
)
from sglang.srt.models.qwen3_vl import Qwen3VLForConditionalGeneration  # pyright: ignore[reportMissingImports]
from sglang.srt.models.qwen3_vl_moe import (  # pyright: ignore[reportMissingImports]
    Qwen3VLMoeForConditionalGeneration,
)
from sglang.srt.multimodal.processors.base_processor import (  # pyright: ignore[reportMissingImports]
    BaseMultimodalProcessor,
)

from rlinf_workers.engines.picture_places import picture_places
from rlinf_workers.models.pictures import as_of_pictures, have_features, rope_offset, rope_positions
from rlinf_workers.roles.records.language import Prompt


class ReadyPictures(BaseMultimodalProcessor):
    """Hands on a prompt's own pixels, placeholders and positions; processes nothing.

    SGLang's tokenizer manager, in the worker's process, asks it for the pictures of each request.
    """

    models = (
        Qwen2_5_VLForConditionalGeneration,
        Qwen3VLForConditionalGeneration,
        Qwen3VLMoeForConditionalGeneration,
    )
    prefer_tokenized_input = True

    def __init__(self, hf_config: Any, *_: Any, **__: Any) -> None:
        """SGLang's own would start threads and processes that decode pictures."""
        self._config = hf_config

    async def process_mm_data_async(
        self, image_data: Sequence[Prompt], *_: Any, input_text: list[int], **__: Any
    ) -> MultimodalProcessorOutput:
        """
        Args:
            image_data: the prompt; SGLang hands on what a request has, without reading it.
            input_text: the tokens of the request: the prompt's, then those of its completion so far.
        """
        (prompt,) = image_data
        assert prompt.pictures is not None, "requests of text alone have no image_data"
        items = []
        for (first, _length), picture in zip(picture_places(prompt), prompt.pictures.pictures, strict=True):
            arguments = as_of_pictures(picture.arguments)
            item = MultimodalDataItem(
                modality=Modality.IMAGE,  # also of a video: the tower computes both alike
                feature=arguments["pixel_values"].clone(),  # a message has the whole storage of a tensor
                offsets=_runs(have_features(picture, self._config), first),
            )
            item.image_grid_thw = arguments["image_grid_thw"].clone()
            item.set_identity(bytes.fromhex(picture.digest))
            items.append(item)
        return MultimodalProcessorOutput(
            mm_items=items,
            input_ids=input_text,
            im_token_id=self._config.image_token_id,
            mrope_positions=rope_positions(prompt.pictures, len(input_text)),
            mrope_position_delta=torch.tensor([[rope_offset(prompt.pictures)]]),
        )

    def clear_preprocess_cache(self) -> None:
        """SGLang calls it with the caches that new weights empty; nothing is kept here."""

    def shutdown(self) -> None:
        """SGLang calls it when the engine ends."""


def _runs(has_feature: torch.Tensor, first: int) -> list[tuple[int, int]]:
    """The first and the last token of each run of placeholders: a video of Qwen3-VL has text between its frames.

    Args:
        has_feature: bool [N], of the tokens of a picture or video.
        first: the place of its first token in the prompt.
    """
    places = has_feature.nonzero().flatten().tolist()
    begins = [place for place in places if place == 0 or not has_feature[place - 1]]
    ends = [place for place in places if place + 1 == len(has_feature) or not has_feature[place + 1]]
    return [(first + begin, first + end) for begin, end in zip(begins, ends, strict=True)]
