"""The tasks that both sides of the TRL comparison train on. Needs neither rlinf nor TRL, so that each side's
interpreter can import it. TRL_COMPARISON_TASK chooses one, for every process of a comparison:

    sort    the size of the recipe sort-grpo: 0.3M parameters, prompts of 9 tokens, completions of up to 9
    long    2.9M parameters, prompts of 6 tokens, completions of up to 32
    pictures  a Qwen2.5-VL of 3.3M parameters that sees a picture of 112 x 112 pixels (49 tokens) with each prompt
    gpu     the shape of Qwen2.5-0.5B with random weights, on one GPU: prompts of 128 tokens, completions of up to 256
    gpu-1.5B  the same with the shape of Qwen2.5-1.5B, and half as many prompts
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from typing import Any

GROUP_SIZE = 8
LEARNING_RATE = 1e-4
NUM_SPECIAL_TOKENS = 3


@dataclass(frozen=True)
class Task:
    """Sizes of one task."""

    alphabet: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    max_new_tokens: int
    num_heads: int = 4
    num_kv_heads: int = 2
    tied: bool = False
    num_prompts: int = 64
    device: str = "cpu"
    picture_size: int = 0
    """Pixels of a side of each prompt's picture; 0: prompts are text alone."""


def many_characters(count: int) -> str:
    """As many characters, of the planes for private use and of the ideographs: a vocabulary of a real size."""
    planes = (range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE), range(0x20000, 0x2A6E0))
    return "".join(map(chr, [code for plane in planes for code in plane][:count]))


TASKS = {
    "sort": Task("0123456789+=", hidden_size=96, intermediate_size=256, num_layers=3, max_new_tokens=9),
    "long": Task(
        "0123456789+=abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVW",
        hidden_size=256,
        intermediate_size=688,
        num_layers=4,
        max_new_tokens=32,
    ),
    "pictures": Task(
        "0123456789+=abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVW",
        hidden_size=256,
        intermediate_size=688,
        num_layers=4,
        max_new_tokens=16,
        num_prompts=32,
        picture_size=112,
    ),
    "gpu": Task(
        many_characters(151_936 - NUM_SPECIAL_TOKENS),
        hidden_size=896,
        intermediate_size=4864,
        num_layers=24,
        max_new_tokens=256,
        num_heads=14,
        num_kv_heads=2,
        tied=True,
        num_prompts=32,
        device="cuda",
    ),
    "gpu-1.5B": Task(
        many_characters(151_936 - NUM_SPECIAL_TOKENS),
        hidden_size=1536,
        intermediate_size=8960,
        num_layers=28,
        max_new_tokens=256,
        num_heads=12,
        num_kv_heads=2,
        tied=True,
        num_prompts=16,
        device="cuda",
    ),
}
NAME = os.environ.get("TRL_COMPARISON_TASK", "sort")
TASK = TASKS[NAME]
NUM_PROMPTS = TASK.num_prompts
"""Prompts of a step, which has NUM_PROMPTS * GROUP_SIZE completions."""
MAX_NEW_TOKENS = TASK.max_new_tokens
ALPHABET = TASK.alphabet
PICTURE_TOKENS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}"
)
"""A picture and the text, with nothing around them."""

TRL_SETTINGS: dict[str, Any] = {
    "fp16": False,
    "num_generations": GROUP_SIZE,
    "max_completion_length": MAX_NEW_TOKENS,
    "temperature": 1.0,
    "learning_rate": LEARNING_RATE,
    "lr_scheduler_type": "constant",
    "logging_steps": 1,
    "report_to": [],
    "save_strategy": "no",
    "gradient_checkpointing": False,
    "disable_tqdm": True,
}
"""What every trainer of TRL is set to."""


def prompts(step: int) -> list[str]:
    """The prompts of one step, all equally long."""
    generator = random.Random(step)
    if NAME == "sort":
        return [f"{generator.randrange(10**8):08d}=" for _ in range(NUM_PROMPTS)]
    if TASK.device == "cuda":
        return ["".join(generator.choices(ALPHABET, k=128)) for _ in range(NUM_PROMPTS)]
    return [f"{generator.randint(10, 99)}+{generator.randint(10, 99)}=" for _ in range(NUM_PROMPTS)]


def pictures(step: int) -> list[Any]:
    """The picture of each prompt, `PIL.Image.Image`."""
    import numpy as np
    from PIL import Image

    shape = (NUM_PROMPTS, TASK.picture_size, TASK.picture_size, 3)
    pixels = np.random.default_rng(step).integers(0, 256, shape, dtype=np.uint8)
    return [Image.fromarray(one) for one in pixels]


def picture_processor(folder: str, tokenizer: Any) -> Any:
    """transformers' processor, without one for videos, which needs torchvision."""
    from transformers import AutoImageProcessor, Qwen2_5_VLProcessor

    class PicturesOnly(Qwen2_5_VLProcessor):
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            return type(None) if argument is None else super().check_argument_for_proper_class(argument_name, argument)

    images = AutoImageProcessor.from_pretrained(folder, backend="pil")
    return PicturesOnly(images, tokenizer, None, chat_template=CHAT_TEMPLATE)


def reward(completion: str) -> float:
    """The share of digits in the longest completion; on the GPU, where they are rare, of characters with even codes."""
    counts = (not ord(character) % 2 if TASK.device == "cuda" else character.isdigit() for character in completion)
    return sum(counts) / MAX_NEW_TOKENS
