"""Tokenizes instructions in the prompt that OpenVLA was trained with (arXiv:2406.09246, section 3.1; the repository's
`prompt_builder` for models that are not tuned to chat)."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rlinf_workers.roles.records.embodied import texts_of

PROMPT = "In: What action should the robot take to {}?\nOut:"
SPACE_PIECE = "\u2581"
"""Ends every prompt if the tokenizer has this token (id 29871 of Llama 2), as in training."""
PAD, BEGIN, FIRST_WORD = 0, 1, 3
"""Ids of the word tokenizer; 2 would be the end of a sequence."""
NUM_WORDS = 1096
"""A size of about a thousand at which all words of RLinf's environments have different ids."""
NUM_WORD_IDS = FIRST_WORD + NUM_WORDS


def word_ids(text: str) -> list[int]:
    """The tokens of a text for a model without a tokenizer: a hash of each word and punctuation mark, so that no
    vocabulary is needed. A prompt has about 20 of them; as bytes it would have 80, which would take most of a small
    model's time."""
    return [BEGIN, *(FIRST_WORD + zlib.crc32(word.encode()) % NUM_WORDS for word in re.findall(r"\w+|[^\w\s]", text))]


def file_ids(path: str) -> Callable[[str], list[int]]:
    """The tokens of a text by a folder's tokenizer.json, which adds the first token itself."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(path)
    space = tokenizer.token_to_id(SPACE_PIECE)

    def ids_of(text: str) -> list[int]:
        ids = tokenizer.encode(text).ids
        return ids if space is None or ids[-1] == space else [*ids, space]

    return ids_of


class PromptTokens:
    """Instructions -> tokens and a mask. The tokens of each text are cached, since a task has few texts."""

    def __init__(self, ids_of: Callable[[str], list[int]]) -> None:
        self._ids_of = ids_of
        self._ids: dict[str, list[int]] = {}

    def __call__(self, instructions: Tensor) -> tuple[Tensor, Tensor]:
        """[n, bytes] uint8 -> ids [n, T] int64 and mask [n, T], on the same device. Shorter prompts are padded after
        their first token, where the patches are inserted, so that all end at the same position.

        Example: the prompts [1, 7, 8] and [1, 9]: ids [[1, 7, 8], [1, 0, 9]], mask [[1, 1, 1], [1, 0, 1]]
        """
        rows = [self._prompt(text) for text in texts_of(instructions)]
        ids, mask = _padded(rows)
        return ids.to(instructions.device), mask.to(instructions.device)

    def length(self, instruction: str) -> int:
        """The number of tokens of its prompt."""
        return len(self._prompt(instruction))

    def _prompt(self, text: str) -> list[int]:
        if text not in self._ids:
            self._ids[text] = self._ids_of(PROMPT.format(text.lower()))
        return self._ids[text]


def _padded(rows: Sequence[list[int]]) -> tuple[Tensor, Tensor]:
    length = max(map(len, rows))
    fills = [length - len(row) for row in rows]
    ids = [[row[0], *[PAD] * fill, *row[1:]] for row, fill in zip(rows, fills, strict=True)]
    mask = [[1, *[0] * fill, *[1] * (length - 1 - fill)] for fill in fills]
    return torch.tensor(ids), torch.tensor(mask)
