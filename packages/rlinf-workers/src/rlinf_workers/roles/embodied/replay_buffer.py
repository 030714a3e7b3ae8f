"""ReplayBuffer: the transitions of one shard, as a ring in host memory.

Memory grows with the transitions that are stored, up to the capacity; then the oldest are overwritten. A checkpoint
writes what is stored, without copying it first: `OffPolicyActor` waits until it is written before it adds more.

A picture is stored once, although it is the observation after one transition and before the following one: a transition
has the position of the row that begins with its next observation. Where there is no such row, at the end of a segment
and where a time limit has cut an episode, the next observation is kept beside the ring. After the end of the task no
observation counts, and a transition repeats its own pictures.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from rlinf_envs import PICTURE, FieldSpec
from rlinf_workers.models.weight_files import WeightFiles
from rlinf_workers.roles.records.embodied import MAX_TEXT_BYTES

FIELD, NEXT = "fields/", "next_fields/"
"""Prefixes of columns that are fields of an observation."""
_POSITION = "position"
_FOLLOWING = "following"
"""Column: position of the row whose pictures are the next ones, or `_APART`."""
_APART = -1
_ENDS = "ends/"
"""Prefix of the names in a checkpoint of pictures that are kept beside the ring, by "rows", their positions."""


def label_bytes(fields: Mapping[str, FieldSpec], num_numbers: int) -> int:
    """Bytes of an observation in a buffer with the answer of an expert.

    Args:
        fields: those of an observation, by name.
        num_numbers: numbers of the actions of an answer.
    """
    return sum(map(_field_bytes, fields.values())) + 4 * num_numbers


def transition_bytes(fields: Mapping[str, FieldSpec], num_numbers: int, *, ends_share: float) -> int:
    """Bytes of a transition in a buffer, on average.

    Args:
        fields: those of an observation, by name; the next one has them, too.
        num_numbers: numbers of the actions of an answer.
        ends_share: share of the transitions that no other follows though the task goes on.
    """
    pictures = {name: field for name, field in fields.items() if name.startswith(PICTURE)}
    stored_twice = sum(_field_bytes(field) for name, field in fields.items() if name not in pictures)
    stored_once = sum(_field_bytes(field) for field in pictures.values())
    of_reward_and_end, of_position = 4 + 1, 8 if pictures else 0
    of_ends = math.ceil(ends_share * stored_once)
    return 2 * stored_twice + stored_once + of_ends + 4 * num_numbers + of_reward_and_end + of_position


def _field_bytes(field: FieldSpec) -> int:
    if field.dtype == "text":
        return MAX_TEXT_BYTES
    return math.prod(field.shape) * getattr(torch, field.dtype).itemsize


class ReplayBuffer:
    """Columns by name, such as `fields/state` [capacity, D] and `rewards` [capacity]; all rows have the same columns.

    Args:
        capacity: maximum number of transitions.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._columns: dict[str, Tensor] = {}
        self._ends: dict[int, dict[str, Tensor]] = {}
        """Position -> its next pictures by column, where no row begins with them."""
        self._num_added = 0
        """Transitions added so far; the next is written at this index, modulo the capacity."""

    @property
    def num_added(self) -> int:
        """Transitions added so far, with those that are overwritten."""
        return self._num_added

    def __len__(self) -> int:
        return min(self._num_added, self._capacity)

    def add(self, rows: Mapping[str, Tensor], num_envs: int = 1) -> None:
        """Appends n transitions: [n, ...] each, the oldest first.

        Args:
            num_envs: distance of two rows of the same environment.
        """
        count = len(next(iter(rows.values())))
        newest = slice(max(0, count - self._capacity), count)
        at = torch.arange(self._num_added, self._num_added + count)[newest] % self._capacity
        rows = self._linked({name: values[newest] for name, values in rows.items()}, at, num_envs)
        if not self._columns:
            # Memory that is not written yet costs only addresses.
            self._columns = {name: torch.empty(self._capacity, *v.shape[1:], dtype=v.dtype) for name, v in rows.items()}
        for name, column in self._columns.items():
            column[at] = rows[name]
        self._num_added += count

    def _linked(self, rows: dict[str, Tensor], at: Tensor, num_envs: int) -> dict[str, Tensor]:
        """The columns of rows that are written to the positions `at`, without the next pictures."""
        pictures = [name for name in rows if name.startswith(NEXT + PICTURE)]
        if not pictures:
            return rows
        num_followed = max(0, len(at) - num_envs)
        is_same = torch.ones(num_followed, dtype=torch.bool)
        for name in pictures:
            differs = rows[name][:num_followed] != rows[_here(name)][num_envs:]
            is_same &= ~differs.flatten(1).any(1)
        following = torch.full_like(at, _APART)
        following[:num_followed][is_same] = at[num_envs:][is_same]
        following = at.where(rows["terminated"], following)
        for position in at.tolist():
            self._ends.pop(position, None)
        for row in (following == _APART).nonzero()[:, 0].tolist():
            self._ends[int(at[row])] = {name: rows[name][row].clone() for name in pictures}
        return {name: values for name, values in rows.items() if name not in pictures} | {_FOLLOWING: following}

    def __getitem__(self, rows: Tensor) -> dict[str, Tensor]:
        """The transitions with these indices [n], copied."""
        chosen = {name: column[rows] for name, column in self._columns.items()}
        following = chosen.pop(_FOLLOWING, None)
        if following is None:
            return chosen
        apart = (following == _APART).nonzero()[:, 0].tolist()
        for name in [name for name in chosen if name.startswith(FIELD + PICTURE)]:
            after = self._columns[name][following.clamp(min=0)]
            for row in apart:
                after[row] = self._ends[int(rows[row])][_next(name)]
            chosen[_next(name)] = after
        return chosen

    def tensors(self) -> dict[str, Tensor]:
        """What is stored, for a checkpoint; views where it is large, which the next `add` may change."""
        stored = {name: column[: len(self)] for name, column in self._columns.items()}
        if self._ends:
            stored[f"{_ENDS}rows"] = torch.tensor(list(self._ends))
            for name in next(iter(self._ends.values())):
                stored[f"{_ENDS}{name}"] = torch.stack([pictures[name] for pictures in self._ends.values()])
        return {**stored, _POSITION: torch.tensor([self._num_added])}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse, for an empty buffer."""
        assert not self._num_added, "a buffer is loaded once, when it is created"
        ends = {name.removeprefix(_ENDS): values for name, values in tensors.items() if name.startswith(_ENDS)}
        for row, position in enumerate(ends.pop("rows", torch.zeros(0)).tolist()):
            self._ends[position] = {name: values[row].clone() for name, values in ends.items()}
        for name, values in tensors.items():
            if name != _POSITION and not name.startswith(_ENDS):
                self._columns[name] = torch.empty(self._capacity, *values.shape[1:], dtype=values.dtype)
                self._columns[name][: len(values)] = values
        self._num_added = int(tensors[_POSITION])


def _here(name: str) -> str:
    """The column of the same field before the transition."""
    return FIELD + name.removeprefix(NEXT)


def _next(name: str) -> str:
    """The inverse of `_here`."""
    return NEXT + name.removeprefix(FIELD)


def buffer_tensors(kinds: Mapping[str, Mapping[int, ReplayBuffer]]) -> dict[str, Tensor]:
    """What a checkpoint has of the buffers of shards, from which `loaded_buffer` makes each again.

    Args:
        kinds: prefix of names, such as `replayed/` -> shard -> buffer.
    """
    return {
        f"{kind}{shard}/{name}": values
        for kind, buffers in kinds.items()
        for shard, buffer in buffers.items()
        for name, values in buffer.tensors().items()
    }


def loaded_buffer(files: WeightFiles, prefix: str, capacity: int | None) -> ReplayBuffer:
    """The buffer whose names in the files of a checkpoint begin with the prefix.

    Args:
        capacity: None: what is stored fills it.
    """
    tensors = {name.removeprefix(prefix): files.read(name) for name in files.specs if name.startswith(prefix)}
    num_stored = len(tensors["actions"]) if "actions" in tensors else 0
    buffer = ReplayBuffer(num_stored if capacity is None else capacity)
    if tensors:
        buffer.load(tensors)
    return buffer
