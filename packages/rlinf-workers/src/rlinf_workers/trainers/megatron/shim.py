"""Lets megatron-core 0.16 run on CPUs over gloo, although it uses CUDA devices, streams and generators by name.

Used only in a process whose worker has a CPU slot, and permanently: it replaces the names below for the whole process,
in torch as well. Without a GPU these names are useless, so no other code uses them. Each line was found necessary by
running the named feature without it. Not imported on a GPU.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._device import _device_constructors

FACTORIES = (
    "tensor", "as_tensor", "empty", "zeros", "ones", "full", "arange", "rand", "randn", "randint",
    "empty_like", "zeros_like", "ones_like", "full_like",
)  # fmt: skip
"""Functions that megatron-core calls with the literal device "cuda"."""

_applied = False


def apply() -> None:
    """Applied once per process, before a model is created."""
    global _applied
    if _applied:
        return
    _applied = True
    _devices()
    _generators()
    _experts()


def _devices() -> None:
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")  # everything
    cuda.synchronize = lambda *_, **__: None  # pipelines
    cuda.Stream = cuda.Event = _Stream  # experts
    cuda.current_stream = lambda *_: _Stream()
    cuda.stream = lambda _: contextlib.nullcontext()
    setattr(Tensor, "cuda", lambda self, *_, **__: self)  # noqa: B010, pipelines of a model with tied embeddings
    _device_constructors()  # a device used as a context caches the current functions, and transformers uses that
    for name in FACTORIES:  # pipelines, the optimizer
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    real_type = Tensor.type

    def type_name(self: Tensor, dtype: Any = None, *others: Any, **named: Any) -> Any:
        """The optimizer only accepts tensors of torch.cuda.FloatTensor."""
        output = real_type(self, dtype, *others, **named) if dtype is not None else real_type(self)
        return output.replace("torch.", "torch.cuda.", 1) if isinstance(output, str) else output

    setattr(Tensor, "type", type_name)  # noqa: B010, the class has no such setter for type checkers


class _Stream:
    """A stream or an event that never needs waiting."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_stream(self, *_: Any) -> _Stream:
        return self

    wait_event = record_event = synchronize = wait = record = wait_stream


def _on_cpu(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(factory)
    def wrapper(*arguments: Any, **named: Any) -> Tensor:
        if str(named.get("device", "")).startswith("cuda"):
            named["device"] = "cpu"
        if named.get("pin_memory"):
            named["pin_memory"] = False
        return factory(*arguments, **named)

    return wrapper


def _generators() -> None:
    """Every forward pass: dropout and recomputation save the state of CUDA's generator."""
    from megatron.core.tensor_parallel import random

    cuda, here = torch.cuda, random
    setattr(cuda, "manual_seed", lambda seed: torch.default_generator.manual_seed(int(seed)))  # noqa: B010
    setattr(cuda, "get_rng_state", lambda *_, **__: torch.get_rng_state())  # noqa: B010
    setattr(cuda, "set_rng_state", lambda state, *_, **__: torch.set_rng_state(state))  # noqa: B010
    setattr(here, "_get_cuda_rng_state", lambda *_, **__: torch.get_rng_state())  # noqa: B010
    setattr(here, "_set_cuda_rng_state", lambda state, *_, **__: torch.set_rng_state(state))  # noqa: B010


def _experts() -> None:
    from megatron.core.transformer.moe import token_dispatcher

    def moved(tensor: Any, as_numpy: bool = False, **_: Any) -> Any:
        """Token counts: all_to_all rejects tensors as split sizes, and CPU tensors would stay tensors."""
        return tensor.numpy() if as_numpy and isinstance(tensor, Tensor) else tensor

    setattr(token_dispatcher, "maybe_move_tensor_to_cpu", moved)  # noqa: B010
