"""A list of rows that may be larger than memory."""

from __future__ import annotations

import os
import pickle
import tempfile
from array import array
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import BinaryIO, TypeVar, overload

T = TypeVar("T")
MOST_IN_MEMORY = 50_000
"""Entries that are kept in memory; usual rows of a chat take 2 to 5 KB each."""
MOST_BYTES_IN_MEMORY = 256 << 20
"""Bytes of pictures that are kept in memory, of entries that state theirs as `num_bytes`."""


class SpooledRows(Sequence[T]):
    """Rows that are read one by one: in memory as long as there are few, and in a temporary file as soon as there are
    more, pickled, with their offsets in memory (8 bytes a row). The file has no name and disappears with the process;
    its folder is `tempfile.gettempdir()`, which the env var TMPDIR chooses. Rows must not be changed.

    Args:
        rows: the first rows.
        most_in_memory: number of rows that are kept in memory; None: MOST_IN_MEMORY.
    """

    def __init__(self, rows: Iterable[T] = (), *, most_in_memory: int | None = None) -> None:
        self._most_in_memory = MOST_IN_MEMORY if most_in_memory is None else most_in_memory
        self._memory: list[T] = []
        self._num_bytes = 0
        self._file: BinaryIO | None = None
        self._offsets = array("q", [0])
        self._places: Sequence[int] | None = None
        """Of a subset: its rows among those of the whole."""
        self.extend(rows)

    @classmethod
    def joined(cls, parts: Sequence[SpooledRows[T]]) -> SpooledRows[T]:
        """The rows of all parts; those of a single one are not copied."""
        return parts[0] if len(parts) == 1 else cls(chain.from_iterable(parts))

    def append(self, row: T) -> None:
        """Adds a row to the end. Not for subsets."""
        assert self._places is None, "a subset does not grow"
        if self._file is None:
            self._memory.append(row)
            self._num_bytes += getattr(row, "num_bytes", 0)
            if len(self._memory) > self._most_in_memory or self._num_bytes > MOST_BYTES_IN_MEMORY:
                self._move_to_file()
        else:
            self._write(row)

    def extend(self, rows: Iterable[T]) -> None:
        for row in rows:
            self.append(row)

    def subset(self, places: Iterable[int]) -> SpooledRows[T]:
        """The rows at some places, in their order, without copying them. The whole must not grow any more."""
        chosen: SpooledRows[T] = SpooledRows()
        chosen._memory, chosen._file, chosen._offsets = self._memory, self._file, self._offsets
        chosen._places = array("q", places if self._places is None else (self._places[place] for place in places))
        return chosen

    def __len__(self) -> int:
        if self._places is not None:
            return len(self._places)
        return len(self._memory) if self._file is None else len(self._offsets) - 1

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> SpooledRows[T]: ...
    def __getitem__(self, index: int | slice) -> T | SpooledRows[T]:
        if isinstance(index, slice):
            return self.subset(range(*index.indices(len(self))))
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        place = index % len(self)
        place = place if self._places is None else self._places[place]
        if self._file is None:
            return self._memory[place]
        start, end = self._offsets[place], self._offsets[place + 1]
        self._file.flush()
        return pickle.loads(os.pread(self._file.fileno(), end - start, start))  # noqa: S301, written by this process

    def _move_to_file(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="rlinf-rows-")  # noqa: SIM115, closed with the rows
        for row in self._memory:
            self._write(row)
        self._memory = []

    def _write(self, row: T) -> None:
        assert self._file is not None
        content = pickle.dumps(row, protocol=pickle.HIGHEST_PROTOCOL)
        self._file.write(content)
        self._offsets.append(self._offsets[-1] + len(content))
