"""Reads the pictures that requests and tools add to the histories of a rank's episodes.

Each is processed in a thread of the agent process, and its pixels are sent to the rank once, as long as both ends
remember it (`RecentPictures`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from rlinf_workers.agents.link import FromAgents, NewPicture, PictureTensor
from rlinf_workers.agents.pictures import HistoryPicture, MessagePicture, RecentPictures
from rlinf_workers.agents.settings import PictureSettings
from rlinf_workers.models.picture_files import PictureError, PictureFile, fetched_picture


class PictureReader:
    """See the module.

    Args:
        send: puts a message on the socket.
    """

    def __init__(self, settings: PictureSettings, send: Callable[[FromAgents], None]) -> None:
        self._settings, self._send = settings, send
        self._processor: Any = None
        self._processing = asyncio.Lock()
        self._sent = RecentPictures[None]()

    async def read(self, episode: int, picture: MessagePicture) -> HistoryPicture:
        """A picture as the histories of an episode have it; the rank has it for the episode from now on.

        Raises: PictureError.
        """
        content = picture.content
        if picture.url:
            if not self._settings.fetches:
                raise PictureError(
                    f"{picture.url[:120]!r} is on the network; send a data URL, or allow it with task.fetch_pictures"
                )
            content = await asyncio.to_thread(fetched_picture, picture.url)
        async with self._processing:
            processed = await asyncio.to_thread(self._process, content)
        has_pixels = processed.digest not in self._sent
        file = content if self._settings.sends_files else b""
        self._send(picture_message(episode, processed, file, has_pixels=has_pixels))
        self._sent.use(processed.digest, processed.num_bytes, None)
        return HistoryPicture(digest=processed.digest, token_ids=processed.token_ids.tolist())

    def abandon(self) -> None:
        """The rank forgets what was sent."""
        self._sent.clear()

    def _process(self, content: bytes) -> Any:
        if self._processor is None:
            self._processor = processor_of(self._settings)
        return processed_file(self._processor, content)


def processor_of(settings: PictureSettings) -> Any:
    """The image processor, which takes seconds to create."""
    from rlinf_workers.models.language_model import load_tokenizer
    from rlinf_workers.models.picture_processor import PictureProcessor

    limits = {"min_pixels": settings.min_pixels, "max_pixels": settings.max_pixels}
    return PictureProcessor(settings.folder, load_tokenizer(settings.folder), **limits)


def processed_file(processor: Any, content: bytes) -> Any:
    """A `ProcessedPicture`. Raises: PictureError."""
    try:
        return processor.process(PictureFile(content))
    except PictureError:
        raise
    except ValueError as error:  # more than 200 times as long as wide
        raise PictureError(f"is refused by the model's processor: {error}") from error


class EpisodePictures:
    """The pictures of an episode (`PictureSource`).

    Args:
        of_task: those of its task.
        reader: reads others.
    """

    def __init__(self, episode: int, of_task: Iterable[HistoryPicture], reader: PictureReader) -> None:
        self._episode, self._reader = episode, reader
        self._of_task = {one.digest: one for one in of_task}

    async def read(self, picture: MessagePicture) -> HistoryPicture:
        """As in `PictureSource`."""
        if not picture.task_digest:
            return await self._reader.read(self._episode, picture)
        if picture.task_digest not in self._of_task:
            raise PictureError(f"{picture.url!r} is none of the task's")
        return self._of_task[picture.task_digest]


def picture_message(episode: int, processed: Any, file: bytes = b"", *, has_pixels: bool = True) -> NewPicture:
    """A `ProcessedPicture` as a message."""
    arguments, positions = (processed.arguments, processed.position_ids) if has_pixels else ({}, None)
    return NewPicture(
        episode=episode,
        digest=processed.digest,
        token_ids=processed.token_ids.tolist(),
        arguments={name: _tensor(one) for name, one in arguments.items()},
        position_ids=None if positions is None else _tensor(positions),
        file=file,
    )


def _tensor(tensor: Any) -> PictureTensor:
    array = tensor.contiguous().numpy()
    return PictureTensor(dtype=str(array.dtype), shape=list(array.shape), content=array.tobytes())
