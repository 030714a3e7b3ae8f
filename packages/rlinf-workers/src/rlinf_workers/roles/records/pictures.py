"""The pictures of a prompt, as a vision-language model reads them. Legend: L prompt tokens."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rlinf_comm import record


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class Pictures:
    """Pictures and videos after the model's own preprocessing, which happens once, beside the prompt's tokens: each
    picture is a run of placeholders among them."""

    arguments: dict[str, Tensor]
    """Arguments of the model, such as `pixel_values` and `image_grid_thw`. Their first dimension counts patches, tiles
    or pictures, so those of several prompts are joined along it."""
    position_ids: Tensor | None
    """[3, L] int64, the prompt's positions in time, rows and columns (M-RoPE); None: 0, 1, ..., as for text."""
    digest: str
    """Hexadecimal digest of the arguments."""

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.arguments.values())
