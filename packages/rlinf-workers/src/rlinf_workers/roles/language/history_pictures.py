"""The pictures of histories, which sessions refer to by number (agents/pictures.py), as records of tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from rlinf_workers.agents.link import NewPicture, PictureTensor
from rlinf_workers.agents.pictures import FIRST_REFERENCE, reference_of
from rlinf_workers.errors import WorkersError
from rlinf_workers.roles.records.language import Prompt
from rlinf_workers.roles.records.pictures import Pictures, ProcessedPicture, pictures_of

PicturesByReference = Mapping[int, ProcessedPicture]


def by_reference(pictures: Iterable[ProcessedPicture]) -> dict[int, ProcessedPicture]:
    """Pictures by the number that histories have for them."""
    return {reference_of(one.digest): one for one in pictures}


def pictures_of_prompt(prompt: Prompt) -> dict[int, ProcessedPicture]:
    """`by_reference` for the pictures of a prompt."""
    return by_reference(() if prompt.pictures is None else prompt.pictures.pictures)


def history_of_prompt(prompt: Prompt) -> list[int]:
    """The tokens of a prompt as a session has them."""
    return with_references(prompt.token_ids, prompt.pictures).tolist()


def with_references(token_ids: Tensor, pictures: Pictures | None) -> Tensor:
    """[L] int64, tokens with references in place of the first token of each picture, so that they differ where their
    pictures do."""
    if pictures is None:
        return token_ids
    references = torch.tensor([reference_of(one.digest) for one in pictures.pictures])
    return token_ids.index_copy(0, torch.tensor(pictures.begins), references)


def placed(token_ids: Sequence[int], pictures: PicturesByReference) -> Iterator[tuple[int, ProcessedPicture]]:
    """The pictures of a history, each with the place of its first token.

    Raises: WorkersError for a reference to a picture that is not there.
    """
    for place, token in enumerate(token_ids):
        if token >= FIRST_REFERENCE:
            if token not in pictures:
                raise WorkersError(f"a history has a picture at token {place} that the rollout does not have")
            yield place, pictures[token]


def read_history(token_ids: Sequence[int], pictures: PicturesByReference) -> tuple[Tensor, Pictures | None]:
    """[L] int64, a history as the model reads it, and its pictures. Raises: WorkersError, as `placed`."""
    ids = torch.from_numpy(np.array(token_ids, np.int64))
    if not pictures and not (len(ids) and int(ids.max()) >= FIRST_REFERENCE):
        return ids, None
    there = list(placed(token_ids, pictures))
    for begin, picture in there:
        ids[begin] = picture.token_ids[0]
    return ids, pictures_of(there)


def picture_of(message: NewPicture) -> ProcessedPicture:
    """The picture of a message that has its pixels."""
    return ProcessedPicture(
        token_ids=torch.tensor(message.token_ids),
        arguments={name: _tensor(one) for name, one in message.arguments.items()},
        position_ids=None if message.position_ids is None else _tensor(message.position_ids),
        digest=message.digest,
    )


def _tensor(tensor: PictureTensor) -> Tensor:
    return torch.from_numpy(np.frombuffer(bytearray(tensor.content), tensor.dtype).reshape(tensor.shape))
