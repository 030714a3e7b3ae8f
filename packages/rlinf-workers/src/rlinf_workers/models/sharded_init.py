"""Makes a model of which each rank keeps a shard: no process ever holds more than one of its tensors whole.

Parameters go to the meta device as they are registered; buffers stay. The initial value of a parameter is computed
whole, so that a seed gives the same numbers as without shards; then the rank's rows are kept and the memory of the rest
is freed before the next parameter.
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
"""Functions after which nothing of what a tensor held is left."""
HARMLESS = frozenset(["detach_", "requires_grad_"])
"""Those that end in an underscore and leave the numbers alone."""


@contextmanager
def meta_parameters() -> Iterator[None]:
    """Parameters of modules that are made here have no memory, and nothing is computed of them."""
    with _registering(_on_meta):
        yield


class ShardedInit(TorchFunctionMode):
    """While a model is made in this context, its parameters have no memory, and `take` returns this rank's rows.

    Raises: RuntimeError where a parameter is computed from what it was before another one was written.
    """

    def __init__(self, rank: int, num_ranks: int) -> None:
        super().__init__()
        self._rank, self._num_ranks = rank, num_ranks
        self._shards: dict[int, Tensor | None] = {}
        """Storage of a parameter -> rows of its tensor; None for one that came without memory."""
        self._seen: list[Tensor] = []
        """All parameters, so that no storage comes twice."""
        self._whole: tuple[int, Tensor] | None = None
        """Storage of the parameter that was written last, and its tensor."""
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
        """This rank's rows, once: the memory is the caller's. None: they were never computed."""
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
        """Memory for what is written, at the same place of the whole tensor."""
        key = _storage(target)
        if self._whole is None or self._whole[0] != key:
            is_all = target.is_contiguous() and target.untyped_storage().nbytes() == target.nbytes
            if key not in self._shards or not (is_all and name in OVERWRITES):
                raise RuntimeError(
                    f"a tensor {list(target.shape)} of the model is made by {name} from numbers that are given up "
                    "already, so it cannot be made in shards; use the backend replicated"
                )
            self._cut()
            self._whole = key, _pages(target.shape, target.dtype)
        return self._whole[1].as_strided(target.shape, target.stride(), target.storage_offset())

    def _registered(self, parameter: nn.Parameter) -> nn.Parameter:
        placeholder = _on_meta(parameter)
        self._seen.append(placeholder)
        if not parameter.is_meta:
            self._shards[_storage(placeholder)] = self._shard(parameter.detach())
        else:  # tied to one that is known, or made without memory
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
    """Memory that goes back when it is given up. Small things would settle in what large tensors leave on the heap, the
    next large ones behind them: it grew to the size of the whole model."""
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
    """Modules register what `how` makes of their parameters."""
    original = nn.Module.register_parameter

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        original(module, name, None if parameter is None else how(parameter))

    nn.Module.register_parameter = register  # pyright: ignore
    try:
        yield
    finally:
        nn.Module.register_parameter = original
