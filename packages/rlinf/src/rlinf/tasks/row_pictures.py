"""The pictures and videos of a row: in columns, or in the parts of a chat, and where they go in its text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from rlinf.tasks.pictures import (
    COLUMNS,
    HOLDERS,
    MARKER,
    VIDEO_COLUMNS,
    VIDEO_MARKER,
    PictureError,
    PictureReading,
    read_picture,
)
from rlinf.tasks.row_values import RowError, column_of, is_list, value_at
from rlinf.tasks.rows import Row
from rlinf.tasks.videos import PictureOrVideo, read_video

if TYPE_CHECKING:
    from rlinf.tasks.base import Turns

ColumnName = str | Literal[False] | None
"""Name of a column; None: a usual one; False: none is read."""
PARTS = {"image": MARKER, "image_url": MARKER, "input_image": MARKER, "video": VIDEO_MARKER, "video_url": VIDEO_MARKER}
"""Type of a part of a turn -> what stands for it in the text."""


class PictureColumns(Protocol):
    """Which columns have pictures and videos."""

    @property
    def images(self) -> ColumnName: ...
    @property
    def videos(self) -> ColumnName: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class RowPictures:
    """The pictures and the videos of a row, as the row has them, each in their order."""

    pictures: tuple[Any, ...] = ()
    videos: tuple[Any, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.pictures or self.videos)

    @property
    def by_marker(self) -> Iterator[tuple[str, str, tuple[Any, ...]]]:
        """Yields the marker and the name of each kind that the row has, and its values."""
        if self.pictures:
            yield MARKER, "picture", self.pictures
        if self.videos:
            yield VIDEO_MARKER, "video", self.videos


NO_PICTURES = RowPictures()


def marker_of_part(part: Any) -> str | None:
    """What stands for a part of a turn in its text; None: it is no picture and no video."""
    return PARTS.get(str(part.get("type"))) if isinstance(part, Mapping) else None


def new_parts(columns: PictureColumns) -> list[Any] | None:
    """A list that gets the parts of a chat; None: none are read."""
    return None if columns.images is False and columns.videos is False else []


def pictures_columns(values: Mapping[str, Any], columns: PictureColumns) -> dict[str, str | None]:
    """Returns `images` and `videos` -> name of the column, as far as the row has them."""
    names: dict[str, str | None] = {}
    for use, name, usual in (("images", columns.images, COLUMNS), ("videos", columns.videos, VIDEO_COLUMNS)):
        if not isinstance(name, bool) and (column := column_of(values, name, usual, is_needed=False)):
            names[use] = column
    return names


def pictures_of_row(
    values: Mapping[str, Any], parts: Sequence[Mapping[str, Any]] | None, columns: PictureColumns
) -> RowPictures:
    """The pictures and videos of a row: in the parts of its chat, or in a column, if the parts say where they go alone.

    Raises: RowError.
    """
    return RowPictures(
        pictures=_of_kind(values, parts or (), columns.images, COLUMNS, MARKER, "pictures"),
        videos=_of_kind(values, parts or (), columns.videos, VIDEO_COLUMNS, VIDEO_MARKER, "videos"),
    )


def _of_kind(
    values: Mapping[str, Any],
    parts: Sequence[Mapping[str, Any]],
    name: ColumnName,
    usual: Sequence[str],
    marker: str,
    kind: str,
) -> tuple[Any, ...]:
    parts = [part for part in parts if marker_of_part(part) == marker]
    if name is False:
        if parts:
            raise RowError(f"the chat has {kind}, and columns of {kind} are not read")
        return ()
    column = _in_column(values, name, usual)
    own = [part for part in parts if any(part.get(holder) is not None for holder in HOLDERS)]
    if not own and (column or not parts):
        return column
    if len(own) < len(parts):
        raise RowError(f"of {len(parts)} {kind} in the chat {len(parts) - len(own)} have no path, bytes or URL")
    return tuple(own)


def _in_column(values: Mapping[str, Any], name: str | None, usual: Sequence[str]) -> tuple[Any, ...]:
    """None where the row has no such column, or null in it."""
    column = column_of(values, name, usual, is_needed=name is not None)
    value = None if column is None else value_at(values, column)
    return () if value is None else tuple(value) if is_list(value) else (value,)


def place_pictures(
    prompt: str | None, turns: Turns, in_row: RowPictures, row: Row, reading: PictureReading
) -> tuple[str | None, Turns, tuple[PictureOrVideo, ...]]:
    """Reads the pictures and videos of a row. Those without markers come first: in the prompt, or in the first turn of
    the user.

    Args:
        prompt: without turns.
    Returns: prompt and turns with a marker for each, and they in the order of the markers.
    Raises: RowError.
    """
    texts = [text for _, text in turns] or [prompt or ""]
    first = ""
    for marker, kind, values in in_row.by_marker:
        if not (num_markers := sum(text.count(marker) for text in texts)):
            first += marker * len(values)
        elif num_markers != len(values):
            raise RowError(_miscounted(marker, num_markers, kind, values))
    turns = _with_markers(turns, first) if turns else turns
    prompt = prompt if prompt is None else first + prompt
    whole = "\n".join([text for _, text in turns] or [prompt or ""])
    following = {
        marker: iter([_read(value, number, kind, row, reading) for number, value in enumerate(values, start=1)])
        for marker, kind, values in in_row.by_marker
    }
    return prompt, turns, tuple(next(following[marker]) for marker in re.findall("|".join(following), whole))


def _miscounted(marker: str, num_markers: int, kind: str, values: Sequence[Any]) -> str:
    markers = f"{num_markers} marker{'s' * (num_markers > 1)} {marker}"
    message = f"the prompt has {markers}, but the row has {len(values)} {kind}{'s' * (len(values) != 1)}"
    if kind == "video" and num_markers == 1 and len(values) > 1:
        message += "; the frames of one video are a list in the list of videos"
    return message


def _read(value: Any, number: int, kind: str, row: Row, reading: PictureReading) -> PictureOrVideo:
    try:
        return (read_picture if kind == "picture" else read_video)(value, row.folder, row.place, reading)
    except PictureError as error:
        raise RowError(f"{kind} {number}: {error}") from error


def _with_markers(turns: Turns, markers: str) -> Turns:
    """Adds markers to the first turn of the user, in front of its text."""
    place = next((number for number, (role, _) in enumerate(turns) if role == "user"), len(turns) - 1)
    role, text = turns[place]
    return (*turns[:place], (role, markers + text), *turns[place + 1 :])
