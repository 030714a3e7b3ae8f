"""Pictures as models read them: compared with transformers' processors, which get text and all pictures at once."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
from workers_vision_folders import tiny_folder

from rlinf_workers.models.frame_sampling import FrameSampling, sampled_frames
from rlinf_workers.models.language_model import load_tokenizer
from rlinf_workers.models.picture_processor import PICTURE_TEXTS, VIDEO_MODELS, PictureProcessor, reads_pictures
from rlinf_workers.models.pictures import has_rope_positions, joined_arguments, rope_positions

SIZES = [
    (50, 70),
    (33, 9),
    (16, 16),
    (17, 131),
    (1, 1),
    (3, 200),
    (64, 48),
    (7, 40),
    (100, 101),
    (5, 5),
    (129, 2),
    (31, 32),
]
"""Width and height."""


@dataclass(frozen=True)
class Noise:
    """A picture of random pixels."""

    size: tuple[int, int]
    seed: int = 0
    mode: str = "RGB"

    @property
    def digest(self) -> str:
        return repr(self)

    def decode(self) -> Image.Image:
        width, height = self.size
        pixels = np.random.default_rng(self.seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
        return Image.fromarray(pixels).convert(self.mode)


@dataclass(frozen=True)
class Film:
    """A video of random pixels."""

    size: tuple[int, int]
    sampling: FrameSampling
    seed: int = 0

    @property
    def digest(self) -> str:
        return repr(self)

    def decode_frames(self) -> list[Image.Image]:
        return [Noise(self.size, self.seed + index).decode() for index in self.sampling.indices]


def processor_of(folder: Path, family: str, **limits: int) -> PictureProcessor:
    if family == "smolvlm":
        pytest.importorskip("num2words")
    tiny_folder(folder, family)
    return PictureProcessor(str(folder), load_tokenizer(str(folder)), **limits)


@pytest.mark.parametrize("family", PICTURE_TEXTS)
def test_pictures_and_their_tokens_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    processor = processor_of(tmp_path, family)
    assert reads_pictures(tmp_path)
    one = processor.picture_text
    pictures = [Noise(size, seed, "RGB" if seed % 3 else "L") for seed, size in enumerate(SIZES)]
    prompts = [("a" + one + "=?", [picture]) for picture in pictures]
    prompts += [(f"{one}b\n{one}", pictures[:2]), (one + one + "a12" + one, pictures[3:6])]
    for text, prompt_pictures in prompts:
        token_ids, read = processor.encode(text, prompt_pictures)
        assert read is not None
        images: Any = [picture.decode() for picture in prompt_pictures]
        expected = processor._processor(
            text=[text], images=[images] if family == "smolvlm" else images, return_tensors="pt"
        )
        assert token_ids == expected["input_ids"][0].tolist()
        arguments = joined_arguments(read.pictures)
        for name, tensor in arguments.items():
            whole = expected[name][0] if family == "smolvlm" else expected[name]
            torch.testing.assert_close(tensor, whole.to(tensor.dtype), rtol=0, atol=0)
        assert set(arguments) == set(expected) - {"input_ids", "attention_mask", "mm_token_type_ids"}
        lengths = [processor.num_tokens(*picture.size) for picture in prompt_pictures]
        assert len(token_ids) == len(processor._tokenizer(text)["input_ids"]) + sum(lengths) - len(prompt_pictures)
        assert has_rope_positions([read]) == (family != "smolvlm")


def test_positions_are_those_that_the_model_computes_for_itself(tmp_path: Path) -> None:
    processor = processor_of(tmp_path, "qwen2_5_vl")
    token_ids, read = processor.encode(
        f"a{processor.picture_text}bc{processor.picture_text}=", [Noise((50, 70)), Noise((9, 33))]
    )
    assert read is not None
    torch.manual_seed(0)
    model: Any = Qwen2_5_VLForConditionalGeneration(processor._config).eval()
    ids, kinds = torch.tensor([token_ids]), torch.tensor([token_ids]) == processor.placeholder_id
    with torch.no_grad():
        arguments, positions = joined_arguments(read.pictures), rope_positions(read, len(token_ids))
        own = model(ids, mm_token_type_ids=kinds.int(), **arguments).logits
        with_positions = model(ids, position_ids=positions[:, None], **arguments).logits
        as_text = model(ids, position_ids=torch.arange(len(token_ids)).expand(3, 1, -1), **arguments).logits
    torch.testing.assert_close(with_positions, own, rtol=0, atol=0)
    assert not torch.equal(as_text, own)


def test_a_picture_that_prompts_share_is_processed_once(tmp_path: Path) -> None:
    processor = processor_of(tmp_path, "qwen3_vl")
    decoded = []

    @dataclass(frozen=True)
    class Counted(Noise):
        def decode(self) -> Image.Image:
            decoded.append(self.seed)
            return super().decode()

    same, other = Counted((40, 30), 1), Counted((40, 30), 2)
    first, again, different = (
        processor.encode(processor.picture_text, [picture])[1] for picture in (same, same, other)
    )
    assert decoded == [1, 2]
    assert first is not None and again is not None and different is not None
    assert first.digest == again.digest != different.digest


def test_limits_in_pixels_and_what_is_refused(tmp_path: Path) -> None:
    processor = processor_of(tmp_path / "qwen", "qwen2_5_vl", max_pixels=1024)
    assert processor.num_tokens(640, 640) == 1024 // 16**2
    text = processor.picture_text
    with pytest.raises(ValueError, match="2 times, and there are 1 pictures"):
        processor.encode(text + text, [Noise((8, 8))])
    with pytest.raises(ValueError, match="1 times, and there are 0 pictures"):
        processor.encode(text, [])
    assert processor.encode("a=", []) == (processor._tokenizer("a=")["input_ids"], None)
    with pytest.raises(ValueError, match=r"min_pixels=8192 is more than max_pixels=4096"):
        PictureProcessor(str(tmp_path / "qwen"), processor._tokenizer, min_pixels=8192)
    tiny_folder(tmp_path / "smol", "smolvlm")
    with pytest.raises(ValueError, match="has no limit in pixels"):
        PictureProcessor(str(tmp_path / "smol"), load_tokenizer(str(tmp_path / "smol")), max_pixels=1024)


# -- videos --------------------------------------------------------------------------------------------------------


FILMS = [
    Film((48, 32), FrameSampling(indices=(0, 12, 24, 36), num_frames=48, fps=24.0)),
    Film((16, 48), FrameSampling(indices=(0, 1, 2), num_frames=3, fps=1.0), seed=7),
]
"""Sizes are multiples of a token's, so that nothing is resized; the second has an odd number of frames."""
TIMES = [("0.2", "1.2"), ("0.5", "2.0")]
"""Seconds in the middle of each pair of their frames; the last frame of the second is repeated."""


def normalized(film: Film) -> torch.Tensor:
    """[1, frames, channels, rows, columns]"""
    frames = torch.stack([torch.from_numpy(np.array(frame)) for frame in film.decode_frames()])
    return ((frames / 255).permute(0, 3, 1, 2)[None] - MEAN[:, None, None]) / STD[:, None, None]


MEAN, STD = torch.tensor([0.48145466, 0.4578275, 0.40821073]), torch.tensor([0.26862954, 0.26130258, 0.27577711])


@pytest.mark.parametrize("family", VIDEO_MODELS)
def test_videos_are_those_of_transformers_between_text_and_pictures(tmp_path: Path, family: str) -> None:
    """Pixels against the patches of transformers' own video processor, positions against those of the whole prompt."""
    processor = processor_of(tmp_path, family)
    picture = Noise((32, 16))
    text = f"1{processor.video_text}2{processor.picture_text}{processor.video_text}3"
    token_ids, read = processor.encode(text, [FILMS[0], picture, FILMS[1]])
    assert read is not None
    arguments = joined_arguments(read.pictures)
    patches, grids = [], []
    for film in FILMS:
        own, *grid = Qwen3VLVideoProcessor.patchify(None, normalized(film), 8, 2, 2)  # type: ignore[arg-type]
        patches.append(own[0])
        grids.append(grid)
    assert arguments["video_grid_thw"].tolist() == grids
    torch.testing.assert_close(arguments["pixel_values_videos"], torch.cat(patches), rtol=0, atol=1e-6)

    start, end, pad = "<|vision_start|>", "<|vision_end|>", "<|video_pad|>"
    counts = [t * h * w // 4 for t, h, w in grids]
    runs = [pad * count for count in counts]
    if family != "qwen2_5_vl":  # the time is text, before each pair
        runs = [
            "".join(f"<{time} seconds>{start}{pad * (count // 2)}{end}" for time in times)
            for times, count in zip(TIMES, counts, strict=True)
        ]
    image = f"{start}{'<|image_pad|>' * 2}{end}"
    whole = f"1{start}{runs[0]}{end}2{image}{start}{runs[1]}{end}3"
    assert token_ids == processor._tokenizer(whole, add_special_tokens=False)["input_ids"]
    for film, one in zip(FILMS, (read.pictures[0], read.pictures[2]), strict=True):
        assert processor.num_video_tokens(*film.size, film.sampling) == one.num_tokens

    ids = torch.tensor([token_ids])
    types = (ids == processor.placeholder_id).int() + 2 * (ids == processor.video_placeholder_id).int()
    expected, _ = processor._outline.get_rope_index(
        ids,
        mm_token_type_ids=types,
        image_grid_thw=arguments["image_grid_thw"],
        video_grid_thw=arguments["video_grid_thw"],
        second_per_grid_ts=torch.tensor([1.0, 2.0]),  # two frames of 2, and of 1 each second
    )
    assert torch.equal(rope_positions(read, len(token_ids)), expected[:, 0])


def test_frames_are_spread_over_a_video() -> None:
    assert sampled_frames(100, 25.0, target_fps=2.0, max_frames=64).indices == (0, 14, 28, 42, 57, 71, 85, 99)
    assert sampled_frames(100, 25.0, target_fps=2.0, max_frames=3).indices == (0, 50, 99)
    assert sampled_frames(10, 25.0, target_fps=0.1, max_frames=64).indices == (0, 3, 6, 9)
    assert sampled_frames(1, 25.0, target_fps=2.0, max_frames=64).indices == (0,)


def test_the_time_of_frames_makes_another_video(tmp_path: Path) -> None:
    """Prefix caches compare digests: pixels and tokens of both are equal, positions are not."""
    processor = processor_of(tmp_path, "qwen2_5_vl")
    slow = Film(FILMS[1].size, FrameSampling(indices=(0, 1, 2), num_frames=3, fps=0.5), seed=7)
    one, other = processor.process(FILMS[1]), processor.process(slow)
    assert torch.equal(one.arguments["pixel_values_videos"], other.arguments["pixel_values_videos"])
    assert one.digest != other.digest


def test_videos_that_are_not_read_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processor = processor_of(tmp_path / "qwen", "qwen2_5_vl")
    with pytest.raises(ValueError, match=r"'<\|video_pad\|>' 1 times, and there are 0 videos"):
        processor.encode(processor.video_text, [])
    monkeypatch.setattr("transformers.__version__", "5.99.1")
    with pytest.raises(ValueError, match=r"transformers 5.99.1 was not checked with videos.*install 5.24"):
        processor.process(FILMS[0])
    smol = processor_of(tmp_path / "smol", "smolvlm")
    with pytest.raises(ValueError, match="videos are not read for model_type='smolvlm'"):
        smol.num_video_tokens(16, 16, FILMS[0].sampling)
