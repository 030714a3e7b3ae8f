"""Pictures in the histories of sessions.

A history has all tokens of a picture but the first, in whose place is a reference: a number beyond every vocabulary
that follows from the picture's digest. So histories with different pictures differ wherever histories are compared,
hashed or logged, their lengths are those that the model reads, and a rank finds the pixels by the reference.
"""

from __future__ import annotations

import base64
import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from rlinf_workers.models.picture_files import PictureError, picture_from_data_url

Kept = TypeVar("Kept")
MOST_RECENT_BYTES = 256 << 20
"""Of the pictures that a rank remembers beside those of episodes under way."""
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


class RecentPictures(Generic[Kept]):
    """The pictures that were sent last, by digest. The process that sends pictures and the one that receives them
    remember the same ones, because both use them in the order of the messages."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, tuple[int, Kept]] = OrderedDict()
        self._num_bytes = 0

    def __contains__(self, digest: str) -> bool:
        return digest in self._kept

    def __getitem__(self, digest: str) -> Kept:
        return self._kept[digest][1]

    def use(self, digest: str, num_bytes: int, picture: Kept) -> None:
        """A message has this picture. Too many bytes: those that were used least recently are forgotten."""
        if digest in self._kept:
            self._kept.move_to_end(digest)
            return
        self._kept[digest] = num_bytes, picture
        self._num_bytes += num_bytes
        while self._num_bytes > MOST_RECENT_BYTES and len(self._kept) > 1:
            _, (forgotten_bytes, _) = self._kept.popitem(last=False)
            self._num_bytes -= forgotten_bytes

    def clear(self) -> None:
        """Forgets all."""
        self._kept.clear()
        self._num_bytes = 0


@dataclass(frozen=True, slots=True)
class MessagePicture:
    """A picture of a message, as a request brings it."""

    digest: str
    """SHA-256 of its file, or of its URL."""
    content: bytes = field(default=b"", repr=False, compare=False)
    """Its file; empty: `url` says where it is."""
    url: str = field(default="", compare=False)
    """Of a picture of the task (`PICTURE_URL`), or of one on the network."""

    @property
    def task_digest(self) -> str:
        """Digest of the picture of the task that it is; "": it is another."""
        return self.url.removeprefix(PICTURE_URL) if self.url.startswith(PICTURE_URL) else ""


class PictureSource(Protocol):
    """Where a session has the pictures of its messages from."""

    async def read(self, picture: MessagePicture) -> HistoryPicture:
        """A picture as histories have it. Raises: PictureError."""
        ...


def read_part(part: Mapping[str, Any]) -> MessagePicture:
    """The picture of a part of a message: {"type": "image_url", "image_url": {"url": ...}}, or the URL under
    `image_url`, `image` or `url` itself.

    Raises: PictureError.
    """
    url = next((part[key] for key in ("image_url", "image", "url") if part.get(key) is not None), None)
    url = url.get("url") if isinstance(url, Mapping) else url
    if not isinstance(url, str):
        raise PictureError("has no URL of a picture")
    if url.startswith("data:"):
        content = picture_from_data_url(url)
        return MessagePicture(hashlib.sha256(content).hexdigest(), content=content)
    if url.startswith((PICTURE_URL, "http://", "https://")):
        return MessagePicture(hashlib.sha256(url.encode()).hexdigest(), url=url)
    raise PictureError(f"has the URL {url[:80]!r}; pictures come as data URLs (data:image/png;base64,...)")


def part_of(content: bytes, media_type: str = "image/png") -> dict[str, Any]:
    """The file of a picture as a part of a message in OpenAI's chat form."""
    return part_of_url(f"data:{media_type};base64,{base64.b64encode(content).decode()}")


def part_of_url(url: str) -> dict[str, Any]:
    """A picture with a URL as a part of a message in OpenAI's chat form."""
    return {"type": "image_url", "image_url": {"url": url}}


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

    def written(self, content: str, placeholder: str) -> str:
        """The content of a message with what a plain text has for its pictures."""
        return content.replace(MARK, self.around.format(placeholder))


def as_parts(content: str) -> list[dict[str, str]]:
    """A content as parts of text and pictures, as chat templates read them."""
    parts: list[dict[str, str]] = []
    for number, text in enumerate(content.split(MARK)):
        parts += [{"type": "image"}] if number else []
        parts += [{"type": "text", "text": text}] if text else []
    return parts or [{"type": "text", "text": ""}]
