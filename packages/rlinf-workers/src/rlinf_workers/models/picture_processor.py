"""Turns the pictures of a prompt into what a vision-language model reads, with transformers' own image processors.

The processors run on Pillow and NumPy (`backend="pil"`) even where torchvision is installed, so that every machine
computes the same pixels. Each picture is processed by itself and kept for prompts that share it: the processor is given
the placeholder alone with the picture, and the placeholder among a prompt's tokens is replaced by the tokens that come
back. These begin and end with special tokens, so that text around them is tokenized as it is in one pass (a test
compares both).

Videos need torchvision in transformers 5.24, and are not read.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from rlinf_workers.models.picture_texts import PICTURE_TEXTS
from rlinf_workers.roles.records.pictures import Pictures, ProcessedPicture, pictures_of

NEEDS_EXTRA = "install it with `pip install 'rlinf-workers[vision]'`"
OF_TEXT = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
"""What a processor returns of the text."""
PIXELS = ("pixel_values", "pixel_attention_mask")
MOST_KEPT_BYTES = 256 << 20
"""Memory of processed pictures that further prompts may share."""
PROCESSOR_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "chat_template.json",
)
"""What the folder of a vision-language model has beside those of any model."""


class StoredPicture(Protocol):
    """A picture that is decoded when it is needed."""

    @property
    def digest(self) -> str:
        """Digest of its file; pictures with the same one are processed once."""
        ...

    def decode(self) -> Any:
        """Returns a `PIL.Image.Image`."""
        ...


def reads_pictures(folder: str | Path) -> bool:
    """Whether the model of a folder has an image processor and belongs to a family whose pictures are read."""
    config = Path(folder, "config.json")
    if not config.is_file() or not any(
        Path(folder, name).is_file() for name in ("preprocessor_config.json", "processor_config.json")
    ):
        return False
    return json.loads(config.read_bytes()).get("model_type") in PICTURE_TEXTS


def copy_processor(source: str | Path, folder: str | Path) -> None:
    """Copies what a model's folder says about pictures, if it does, into another folder."""
    for name in PROCESSOR_FILES:
        if Path(source, name).is_file():
            shutil.copyfile(Path(source, name), Path(folder, name))


class PictureProcessor:
    """Processes the pictures of prompts for the model of a folder.

    Args:
        folder: of the model: config.json and preprocessor_config.json. Its code is never run.
        tokenizer: of the same folder.
        min_pixels, max_pixels: smaller pictures are enlarged, larger ones reduced, as Qwen's processors do; None: as
            the folder says.
    Raises: ValueError for a model whose pictures are not read, and for limits that its processor does not have;
        ImportError for a missing package.
    """

    def __init__(
        self, folder: str, tokenizer: Any, *, min_pixels: int | None = None, max_pixels: int | None = None
    ) -> None:
        from transformers import AutoConfig

        self._folder, self._tokenizer = folder, tokenizer
        self._config: Any = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        if self._config.model_type not in PICTURE_TEXTS:
            raise ValueError(
                f"{folder}: pictures are not read for model_type={self._config.model_type!r}; use one of "
                f"{', '.join(PICTURE_TEXTS)}"
            )
        self._processor = _without_videos(
            self._config, folder, _image_processor(folder, min_pixels, max_pixels), tokenizer
        )
        self.placeholder: str = self._processor.image_token
        """Special token that stands for a picture in a text."""
        self.placeholder_id: int = tokenizer.convert_tokens_to_ids(self.placeholder)
        self.picture_text = PICTURE_TEXTS[self._config.model_type].format(self.placeholder)
        """What a plain prompt has in place of a picture; a chat template writes its own."""
        self._processed: OrderedDict[str, ProcessedPicture] = OrderedDict()
        self._num_bytes = 0
        self._num_tokens: dict[tuple[int, int], int] = {}

    def encode(self, text: str, pictures: Sequence[StoredPicture]) -> tuple[list[int], Pictures | None]:
        """Returns the tokens of a text, without any that the tokenizer adds before it, and its pictures.

        Args:
            text: with one placeholder for each picture.
        Raises: ValueError if their numbers differ.
        """
        return self.insert(self._tokenizer(text, add_special_tokens=False)["input_ids"], pictures)

    def insert(self, token_ids: Sequence[int], pictures: Sequence[StoredPicture]) -> tuple[list[int], Pictures | None]:
        """Returns the tokens with every placeholder replaced by those of its picture, and the pictures; None if there
        are none.

        Raises: ValueError for another number of placeholders than of pictures.
        """
        if (num_placeholders := list(token_ids).count(self.placeholder_id)) != len(pictures):
            raise ValueError(
                f"the text has the placeholder {self.placeholder!r} {num_placeholders} times, and there are "
                f"{len(pictures)} pictures"
            )
        if not pictures:
            return list(token_ids), None
        following = iter([self.process(picture) for picture in pictures])
        whole: list[int] = []
        placed: list[tuple[int, ProcessedPicture]] = []
        for token in token_ids:
            if token == self.placeholder_id:
                placed.append((len(whole), next(following)))
                whole.extend(placed[-1][1].token_ids.tolist())
            else:
                whole.append(token)
        return whole, pictures_of(placed)

    def num_tokens(self, width: int, height: int) -> int:
        """Returns the number of tokens that replace the placeholder of a picture of this size in pixels."""
        size = (width, height)
        if size not in self._num_tokens:
            from PIL import Image

            count = getattr(self._processor.image_processor, "get_number_of_image_patches", None)
            patches = count(height, width, {}) if count is not None else None
            if isinstance(patches, int):  # other processors return rows and columns as well
                self._num_tokens[size] = patches // self._processor.image_processor.merge_size**2
            else:
                self._num_tokens[size] = len(self._run(Image.new("RGB", size)).token_ids)
        return self._num_tokens[size]

    def process(self, picture: StoredPicture) -> ProcessedPicture:
        """Returns a picture as the model reads it."""
        processed = self._processed.pop(picture.digest, None)
        if processed is None:
            processed = self._run(picture.decode())
            self._num_bytes += processed.num_bytes
        self._processed[picture.digest] = processed
        while self._num_bytes > MOST_KEPT_BYTES and len(self._processed) > 1:
            self._num_bytes -= self._processed.popitem(last=False)[1].num_bytes
        return processed

    def _run(self, image: Any) -> ProcessedPicture:
        outputs = self._processor(
            text=[self.placeholder], images=[image], add_special_tokens=False, do_convert_rgb=True, return_tensors="pt"
        )
        token_ids = outputs["input_ids"][0]
        arguments = {name: tensor for name, tensor in sorted(outputs.items()) if name not in OF_TEXT}
        if arguments["pixel_values"].dim() == 5:  # [texts, tiles, channels, rows, columns]
            arguments |= {name: arguments[name][0] for name in PIXELS if name in arguments}
        if "pixel_attention_mask" in arguments:  # an eighth of the bytes of int64
            arguments["pixel_attention_mask"] = arguments["pixel_attention_mask"].bool()
        return ProcessedPicture(
            token_ids=token_ids,
            arguments=arguments,
            position_ids=self._position_ids(token_ids, arguments),
            digest=_digest({"token_ids": token_ids, **arguments}),
        )

    @cached_property
    def _outline(self) -> Any:
        """The model without weights, which computes positions; None for one with positions as for text."""
        from transformers import AutoModelForImageTextToText

        with torch.device("meta"):
            model = AutoModelForImageTextToText.from_config(self._config, trust_remote_code=False)
        return model.model if hasattr(model.model, "get_rope_index") else None

    def _position_ids(self, token_ids: Tensor, arguments: Mapping[str, Tensor]) -> Tensor | None:
        """[3, N] int64; transformers goes on from the largest, so those of a picture do not depend on what is before
        it."""
        if self._outline is None:
            return None
        ids = token_ids[None]
        positions, _ = self._outline.get_rope_index(
            ids,
            mm_token_type_ids=(ids == self.placeholder_id).int(),
            image_grid_thw=arguments["image_grid_thw"],
            attention_mask=torch.ones_like(ids),
        )
        return positions[:, 0].contiguous()


def _image_processor(folder: str, min_pixels: int | None, max_pixels: int | None) -> Any:
    try:
        import PIL.Image
        from transformers import AutoImageProcessor
    except ImportError as error:
        raise ImportError(f"pictures need the package pillow; {NEEDS_EXTRA}") from error
    assert PIL.Image is not None, "imported for its error"
    processor = AutoImageProcessor.from_pretrained(
        folder, backend="pil", trust_remote_code=False, local_files_only=True
    )
    limits = {"shortest_edge": min_pixels, "longest_edge": max_pixels}
    if any(limit is not None for limit in limits.values()):
        size = {name: getattr(processor.size, name, None) or 0 for name in limits}
        if not hasattr(processor, "merge_size") or 0 in size.values():
            raise ValueError(
                f"{folder}: its {type(processor).__name__} has no limit in pixels, so min_pixels and max_pixels cannot "
                "be set; it scales pictures as its preprocessor_config.json says"
            )
        size |= {name: limit for name, limit in limits.items() if limit is not None}
        if size["shortest_edge"] > size["longest_edge"]:
            raise ValueError(
                f"{folder}: min_pixels={size['shortest_edge']} is more than max_pixels={size['longest_edge']}"
            )
        processor.size = type(processor.size)(**size)
    return processor


def _without_videos(config: Any, folder: str, image_processor: Any, tokenizer: Any) -> Any:
    """transformers' processor of a model, without a video processor, whose classes need torchvision."""
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    whole: Any = PROCESSOR_MAPPING[type(config)]

    class PicturesOnly(whole):
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            if argument_name == "video_processor":
                return type(None)
            return super().check_argument_for_proper_class(argument_name, argument)

    parts = {"image_processor": image_processor, "tokenizer": tokenizer, "video_processor": None}
    settings, _ = PicturesOnly.get_processor_dict(folder, local_files_only=True)
    try:
        return PicturesOnly.from_args_and_dict([parts[name] for name in PicturesOnly.get_attributes()], settings)
    except ImportError as error:  # num2words, which SmolVLM's processor needs
        raise ImportError(f"{str(error).strip()} {NEEDS_EXTRA.capitalize()}") from error


def _digest(arguments: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in arguments.items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
