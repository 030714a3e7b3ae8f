"""Pictures and videos as a vision-language model reads them. Legend: N tokens of a picture."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from rlinf_comm import record


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessedPicture:
    """A picture, or a video, after the model's own preprocessing, which happens once: a run of placeholders among
    tokens."""

    token_ids: Tensor
    """[N] int64, the run: placeholders, and what the model's processor writes between them."""
    arguments: dict[str, Tensor]
    """Arguments of the model, such as `pixel_values` and `image_grid_thw`. Their first dimension counts patches, tiles
    or pictures, so those of several pictures are joined along it."""
    position_ids: Tensor | None
    """[3, N] int64, positions in time, rows and columns (M-RoPE), from the first of the run on; None: as for text."""
    next_position: int | None = None
    """The position of the token after the run, counted from the run's first; None: the largest of its positions, and
    one. In transformers 5.24 a token after a video of Qwen2.5-VL has a smaller one."""
    digest: str
    """Hexadecimal digest of the tokens, the arguments and what positions follow from."""

    @property
    def num_tokens(self) -> int:
        """N"""
        return len(self.token_ids)

    @property
    def num_bytes(self) -> int:
        """Of the arguments."""
        return sum(tensor.nbytes for tensor in self.arguments.values())


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class Pictures:
    """The pictures among the tokens of a sequence, in their order; at least one."""

    pictures: tuple[ProcessedPicture, ...]
    begins: tuple[int, ...]
    """The place of the first token of each."""

    @property
    def digest(self) -> str:
        """Hexadecimal digest of the pictures."""
        return hashlib.sha256("".join(one.digest for one in self.pictures).encode()).hexdigest()


def pictures_of(placed: Iterable[tuple[int, ProcessedPicture]]) -> Pictures | None:
    """Pictures by the place of their first token, in order; None if there are none."""
    pairs = tuple(placed)
    if not pairs:
        return None
    return Pictures(pictures=tuple(one for _, one in pairs), begins=tuple(begin for begin, _ in pairs))
