"""Memory of the caller's, into which an environment writes the pictures that it shows.

A picture is large, and who asked for it often hands it on: to a policy in another process, say. Where the caller lends
memory that can be handed on as it is, the only copy of a picture is the one from the simulator's buffer into its row
of the batch; else whoever hands it on copies it again. An environment of one's own knows nothing of this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

Places = Callable[[str, str], "Tensor | None"]
"""("observation" or "final_observation", name of a field of pictures) -> [N, H, W, C] uint8, contiguous, where the next
such pictures are to be written; None: in memory of the environment's own."""


class PictureMemory(Protocol):
    """A file in memory, mapped here as a whole, in which there is room for tensors.

    A tensor belongs to who asked for it until the last name for it is gone, in any process; only then is its memory
    given again. So nothing that was shown is ever overwritten.
    """

    @property
    def fd(self) -> int:
        """The file, for processes that simulate; open for as long as environments use it."""
        ...

    def empty(self, shape: Sequence[int]) -> Tensor | None:
        """A contiguous uint8 tensor, whatever is in it; None where there is no room now. Threads may call it."""
        ...

    def offset(self, tensor: Tensor) -> int:
        """Bytes from the beginning of the file to the first of a tensor that `empty` gave, or of some of its rows."""
        ...
