"""Turns the pictures and videos of a prompt into what a vision-language model reads, with transformers' own processors.

The processors run on Pillow and NumPy (`backend="pil"`) even where torchvision is installed, so that every machine
computes the same pixels. Each picture is processed by itself and kept for prompts that share it: the processor is given
the placeholder alone with the picture, and the placeholder among a prompt's tokens is replaced by the tokens that come
back. These begin and end with special tokens, so that text around them is tokenized as it is in one pass (a test
compares both).

Videos are processed in the same way. transformers' classes for their pixels need torchvision, so frames go through the
image processor, and `FramePairs` joins their patches; placeholders, timestamps and positions come from transformers.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from rlinf_workers.models.frame_pairs import FramePairs
from rlinf_workers.models.frame_sampling import FrameSampling
from rlinf_workers.models.picture_texts import PICTURE_TEXTS, VIDEO_MODELS
from rlinf_workers.roles.records.pictures import Pictures, ProcessedPicture, pictures_of

NEEDS_EXTRA = "install it with `pip install 'rlinf-workers[vision]'`"
OF_TEXT = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
"""What a processor returns of the text."""
SECONDS = "second_per_grid_ts"
"""What a processor returns of a video's time, from which positions follow."""
VIDEO_VERSIONS = ("5.24",)
"""Releases of transformers whose placeholders and positions of videos were checked; they changed between releases."""
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


@runtime_checkable
class StoredVideo(Protocol):
    """A video whose frames are decoded when they are needed."""

    @property
    def digest(self) -> str:
        """Digest of its file and of its sampling."""
        ...

    @property
    def sampling(self) -> FrameSampling:
        """Which frames the model sees."""
        ...

    def decode_frames(self) -> Sequence[Any]:
        """Returns these frames as `PIL.Image.Image`, all of one size."""
        ...


Stored = StoredPicture | StoredVideo


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
    """Processes the pictures and videos of prompts for the model of a folder.

    Args:
        folder: of the model: config.json and preprocessor_config.json. Its code is never run.
        tokenizer: of the same folder.
        min_pixels, max_pixels: smaller pictures and frames are enlarged, larger ones reduced, as Qwen's processors do;
            None: as the folder says for pictures.
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
        self._processor = _processor(self._config, folder, image_processor(folder, min_pixels, max_pixels), tokenizer)
        text = PICTURE_TEXTS[self._config.model_type]
        self.placeholder: str = self._processor.image_token
        """Special token that stands for a picture in a text."""
        self.placeholder_id: int = tokenizer.convert_tokens_to_ids(self.placeholder)
        self.picture_text = text.format(self.placeholder)
        """What a plain prompt has in place of a picture; a chat template writes its own."""
        self.video_placeholder: str = self._processor.video_token
        """Special token that stands for a video."""
        reads_videos = self._config.model_type in VIDEO_MODELS
        self.video_placeholder_id = tokenizer.convert_tokens_to_ids(self.video_placeholder) if reads_videos else None
        self.video_text = text.format(self.video_placeholder)
        """What a plain prompt has in place of a video."""
        self._processed: OrderedDict[str, ProcessedPicture] = OrderedDict()
        self._num_bytes = 0
        self._num_tokens: dict[tuple[int, int], int] = {}

    @property
    def placeholder_ids(self) -> tuple[int | None, ...]:
        """Tokens that stand for a picture or a video."""
        return self.placeholder_id, self.video_placeholder_id

    def encode(self, text: str, pictures: Sequence[Stored]) -> tuple[list[int], Pictures | None]:
        """Returns the tokens of a text, without any that the tokenizer adds before it, and its pictures.

        Args:
            text: with one placeholder for each picture.
        Raises: ValueError if their numbers differ.
        """
        return self.insert(self._tokenizer(text, add_special_tokens=False)["input_ids"], pictures)

    def insert(self, token_ids: Sequence[int], pictures: Sequence[Stored]) -> tuple[list[int], Pictures | None]:
        """Returns the tokens with every placeholder replaced by those of its picture, and the pictures; None if there
        are none.

        Args:
            pictures: pictures in their order, and videos in theirs.
        Raises: ValueError for another number of placeholders than of pictures, or of videos.
        """
        self.check_placeholders(token_ids, pictures)
        if not pictures:
            return list(token_ids), None
        following = {
            self.placeholder_id: iter([one for one in pictures if not isinstance(one, StoredVideo)]),
            self.video_placeholder_id: iter([one for one in pictures if isinstance(one, StoredVideo)]),
        }
        whole: list[int] = []
        placed: list[tuple[int, ProcessedPicture]] = []
        for token in token_ids:
            if token in following:
                placed.append((len(whole), self.process(next(following[token]))))
                whole.extend(placed[-1][1].token_ids.tolist())
            else:
                whole.append(token)
        return whole, pictures_of(placed)

    def check_placeholders(self, token_ids: Sequence[int], pictures: Sequence[Stored]) -> None:
        """Raises: ValueError for another number of placeholders than of pictures, or of videos."""
        num_videos = sum(isinstance(one, StoredVideo) for one in pictures)
        for kind, text, token, number in (
            ("pictures", self.placeholder, self.placeholder_id, len(pictures) - num_videos),
            ("videos", self.video_placeholder, self.video_placeholder_id, num_videos),
        ):
            if token is None and number:
                self._check_videos()
            if (count := 0 if token is None else list(token_ids).count(token)) != number:
                raise ValueError(f"the text has the placeholder {text!r} {count} times, and there are {number} {kind}")

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
                self._num_tokens[size] = len(self._run_on(images=[Image.new("RGB", size)]).token_ids)
        return self._num_tokens[size]

    def num_video_tokens(self, width: int, height: int, sampling: FrameSampling) -> int:
        """Returns the number of tokens that replace the placeholder of a video with frames of this size.

        Raises: ValueError for a model whose videos are not read.
        """
        self._check_videos()
        text = self._processor.replace_video_token(
            {
                "video_grid_thw": self._processor.video_processor.grids(self.num_tokens(width, height), sampling),
                "video_metadata": [sampling.metadata()],
            },
            0,
        )
        return len(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def process(self, picture: Stored) -> ProcessedPicture:
        """Returns a picture, or a video, as the model reads it. Raises: ValueError for videos that are not read."""
        processed = self._processed.pop(picture.digest, None)
        if processed is None:
            if isinstance(picture, StoredVideo):
                self._check_videos()
                frames, sampling = picture.decode_frames(), picture.sampling
                processed = self._run_on(videos=[list(frames)], video_metadata=[sampling.metadata()])
            else:
                processed = self._run_on(images=[picture.decode()])
            self._num_bytes += processed.num_bytes
        self._processed[picture.digest] = processed
        while self._num_bytes > MOST_KEPT_BYTES and len(self._processed) > 1:
            self._num_bytes -= self._processed.popitem(last=False)[1].num_bytes
        return processed

    def _check_videos(self) -> None:
        import transformers

        if self._config.model_type not in VIDEO_MODELS:
            raise ValueError(
                f"videos are not read for model_type={self._config.model_type!r}; use one of "
                f"{', '.join(VIDEO_MODELS)}, or give some frames as pictures"
            )
        if ".".join(transformers.__version__.split(".")[:2]) not in VIDEO_VERSIONS:
            raise ValueError(
                f"transformers {transformers.__version__} was not checked with videos, whose positions changed between "
                f"its releases; install {' or '.join(VIDEO_VERSIONS)}"
            )

    def _run_on(self, **inputs: Any) -> ProcessedPicture:
        """Args: inputs: one picture, or one video, as arguments of transformers' processor."""
        placeholder = self.video_placeholder if "videos" in inputs else self.placeholder
        outputs = self._processor(
            text=[placeholder], add_special_tokens=False, do_convert_rgb=True, return_tensors="pt", **inputs
        )
        token_ids = outputs["input_ids"][0]
        of_picture = {name: tensor for name, tensor in sorted(outputs.items()) if name not in OF_TEXT}
        arguments = {name: tensor for name, tensor in of_picture.items() if name != SECONDS}
        if "pixel_values" in arguments and arguments["pixel_values"].dim() == 5:
            # [texts, tiles, channels, rows, columns]
            arguments |= {name: arguments[name][0] for name in PIXELS if name in arguments}
        if "pixel_attention_mask" in arguments:  # an eighth of the bytes of int64
            arguments["pixel_attention_mask"] = arguments["pixel_attention_mask"].bool()
        position_ids, next_position = self._positions(token_ids, of_picture)
        return ProcessedPicture(
            token_ids=token_ids,
            arguments=arguments,
            position_ids=position_ids,
            next_position=next_position,
            digest=_digest({"token_ids": token_ids, **of_picture, **arguments}),
        )

    @cached_property
    def _outline(self) -> Any:
        """The model without weights, which computes positions; None for one with positions as for text."""
        from transformers import AutoModelForImageTextToText

        with torch.device("meta"):
            model = AutoModelForImageTextToText.from_config(self._config, trust_remote_code=False)
        return model.model if hasattr(model.model, "get_rope_index") else None

    def _positions(self, token_ids: Tensor, outputs: Mapping[str, Tensor]) -> tuple[Tensor | None, int | None]:
        """[3, N] int64, and the position of a token of text after them. They do not depend on what is before them but
        for the position of their first token."""
        if self._outline is None:
            return None, None
        ids = torch.cat([token_ids, torch.full((1,), self._tokenizer.pad_token_id or 0)])[None]
        types = (ids == self.placeholder_id).int() + 2 * (ids == self.video_placeholder_id).int()
        types[:, -1] = 0
        sizes = {name: outputs[name] for name in ("image_grid_thw", "video_grid_thw", SECONDS) if name in outputs}
        positions, _ = self._outline.get_rope_index(
            ids, mm_token_type_ids=types, attention_mask=torch.ones_like(ids), **sizes
        )
        return positions[:, 0, :-1].contiguous(), int(positions[0, 0, -1])


def image_processor(folder: str, min_pixels: int | None = None, max_pixels: int | None = None) -> Any:
    """transformers' image processor of a folder; arguments and errors are those of `PictureProcessor`."""
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


def _processor(config: Any, folder: str, image_processor: Any, tokenizer: Any) -> Any:
    """transformers' processor of a model, whose video processor is `FramePairs`, or None for models whose videos are
    not read: transformers' own need torchvision."""
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    whole: Any = PROCESSOR_MAPPING[type(config)]

    class WithoutTorchvision(whole):
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            if argument_name == "video_processor":
                return type(None)
            return super().check_argument_for_proper_class(argument_name, argument)

    parts = {"image_processor": image_processor, "tokenizer": tokenizer, "video_processor": None}
    settings, _ = WithoutTorchvision.get_processor_dict(folder, local_files_only=True)
    names = WithoutTorchvision.get_attributes()
    try:
        processor = WithoutTorchvision.from_args_and_dict([parts[name] for name in names], settings)
    except ImportError as error:  # num2words, which SmolVLM's processor needs
        raise ImportError(f"{str(error).strip()} {NEEDS_EXTRA.capitalize()}") from error
    if config.model_type in VIDEO_MODELS:
        processor.video_processor = FramePairs(image_processor)
    return processor


def _digest(arguments: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in arguments.items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
