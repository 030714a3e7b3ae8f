"""Initializes a sharded model: no process ever holds more than one of its tensors whole.

Parameters are put on the meta device when they are registered; buffers stay. The initial value of a parameter is
computed whole, so that a seed gives the same numbers as without shards; then the rank's rows are kept and the rest is
freed before the next parameter.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from typing_extensions import Self

OVERWRITES = frozenset(
    ("constant_", "copy_", "fill_", "kaiming_normal_", "kaiming_uniform_", "normal_", "ones_", "uniform_", "zero_")
)
"""Functions that overwrite a tensor completely."""
HARMLESS = frozenset(["detach_", "requires_grad_"])
"""Functions with a trailing underscore that do not change the numbers."""


@contextmanager
def meta_parameters() -> Iterator[None]:
    """Context in which new modules' parameters have no memory and are not computed."""
    with _registering(_on_meta):
        yield


class ShardedInit(TorchFunctionMode):
    """Context in which a new model's parameters have no memory; `take` returns this rank's rows.

    Raises: RuntimeError if a parameter is computed from its old value after another one was written.
    """

    def __init__(self, rank: int, num_ranks: int) -> None:
        super().__init__()
        self._rank, self._num_ranks = rank, num_ranks
        self._shards: dict[int, Tensor | None] = {}
        """Storage of a parameter -> rows of its tensor; None for one that was on the meta device."""
        self._seen: list[Tensor] = []
        """All parameters, kept alive so that no storage id is reused."""
        self._whole: tuple[int, Tensor] | None = None
        """Storage and tensor of the parameter that was written last."""
        self._exit = ExitStack()

    def __enter__(self) -> Self:
        super().__enter__()
        self._exit.enter_context(_registering(self._registered))
        return self

    def __exit__(self, *error: Any) -> None:
        self._exit.close()
        super().__exit__(*error)
        self._cut()

    def take(self, parameter: Tensor) -> Tensor | None:
        """This rank's rows, whose memory now belongs to the caller. None: they were never computed."""
        return self._shards.pop(_storage(parameter), None)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        target = args[0] if args else kwargs.get("tensor")
        is_write = name.endswith("_") and not name.endswith("__") and name not in HARMLESS
        if not (is_write and isinstance(target, Tensor) and target.is_meta):
            return func(*args, **kwargs)
        if _storage(target) in self._shards and self._shards[_storage(target)] is None:
            return target
        real = self._real(target, name)
        if args:
            func(real, *args[1:], **kwargs)
        else:
            func(**{**kwargs, "tensor": real})
        return target

    def _real(self, target: Tensor, name: str) -> Tensor:
        """Memory for the written values, at the same position of the whole tensor."""
        key = _storage(target)
        if self._whole is None or self._whole[0] != key:
            is_all = target.is_contiguous() and target.untyped_storage().nbytes() == target.nbytes
            if key not in self._shards or not (is_all and name in OVERWRITES):
                raise RuntimeError(
                    f"a tensor {list(target.shape)} of the model is computed by {name} from numbers that were already "
                    "freed, so it cannot be initialized in shards; use the backend replicated"
                )
            self._cut()
            self._whole = key, _pages(target.shape, target.dtype)
        return self._whole[1].as_strided(target.shape, target.stride(), target.storage_offset())

    def _registered(self, parameter: nn.Parameter) -> nn.Parameter:
        placeholder = _on_meta(parameter)
        self._seen.append(placeholder)
        if not parameter.is_meta:
            self._shards[_storage(placeholder)] = self._shard(parameter.detach())
        else:  # tied to a known parameter, or on the meta device
            self._shards.setdefault(_storage(placeholder), None)
        return placeholder

    def _cut(self) -> None:
        if self._whole is not None:
            key, whole = self._whole
            self._shards[key], self._whole = self._shard(whole), None

    def _shard(self, whole: Tensor) -> Tensor:
        rows = -(-len(whole) // self._num_ranks)  # as torch.chunk
        shard = whole[self._rank * rows : (self._rank + 1) * rows]
        return _pages(shard.shape, shard.dtype).copy_(shard)


def _pages(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Allocates memory that returns to the system when freed. On the heap, small objects would occupy the gaps that
    large tensors leave, and it grew to the size of the whole model."""
    if not (count := math.prod(shape)):
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(mmap.mmap(-1, count * dtype.itemsize), dtype=dtype, count=count).view(shape)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _on_meta(parameter: nn.Parameter) -> nn.Parameter:
    if parameter.is_meta:
        return parameter
    placeholder = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
    vars(placeholder).update(vars(parameter))
    return placeholder


@contextmanager
def _registering(how: Callable[[nn.Parameter], nn.Parameter]) -> Iterator[None]:
    """Context in which modules register `how(parameter)` instead of their parameters."""
    original = nn.Module.register_parameter

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        original(module, name, None if parameter is None else how(parameter))

    nn.Module.register_parameter = register  # pyright: ignore
    try:
        yield
    finally:
        nn.Module.register_parameter = original
