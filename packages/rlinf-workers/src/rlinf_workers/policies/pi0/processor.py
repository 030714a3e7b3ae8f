"""Prepares observations for the model: pictures for SigLIP, the instruction as tokens.

As in openpi, pictures are scaled into a square with their aspect ratio, centred on black, with values from -1 to 1; a
prompt is the begin token, the instruction without underscores and line breaks, and a line break. transformers'
processor has the same prompt, but scales pictures by cubic interpolation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from rlinf_workers.policies.base import PolicyError
from rlinf_workers.policies.pi0.options import SENTENCEPIECE_FILES, Pi0Options
from rlinf_workers.roles.records.embodied import texts_of

BYTES = 256
BEGIN, IMAGE = BYTES, BYTES + 1
"""Token ids of the small model: one for each byte of the instruction, and two more for the beginning and a picture."""


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


BEGIN_TOKEN = "<bos>"
"""PaliGemma's begin-of-sequence token, id 2."""

TokenIds = Callable[[str], list[int]]
"""A text -> its tokens after the begin token."""


class PromptTokenizer(Protocol):
    """Turns instructions into tokens."""

    def __call__(self, rows: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """
        Args:
            rows: [n, bytes] as from `text_tensor`.
            state: [n, size], normalised, for a model whose prompt contains it.
        Returns: ids and mask (1 on tokens), [n, width] int64 each.
        Raises: PolicyError for a prompt that is too long; it is never cut.
        """
        ...

    def check(self, instruction: str) -> None:
        """Raises: PolicyError if the prompt of the instruction can be too long."""
        ...


class BytePrompts:
    """UTF-8 bytes as tokens, for a model without a tokenizer."""

    def __init__(self, width: int) -> None:
        self._width = width

    def __call__(self, rows: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        lengths = (rows != 0).sum(-1)
        check_length(1 + int(lengths.max()), self._width)
        begin = torch.full_like(rows[:, :1], BEGIN, dtype=torch.int64)
        ids = torch.cat([begin, rows[:, : self._width - 1].long()], dim=1)
        mask = torch.arange(ids.shape[1], device=rows.device)[None] <= lengths[:, None]
        return ids, mask.long()

    def check(self, instruction: str) -> None:
        check_length(len(byte_ids(instruction)), self._width, instruction)


class TokenizerPrompts:
    """Prompts by the checkpoint's tokenizer."""

    def __init__(self, ids_of: TokenIds, width: int) -> None:
        self._ids_of, self._width = ids_of, width
        self._ids: dict[str, list[int]] = {}

    def __call__(self, rows: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return padded([self._tokens(text) for text in texts_of(rows)], self._width, rows.device)

    def check(self, instruction: str) -> None:
        self._tokens(instruction)

    def _tokens(self, text: str) -> list[int]:
        if text not in self._ids:
            ids = self._ids_of(cleaned(text) + "\n")
            check_length(len(ids), self._width, text)
            self._ids[text] = ids
        return self._ids[text]


def make_prompts(options: Pi0Options) -> PromptTokenizer:
    """Prompts by the checkpoint's tokenizer, or of bytes without one."""
    if options.folder is None:
        return BytePrompts(options.max_prompt_tokens)
    return TokenizerPrompts(tokenizer_ids(options.folder), options.max_prompt_tokens)


def byte_ids(text: str) -> list[int]:
    """The tokens of a small model."""
    return [BEGIN, *text.encode()]


def tokenizer_ids(folder: str) -> TokenIds:
    """The tokens of a checkpoint's tokenizer: transformers' files, tokenizer.json alone, or sentencepiece's file.

    Raises: PolicyError for a tokenizer without a begin token, and if sentencepiece is missing.
    """
    names = {path.name for path in Path(folder).iterdir()}
    if "tokenizer.json" in names and "tokenizer_config.json" not in names:
        return _of_file(Path(folder, "tokenizer.json"))
    if "tokenizer.json" not in names and (models := [name for name in SENTENCEPIECE_FILES if name in names]):
        return _of_sentencepiece(Path(folder, models[0]))
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(Path(folder), trust_remote_code=False, local_files_only=True)
    begin = _checked_begin(tokenizer.bos_token_id, Path(folder, "tokenizer_config.json"))
    return lambda text: [begin, *tokenizer(text, add_special_tokens=False)["input_ids"]]


def _of_file(path: Path) -> TokenIds:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    begin = _checked_begin(tokenizer.token_to_id(BEGIN_TOKEN), path)
    return lambda text: [begin, *tokenizer.encode(text, add_special_tokens=False).ids]


def _of_sentencepiece(path: Path) -> TokenIds:
    try:
        from sentencepiece import SentencePieceProcessor
    except ImportError as error:
        raise PolicyError(
            f"{path} is read by the package sentencepiece, which is not installed: pip install sentencepiece, or put "
            "PaliGemma's tokenizer.json there"
        ) from error
    tokenizer: Any = SentencePieceProcessor(model_file=str(path))
    begin = _checked_begin(tokenizer.bos_id() if tokenizer.bos_id() >= 0 else None, path)
    return lambda text: [begin, *tokenizer.encode(text)]


def _checked_begin(begin: int | None, path: Path) -> int:
    if begin is None:
        raise PolicyError(f"{path} has no begin token, {BEGIN_TOKEN}, which PaliGemma's has; put its tokenizer there")
    return begin


def cleaned(instruction: str) -> str:
    """The instruction without underscores and line breaks."""
    return instruction.strip().replace("_", " ").replace("\n", " ")


def padded(rows: Sequence[list[int]], width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids and mask, [n, width] int64 each."""
    ids = torch.zeros(len(rows), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
        mask[i, : len(row)] = 1
    return ids.to(device), mask.to(device)


def check_length(length: int, width: int, instruction: str | None = None) -> None:
    """Raises: PolicyError if `length`, the number of tokens of a prompt, exceeds `width`."""
    if length > width:
        named = "" if instruction is None else f" {instruction!r}"
        raise PolicyError(
            f"the instruction{named} makes a prompt of {length} tokens, and max_prompt_tokens={width}; "
            "set policy.options.max_prompt_tokens"
        )
