"""Where a model lives, and what is sent of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor, nn

HOST = torch.device("cpu")
ALIGNMENT_BYTES = 64
"""Memory that torch allocates on the CPU begins at a multiple of it, and so does what is shared with engines."""


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by canonical name, not detached; one that has several names (tied embeddings) by its
    first."""
    names: dict[Tensor, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(tensor, name)
    return {name: tensor for tensor, name in names.items()}


@torch.no_grad()
def align(model: nn.Module) -> None:
    """Copies tensors in host memory that begin anywhere, in a mapped file for example, to aligned memory.

    The last bits of a product of few rows on the CPU depend on where its operands begin. A session's first step must
    not differ in them from later ones, or a resumed run is not the one that went on.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device == HOST and tensor.data_ptr() % ALIGNMENT_BYTES:
            tensor.data = tensor.data.clone()


@torch.no_grad()
def copy_alike(theirs: Mapping[str, Tensor], mine: Mapping[str, Tensor]) -> None:
    """Fills the tensors that have the name and the shape of another model's."""
    for name, tensor in mine.items():
        if name in theirs and theirs[name].shape == tensor.shape:
            tensor.copy_(theirs[name])


class HostPlaces:
    """Where tensors wait in host memory while others use their device: each always in its own place, which is pinned
    where the device is a GPU, so that going there is one copy and no allocation."""

    def __init__(self) -> None:
        self._places: dict[str, Tensor] = {}

    def take(self, name: str, tensor: Tensor, *, copies: bool = True) -> Tensor:
        """The tensor in its place.

        Args:
            copies: False leaves there what was, for a tensor that is overwritten before it is read.
        """
        place = self._places.get(name)
        if place is None or (place.shape, place.dtype) != (tensor.shape, tensor.dtype):
            pinned = tensor.device.type == "cuda"
            place = self._places[name] = torch.empty_like(tensor, device="cpu", pin_memory=pinned)
        if copies:
            place.copy_(tensor)
        return place

    def bring(self, tensor: Tensor, device: torch.device, *, copies: bool = True) -> Tensor:
        """A tensor on the device, like one that waits; its place stays.

        Args:
            copies: False for one that is written before it is read.
        """
        brought = torch.empty_like(tensor, device=device, pin_memory=False)
        return brought.copy_(tensor, non_blocking=True) if copies else brought


def move_moments(optimizer: torch.optim.Optimizer, elsewhere: Callable[[str, Tensor], Tensor]) -> None:
    """Puts an optimizer's moments elsewhere; its counts of steps stay.

    Args:
        elsewhere: a name and a moment -> the same in other memory.
    """
    for number, state in enumerate(optimizer.state.values()):
        state.update({k: elsewhere(f"{k} {number}", moment) for k, moment in state.items() if k != "step"})


class MovedModel:
    """A model that leaves its device and comes back, with all parameters and buffers."""

    def __init__(self, model: nn.Module, places: HostPlaces) -> None:
        self._model, self._places = model, places

    def is_on(self, device: torch.device) -> bool:
        """By the first parameter, in microseconds: `Module.to` walks over all modules even when nothing has to move,
        which on CPU slots cost more than the device lease around it."""
        return next(self._model.parameters()).device == device

    @torch.no_grad()
    def leave(self, without: Collection[str] = ()) -> None:
        """Into host memory; of the tensors named there is nothing to keep."""
        for name, tensor in self._tensors().items():
            tensor.data = self._places.take(name, tensor.detach(), copies=name not in without)

    @torch.no_grad()
    def return_to(self, device: torch.device, without: Collection[str] = ()) -> None:
        """Onto the device; the tensors named are filled there."""
        for name, tensor in self._tensors().items():
            tensor.data = self._places.bring(tensor.detach(), device, copies=name not in without)

    def _tensors(self) -> dict[str, Tensor]:
        """Each once, buffers that are not saved too."""
        return {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}
