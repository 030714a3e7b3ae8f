"""Pictures as models read them: compared with transformers' processors, which get text and all pictures at once."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import Qwen2_5_VLForConditionalGeneration
from workers_vision_folders import tiny_folder

from rlinf_workers.models.language_model import load_tokenizer
from rlinf_workers.models.picture_processor import PICTURE_TEXTS, PictureProcessor, reads_pictures
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
