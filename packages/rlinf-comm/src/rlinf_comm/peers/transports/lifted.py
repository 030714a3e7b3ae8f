"""Takes the tensors in device memory out of a value, and puts others in their places."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rlinf_comm.errors import DecodeError
from rlinf_comm.records import is_struct, record

_LEAVES = frozenset((type(None), bool, int, float, str, bytes))


@record
@dataclass(frozen=True, slots=True)
class TensorSlot:
    """Stands in a value for the tensor of this number."""

    index: int


def lift_out(value: Any, is_on_device: Callable[[Any], bool]) -> tuple[Any, list[Any]]:
    """(the value with a Place for each array on a device, those arrays). Without any it is the value itself."""
    arrays: list[Any] = []

    def swap(leaf: Any) -> Any:
        if not is_on_device(leaf):
            return leaf
        arrays.append(leaf)
        return TensorSlot(len(arrays) - 1)

    try:
        return _mapped(value, swap), arrays
    except RecursionError:
        return value, []  # the codec refuses it, and says why


def put_back(value: Any, tensors: Sequence[Any]) -> Any:
    """The value with tensors[i] for each Place(i).

    Raises:
        DecodeError: a Place for a tensor that did not come.
    """

    def swap(leaf: Any) -> Any:
        if not isinstance(leaf, TensorSlot):
            return leaf
        if type(leaf.index) is not int or not 0 <= leaf.index < len(tensors):
            raise DecodeError(f"a place for tensor {leaf.index!r} of {len(tensors)}")
        return tensors[leaf.index]

    return _mapped(value, swap)


def _mapped(value: Any, swap: Callable[[Any], Any]) -> Any:
    """The value with swap(leaf) for each leaf of its containers; those in which nothing changes are kept."""
    cls: Any = type(value)
    if cls in _LEAVES:
        return value
    if cls is list or cls is tuple:
        children = [_mapped(child, swap) for child in value]
        return cls(children) if _differ(children, value) else value
    if cls is dict:
        children = [_mapped(child, swap) for child in value.values()]
        return dict(zip(value, children, strict=True)) if _differ(children, value.values()) else value
    names = _field_names(cls)
    if names is None or cls is TensorSlot:
        return swap(value)
    if not all(hasattr(value, name) for name in names):
        return value  # the codec refuses it, and says why
    before = [getattr(value, name) for name in names]
    children = [_mapped(child, swap) for child in before]
    if not _differ(children, before):
        return value
    if is_struct(cls):
        return cls(**dict(zip(names, children, strict=True)))
    instance = object.__new__(cls)  # as the codec builds it: without __post_init__
    for name, child in zip(names, children, strict=True):
        object.__setattr__(instance, name, child)
    return instance


def _field_names(cls: Any) -> Sequence[str] | None:
    if dataclasses.is_dataclass(cls):
        return [field.name for field in dataclasses.fields(cls)]
    return cls.__struct_fields__ if is_struct(cls) else None


def _differ(children: Sequence[Any], before: Any) -> bool:
    return any(child is not old for child, old in zip(children, before, strict=True))
