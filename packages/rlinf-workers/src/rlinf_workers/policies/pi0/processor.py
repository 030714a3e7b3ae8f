"""What the model sees of observations: pictures as SigLIP takes them, the instruction as tokens.

As openpi has it: pictures are scaled into a square with their proportions, centred on black, and take values from -1 to
1; a prompt is the instruction without underscores and line breaks, behind the token of the beginning and before a line
break. transformers' processor has the same prompt, but scales pictures by cubic interpolation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from rlinf_workers.policies.base import PolicyError
from rlinf_workers.records.embodied import texts_of

BYTES = 256
BEGIN, IMAGE = BYTES, BYTES + 1
"""Ids of the small model: a byte of the instruction is a token, and two more stand for the beginning and a picture."""


def prepare_pictures(pictures: Tensor, size: int) -> Tensor:
    """[n, H, W, 3] uint8 -> [n, 3, size, size] float32 in [-1, 1], on the pictures' device."""
    scaled = pictures.movedim(-1, 1).float() / 127.5 - 1.0
    height, width = scaled.shape[-2:]
    if (height, width) == (size, size):
        return scaled
    longer = max(height, width)
    shape = (max(1, height * size // longer), max(1, width * size // longer))
    resized = functional.interpolate(scaled, shape, mode="bilinear", antialias=True, align_corners=False)
    above, left = (size - shape[0]) // 2, (size - shape[1]) // 2
    borders = (left, size - shape[1] - left, above, size - shape[0] - above)
    return functional.pad(resized.clamp(-1.0, 1.0), borders, value=-1.0)


class Prompts(Protocol):
    """Turns instructions into tokens."""

    def __call__(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """[n, bytes] as `text_tensor` has them -> ids and mask (1 on tokens), [n, width] int64 each."""
        ...


class BytePrompts:
    """UTF-8 bytes are the tokens; for a model without a tokenizer."""

    def __init__(self, width: int) -> None:
        self._width = width

    def __call__(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        lengths = (rows != 0).sum(-1)
        _check_length(1 + int(lengths.max()), self._width)
        begin = torch.full_like(rows[:, :1], BEGIN, dtype=torch.int64)
        ids = torch.cat([begin, rows[:, : self._width - 1].long()], dim=1)
        mask = torch.arange(ids.shape[1], device=rows.device)[None] <= lengths[:, None]
        return ids, mask.long()


class TokenizerPrompts:
    """By the checkpoint's tokenizer."""

    def __init__(self, tokenizer: Any, width: int) -> None:
        self._tokenizer, self._width = tokenizer, width
        self._known: dict[str, list[int]] = {}

    def __call__(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        tokens = [self._tokens(text) for text in texts_of(rows)]
        ids = torch.zeros(len(tokens), self._width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for i, found in enumerate(tokens):
            ids[i, : len(found)] = torch.tensor(found)
            mask[i, : len(found)] = 1
        return ids.to(rows.device), mask.to(rows.device)

    def _tokens(self, text: str) -> Sequence[int]:
        if text not in self._known:
            cleaned = text.strip().replace("_", " ").replace("\n", " ")
            begin = [self._tokenizer.bos_token_id]
            found = begin + self._tokenizer(cleaned + "\n", add_special_tokens=False)["input_ids"]
            _check_length(len(found), self._width)
            self._known[text] = found
        return self._known[text]


def _check_length(length: int, width: int) -> None:
    if length > width:
        raise PolicyError(
            f"an instruction has {length} tokens, and max_prompt_tokens={width}; set policy.options.max_prompt_tokens"
        )
