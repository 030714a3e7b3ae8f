"""Text and tokens of a `tokenizers` tokenizer, without transformers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

from rlinf_workers.agents.pictures import MARK, PictureText

PICTURE = -1
"""Stands for a picture among tokens until a session puts its run there."""


class TokenText:
    """Encodes and decodes with a private copy of a tokenizer, so that padding of another user cannot change it.

    Args:
        tokenizer: of `tokenizers`, or a fast one of transformers.
        special: its special tokens by role, as chat templates name them: {"eos_token": "<|im_end|>", ...}; None: those
            of a transformers tokenizer.
    """

    def __init__(self, tokenizer: Any, special: Mapping[str, str] | None = None) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
        if special is None:
            special = {
                role: str(token)
                for role, token in getattr(tokenizer, "special_tokens_map", {}).items()
                if isinstance(role, str) and not isinstance(token, list)
            }
        self._tokenizer = Tokenizer.from_str(backend.to_str())
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.special = dict(special)
        self.added = {token.content: index for index, token in self._tokenizer.get_added_tokens_decoder().items()}
        """Tokens that no merge of others gives, by text."""

    @property
    def end_id(self) -> int | None:
        """Of the token that ends a text (`eos_token`)."""
        return self._tokenizer.token_to_id(self.special["eos_token"]) if "eos_token" in self.special else None

    def id_of(self, token: str) -> int | None:
        return self._tokenizer.token_to_id(token)

    def encode(self, text: str) -> list[int]:
        """Tokens of a text; nothing is added to it."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_with_starts(self, text: str) -> tuple[list[int], list[int]]:
        """Tokens of a text, and the character at which each begins."""
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        return encoding.ids, [begin for begin, _ in encoding.offsets]

    def encode_with_pictures(self, marked: str, picture: PictureText | None) -> tuple[str, list[int], list[int]]:
        """A text with placeholders for its marks of pictures, its tokens, and the character at which each begins. The
        tokens of these placeholders, but of no others in the text, are `PICTURE`."""
        if MARK not in marked or picture is None:
            return marked, *self.encode_with_starts(marked)
        text, *others = marked.split(MARK)
        places: set[int] = set()
        for other in others:
            places.add(len(text))
            text += picture.placeholder + other
        token_ids, starts = self.encode_with_starts(text)
        pairs = zip(token_ids, starts, strict=True)
        is_picture = [token == picture.placeholder_id and start in places for token, start in pairs]
        assert sum(is_picture) == len(places), "a placeholder is a special token"
        tokens = [PICTURE if is_one else token for token, is_one in zip(token_ids, is_picture, strict=True)]
        return text, tokens, starts

    def decode(
        self, token_ids: Sequence[int], skip_special_tokens: bool = False, clean_up_tokenization_spaces: bool = False
    ) -> str:
        """Text of tokens. The arguments are those of transformers; nothing is ever cleaned up."""
        del clean_up_tokenization_spaces
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def first_added(self, text: str) -> str:
        """The first added token in a text that begins it, white space aside; "": the text begins otherwise."""
        stripped = text.lstrip()
        return max((token for token in self.added if token and stripped.startswith(token)), key=len, default="")

    def positions(self, text: str, tokens: Sequence[str]) -> re.Match[str] | None:
        """The first of these tokens in a text, the longest where several begin at one place."""
        pattern = "|".join(re.escape(token) for token in sorted(tokens, key=len, reverse=True))
        return re.search(pattern, text) if pattern else None
