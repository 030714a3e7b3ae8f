"""Compiles the decoder layers of a language model (torch.compile) for packed rows, where a GPU spends more time on
starting small kernels than on arithmetic.

All layers share one compilation, with the number of tokens as a symbol, so that no length of a row compiles anew; a
forward pass without gradients has another. Attention is not part of it: it is called between the two halves of a layer.
Padded passes, which write keys and values into a cache, run as they are.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from rlinf_workers.models.pictures import without_vision_tower
from rlinf_workers.models.routers import routers_of

Compiles = bool | Literal["auto"]
"""True: compile; "auto": on GPUs, where everything that it needs is installed."""
BACKEND: Any = "inductor"
"""As `torch.compile` takes it."""
OPTION = "actor.backend_options.compile"
PACKED_ARGUMENT = "attend"
"""The argument with which layers are called for a packed row (packed_attention.py)."""


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The layers of all transformers in a model: the modules of each list of decoder or encoder layers, except those of
    the vision tower of a vision-language model, which batches of text do not use; empty for other models."""
    names = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    lists = [module for module in without_vision_tower(model).modules() if isinstance(module, nn.ModuleList)]
    return [layer for layers in lists for layer in layers if type(layer).__name__ in names]


def compile_layers(model: nn.Module, compiles: Compiles, device: torch.device, note: Callable[[str], None]) -> bool:
    """Makes the layers compile when they are first called with a packed row. If that fails, they go on as they are, and
    a note says so.

    Args:
        note: for the manifest of the run.

    Returns: whether they will.
    Raises: ValueError naming the option if layers should be compiled and cannot be.
    """
    if compiles is False or (compiles == "auto" and device.type != "cuda"):
        return False
    is_language_model = hasattr(model, "base_model") and bool(layers_of(model))
    reason = _refusal(model, device) if is_language_model else f"{type(model).__name__} has no decoder layers"
    if reason is not None:
        if compiles is True:
            raise ValueError(f"{OPTION}=true: {reason}; leave it out")
        if is_language_model:
            note(f"{OPTION}=auto: layers are not compiled: {reason}")
        return False
    attempt = _Attempt(note)
    for layer in layers_of(model):
        half: Any = getattr(layer, "mlp", None)
        recomputed = getattr(half, "forward", None)
        if isinstance(recomputed, partial) and recomputed.func is checkpoint:
            inside = _CompiledForward(recomputed.args[0], attempt)
            half.forward = torch.compiler.disable(partial(checkpoint, inside, **recomputed.keywords))
        layer.forward = _CompiledForward(layer.forward, attempt, argument=PACKED_ARGUMENT)
    return True


def _refusal(model: nn.Module, device: torch.device) -> str | None:
    """Why layers cannot be compiled; None: they can."""
    if routers_of(model):
        return f"{type(model).__name__} is a mixture of experts, whose routers are recorded and replaced"
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if not any(shutil.which(name) for name in ("cc", "gcc", "clang", "c++", "g++")):
        return "there is no C compiler"
    return None


class _Attempt:
    """Whether compilation has failed in one of the layers, which share one program."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self.has_failed = False

    def fail(self, error: Exception) -> None:
        if not self.has_failed:
            first = str(error).strip().partition("\n")[0]
            self._note(f"{OPTION}: layers could not be compiled and run as they are: {type(error).__name__}: {first}")
        self.has_failed = True


class _CompiledForward:
    """A module's compiled forward pass, or the plain one.

    Args:
        argument: only calls with this keyword argument are compiled; empty: all.
    """

    def __init__(self, plain: Callable[..., Any], attempt: _Attempt, argument: str = "") -> None:
        self._plain, self._attempt, self._argument = plain, attempt, argument
        self._compiled = torch.compile(plain, dynamic=True, backend=BACKEND)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._attempt.has_failed or (self._argument and self._argument not in kwargs):
            return self._plain(*args, **kwargs)
        from torch._dynamo.exc import TorchDynamoException  # torch.compile has imported it by now

        attend = kwargs.get(PACKED_ARGUMENT)
        num_calls = getattr(attend, "num_calls", 0)
        try:
            return self._compiled(*args, **kwargs)
        except TorchDynamoException as error:
            self._attempt.fail(error)
        if attend is not None:
            attend.num_calls = num_calls  # those of the attempt do not count
        return self._plain(*args, **kwargs)
