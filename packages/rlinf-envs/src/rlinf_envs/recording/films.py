"""Writes recorded episodes side by side into one mp4 file: one or more rows per task, successes framed green, failures
red.

All episodes begin together. An ended episode shows its last image, paler, until the longest one ends.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlinf_envs.core.protocol import EpisodeEnd
from rlinf_envs.recording.recorder import RecordedEpisode
from rlinf_envs.recording.video import mp4_writer, require_video

COLUMNS = 6
"""Maximum number of episodes in a row."""
LEAST_HEIGHT = 128
"""Minimum height in pixels; smaller images are enlarged."""
FRAME = 4
LABEL = 30
"""Height in pixels of the two lines of text above an image."""
GREEN, AMBER, RED, GREY = (31, 157, 107), (224, 138, 30), (208, 69, 95), (100, 116, 139)
PAPER, INK, SOFT = (246, 247, 249), (27, 35, 48), (93, 104, 120)


def outcome_of(end: EpisodeEnd) -> str:
    """Describes the outcome of an episode."""
    if end.success_at_end is None:
        return "ended"
    return "success" if end.success_at_end else "success, then lost" if end.success_once else "failure"


_COLORS = {"success": GREEN, "success, then lost": AMBER, "failure": RED, "ended": GREY}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Tile:
    """Position of an episode on the sheet, and its scaled images."""

    episode: RecordedEpisode
    title: str
    top: int
    left: int

    def picture(self, time: int) -> np.ndarray:
        pictures = self.episode.pictures
        frame = pictures[min(time, len(pictures) - 1)]
        if time >= len(pictures):
            frame = (frame // 2 + 127).astype(np.uint8)
        scale = _scale(self.episode)
        return frame.repeat(scale, axis=0).repeat(scale, axis=1)


def write_grid(
    path: Path,
    episodes: Sequence[RecordedEpisode],
    *,
    fps: float = 20.0,
    titles: Sequence[str] = (),
    columns: int = COLUMNS,
) -> bool:
    """Writes the film of all episodes with images; returns False, without a file, if there are none.

    Args:
        path: ends in .mp4; an existing file is replaced once the new one is complete.
        titles: one for each episode, in place of its task; the episodes then keep their order.
        columns: maximum number of episodes in a row.

    Raises: EnvError if imageio is missing.
    """
    require_video()
    seen = [place for place, episode in enumerate(episodes) if len(episode.pictures)]
    if not seen:
        return False
    drawn = [episodes[place] for place in seen]
    tiles, sheet = _laid_out(drawn, [titles[place] for place in seen] if titles else [], columns)
    partial = path.with_name(f".partial-{path.name}")
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = mp4_writer(partial, fps)
    try:
        for time in range(max(len(episode.pictures) for episode in drawn) + round(fps)):
            writer.append_data(_page(sheet, tiles, time))
    finally:
        writer.close()
    partial.replace(path)
    return True


def by_task(episodes: Sequence[RecordedEpisode]) -> dict[str, list[RecordedEpisode]]:
    """Returns task ("" if there is only one) -> its episodes sorted by seed; tasks are sorted by name."""
    groups: dict[str, list[RecordedEpisode]] = defaultdict(list)
    for episode in sorted(episodes, key=lambda episode: (episode.end.task or "", episode.end.seed)):
        groups[episode.end.task or ""].append(episode)
    return dict(groups)


def _laid_out(
    episodes: Sequence[RecordedEpisode], titles: Sequence[str], columns: int
) -> tuple[list[_Tile], np.ndarray]:
    """Returns the position of each episode, and the sheet with all frames and labels."""
    sizes = [np.multiply(episode.pictures.shape[1:3], _scale(episode)) for episode in episodes]
    height, width = (int(side) for side in np.max(sizes, axis=0))
    step_down, step_right = height + LABEL + 3 * FRAME, width + 3 * FRAME
    if titles:
        blocks = [list(zip(episodes, titles, strict=True))]
    else:
        blocks = [[(one, _title(one.end)) for one in rows] for rows in by_task(episodes).values()]
    lines = [rows[start : start + columns] for rows in blocks for start in range(0, len(rows), columns)]
    width_in_tiles = max(map(len, lines))
    sheet = np.empty((len(lines) * step_down + FRAME, width_in_tiles * step_right + FRAME, 3), np.uint8)
    sheet[:] = PAPER
    sheet = np.pad(sheet, ((0, sheet.shape[0] % 2), (0, sheet.shape[1] % 2), (0, 0)), mode="edge")
    tiles = [
        _Tile(
            episode=episode,
            title=title,
            top=down * step_down + LABEL + 2 * FRAME,
            left=across * step_right + 2 * FRAME,
        )
        for down, line in enumerate(lines)
        for across, (episode, title) in enumerate(line)
    ]
    return tiles, _labelled(sheet, tiles, width)


def _title(end: EpisodeEnd) -> str:
    return end.task or f"seed {end.seed}"


def _scale(episode: RecordedEpisode) -> int:
    return -(-LEAST_HEIGHT // episode.pictures.shape[1])


def _labelled(sheet: np.ndarray, tiles: Sequence[_Tile], width: int) -> np.ndarray:
    from PIL import Image, ImageDraw, ImageFont

    image = Image.fromarray(sheet)
    draw, font = ImageDraw.Draw(image), ImageFont.load_default()
    for tile in tiles:
        end, size = tile.episode.end, tile.picture(0).shape
        what = outcome_of(end)
        frame = (tile.left - FRAME, tile.top - FRAME, tile.left + size[1] + FRAME - 1, tile.top + size[0] + FRAME - 1)
        draw.rectangle(frame, fill=_COLORS[what])
        below = f"{what}, seed {end.seed}" if tile.title != f"seed {end.seed}" else f"{what}, return {end.return_:.3g}"
        top = tile.top - FRAME - LABEL
        draw.text((tile.left - FRAME, top + 2), _cut(draw, font, tile.title, width), fill=INK, font=font)
        draw.text((tile.left - FRAME, top + 15), _cut(draw, font, below, width), fill=_COLORS[what], font=font)
    return np.array(image)


def _cut(draw: Any, font: Any, text: str, width: int) -> str:
    """Shortens a text to a width in pixels."""
    text = "".join(c if c.isascii() and c.isprintable() else "?" for c in text)  # the built-in font has no more
    while len(text) > 3 and draw.textlength(text, font=font) > width + 2 * FRAME:
        text = f"{text.rstrip('.')[:-1]}.."
    return text


def _page(sheet: np.ndarray, tiles: Sequence[_Tile], time: int) -> np.ndarray:
    page = sheet.copy()
    for tile in tiles:
        picture = tile.picture(time)
        page[tile.top : tile.top + picture.shape[0], tile.left : tile.left + picture.shape[1]] = picture
    return page
