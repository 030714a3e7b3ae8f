"""Pictures in the histories of sessions.

A history has all tokens of a picture but the first, in whose place is a reference: a number beyond every vocabulary
that follows from the picture's digest. So histories with different pictures differ wherever histories are compared,
hashed or logged, their lengths are those that the model reads, and a rank finds the pixels by the reference.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

FIRST_REFERENCE = 1 << 62
"""Tokens from here on are references."""
PICTURE_URL = "rlinf-picture:"
"""Begins the URL of a picture that the task has, in place of its bytes; its digest follows."""
MARK = "Kq7RlinfPicture3vZ"
"""Text that stands for a picture in a message's content, and that no conversation contains."""


def reference_of(digest: str) -> int:
    """The reference of a picture.

    Args:
        digest: hexadecimal, at least 16 digits.
    """
    return FIRST_REFERENCE | int(digest[:16], 16) >> 2


def without_references(token_ids: Sequence[int]) -> list[int]:
    """Tokens that a tokenizer can decode."""
    return [token for token in token_ids if token < FIRST_REFERENCE]


class HistoryPicture(msgspec.Struct, frozen=True, kw_only=True):
    """A picture that a history may have."""

    digest: str
    """Of the picture as the model reads it."""
    token_ids: list[int]
    """As the model reads them."""

    @property
    def tokens(self) -> list[int]:
        """As a history has them."""
        return [reference_of(self.digest), *self.token_ids[1:]]


@dataclass(frozen=True, slots=True)
class MessagePicture:
    """A picture of a message, as a request brings it."""

    digest: str
    """SHA-256 of its file; of one of the task, its URL."""
    content: bytes = field(default=b"", repr=False, compare=False)
    """Its file; empty: the task has it, or `url` does."""
    url: str = field(default="", compare=False)
    """Of a picture on the network."""

    @classmethod
    def of_file(cls, content: bytes) -> MessagePicture:
        """The picture of a file."""
        return cls(hashlib.sha256(content).hexdigest(), content)


@dataclass(frozen=True, slots=True)
class PictureText:
    """How the text of a model shows a picture.

    Example, Qwen2.5-VL: PictureText("<|image_pad|>", 151655, "<|vision_start|>{}<|vision_end|>")
    """

    placeholder: str
    """Special token that stands for a picture in a text, before its run of tokens is known."""
    placeholder_id: int
    around: str
    """What a plain text has for a picture, with {} for the placeholder; a chat template writes its own."""


def as_parts(content: str) -> list[dict[str, str]]:
    """A content as parts of text and pictures, as chat templates read them."""
    parts: list[dict[str, str]] = []
    for number, text in enumerate(content.split(MARK)):
        parts += [{"type": "image"}] if number else []
        parts += [{"type": "text", "text": text}] if text else []
    return parts or [{"type": "text", "text": ""}]


def digests_of(pictures: Iterable[MessagePicture]) -> list[str]:
    """Their digests."""
    return [one.digest for one in pictures]
