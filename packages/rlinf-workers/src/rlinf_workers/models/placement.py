"""Where a model's tensors are: on the device or in host memory, by canonical name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor, nn

HOST = torch.device("cpu")
ALIGNMENT_BYTES = 64
"""torch aligns CPU memory to this, and so must memory that is shared with engines."""


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device. The host does not wait for a GPU: the copy is from pinned memory, since one from other
    memory waits for everything launched before it."""
    if device.type != "cuda" or tensor.device != HOST:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by canonical name, not detached; a tensor with several names (tied embeddings) appears
    under its first."""
    names: dict[Tensor, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(tensor, name)
    return {name: tensor for tensor, name in names.items()}


@torch.no_grad()
def align(model: nn.Module) -> None:
    """Copies unaligned host tensors, such as those in a mapped file, to aligned memory.

    The last bits of a CPU product of few rows depend on the alignment of its operands. The first step of a session must
    not differ from later ones in them, otherwise a resumed run would diverge from an uninterrupted one.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device == HOST and tensor.data_ptr() % ALIGNMENT_BYTES:
            tensor.data = tensor.data.clone()


@torch.no_grad()
def copy_alike(theirs: Mapping[str, Tensor], mine: Mapping[str, Tensor]) -> None:
    """Copies the tensors that have the same name and shape in another model."""
    for name, tensor in mine.items():
        if name in theirs and theirs[name].shape == tensor.shape:
            tensor.copy_(theirs[name])


class HostPlaces:
    """Host memory for offloaded tensors: each has a fixed place, pinned if the device is a GPU, so that onload is one
    copy without allocation."""

    def __init__(self) -> None:
        self._places: dict[str, Tensor] = {}

    def take(self, name: str, tensor: Tensor, *, copies: bool = True) -> Tensor:
        """Moves the tensor to its host place.

        Args:
            copies: False for a tensor that will be overwritten before it is read: what is there stays, and where it has
                no place yet, it gets none, but the shape without memory of its own.
        """
        place = self._places.get(name)
        if not copies and place is None:
            return torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
        if place is None or (place.shape, place.dtype) != (tensor.shape, tensor.dtype):
            pinned = tensor.device.type == "cuda"
            place = self._places[name] = torch.empty_like(tensor, device="cpu", pin_memory=pinned)
        if copies:
            place.copy_(tensor)
        return place

    def bring(self, tensor: Tensor, device: torch.device, *, copies: bool = True) -> Tensor:
        """A device tensor like an offloaded one, whose host place is kept.

        Args:
            copies: False for a tensor that will be written before it is read.
        """
        brought = torch.empty_like(tensor, device=device, pin_memory=False)
        return brought.copy_(tensor, non_blocking=True) if copies else brought


def move_moments(optimizer: torch.optim.Optimizer, elsewhere: Callable[[str, Tensor], Tensor]) -> None:
    """Moves an optimizer's moments; its step counts stay.

    Args:
        elsewhere: maps a name and a moment to its copy in other memory.
    """
    for number, state in enumerate(optimizer.state.values()):
        state.update({k: elsewhere(f"{k} {number}", moment) for k, moment in state.items() if k != "step"})


def place_steps(optimizer: torch.optim.Optimizer) -> None:
    """Moves step counts that were read from a checkpoint to their parameters' device, where a fused optimizer needs
    them."""
    for group in optimizer.param_groups:
        for parameter in group["params"] if group.get("fused") else ():
            state = optimizer.state.get(parameter, {})
            if "step" in state and state["step"].device != parameter.device:
                state["step"] = state["step"].to(parameter.device)


class MovedModel:
    """A model that is offloaded and onloaded, with all parameters and buffers."""

    def __init__(self, model: nn.Module, places: HostPlaces) -> None:
        self._model, self._places = model, places

    def is_on(self, device: torch.device) -> bool:
        """Checks only the first parameter, in microseconds: `Module.to` walks over all modules even if nothing has to
        move, which cost more on CPU slots than the device lease around it."""
        return next(self._model.parameters()).device == device

    @torch.no_grad()
    def leave(self, without: Collection[str] = ()) -> None:
        """Moves the model to host memory; the content of the named tensors is not kept."""
        for name, tensor in self._tensors().items():
            tensor.data = self._places.take(name, tensor.detach(), copies=name not in without)

    @torch.no_grad()
    def return_to(self, device: torch.device, without: Collection[str] = ()) -> None:
        """Moves the model onto the device; the named tensors are filled there."""
        for name, tensor in self._tensors().items():
            tensor.data = self._places.bring(tensor.detach(), device, copies=name not in without)

    def _tensors(self) -> dict[str, Tensor]:
        """All tensors without duplicates, including non-persistent buffers."""
        return {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}
