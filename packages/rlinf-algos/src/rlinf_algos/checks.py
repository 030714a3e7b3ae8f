"""Validates inputs: finite numbers, equal shapes, masks of zeros and ones.

A NaN in one advantage turns a whole model into NaN, and a [N, 1] that broadcasts against an [N] silently trains on
wrong numbers. Both raise here, with the tensor's name and the place.
"""

import math
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from rlinf_algos.errors import AlgosError, NonFiniteError, ShapeError
from rlinf_algos.ranges import check_range as check_range  # beside the checks of tensors, for those who need both


class DeferredChecks:
    """Checks that are read later, all at once.

    Each check reads a number from its tensor's device, and on a GPU a number can only be read once everything before it
    is computed. Inside `collecting` checks of values leave a flag on the device instead, so that what follows is
    launched without waiting; `raise_if_failed` reads all flags. An error then names the tensor, and not the place in
    it. Shapes and dtypes are still checked immediately.

    Example:
        checks = DeferredChecks()
        with checks.collecting():
            loss = ppo_clip_loss(...).loss_terms.sum()
        loss.backward()
        checks.raise_if_failed()
    """

    def __init__(self) -> None:
        self._failures: list[tuple[str, Tensor]] = []

    @contextmanager
    def collecting(self) -> Generator[None]:
        """Defers the checks of this thread inside the block."""
        token = _DEFERRED.set(self)
        try:
            yield
        finally:
            _DEFERRED.reset(token)

    def add(self, failure: str, is_good: Tensor) -> None:
        """Adds a check.

        Args:
            failure: the message if it fails, a sentence without a full stop.
            is_good: scalar bool, on any device.
        """
        self._failures.append((failure, is_good.detach()))

    def raise_if_failed(self) -> None:
        """Reads the checks since the last call. Raises: NonFiniteError with the first one that failed."""
        failures, self._failures = self._failures, []
        if not failures:
            return
        are_good = torch.stack([is_good for _, is_good in failures]).tolist()
        for (failure, _), is_good in zip(failures, are_good, strict=True):
            if not is_good:
                raise NonFiniteError(f"{failure} (the place is not known: checks on this device are read together)")


_DEFERRED: ContextVar[DeferredChecks | None] = ContextVar("checks that are read later", default=None)


def deferred_checks() -> DeferredChecks | None:
    """The checks of the surrounding `DeferredChecks.collecting`; None: checks are read immediately."""
    return _DEFERRED.get()


def check_finite(name: str, tensor: Tensor, mask: Tensor | None = None) -> None:
    """Raises if an element is NaN or infinite.

    Args:
        name: what the caller calls the tensor.
        tensor: any shape, any floating dtype; integers and bools always pass.
        mask: bool, the tensor's shape; elements where it is False are not looked at.

    Raises:
        NonFiniteError: `advantages[3, 17]=nan is not finite (2 of 512 elements are not); ...`
    """
    if not tensor.is_floating_point():
        return
    tensor = tensor.detach()
    inside = tensor if mask is None else tensor.masked_fill(~mask, 0.0)
    if (deferred := deferred_checks()) is not None:
        deferred.add(f"{name} is not finite", torch.isfinite(inside).all())
        return
    if _is_sum_finite(inside):
        return
    bad = ~torch.isfinite(tensor)
    if mask is not None:
        bad &= mask
    if not bool(bad.any()):
        return
    indices = bad.nonzero()
    index = tuple(indices[0].tolist())
    place = f"{name}[{', '.join(map(str, index))}]" if index else name
    count = f"{len(indices)} of {tensor.numel()} elements"
    raise NonFiniteError(
        f"{place}={tensor[index].item()} is not finite ({count} are not); look at what produced {name}: "
        "nothing is computed from it"
    )


def check_shape(name: str, tensor: Tensor, shape: Sequence[int], like: str) -> None:
    """Raises `ShapeError` unless `tensor` has exactly the shape of the tensor called `like`."""
    if tuple(tensor.shape) != tuple(shape):
        raise ShapeError(f"{name} has shape {list(tensor.shape)}, {like} has {list(shape)}; they must be equal")


def as_mask(name: str, mask: Tensor | None, like: str, tensor: Tensor) -> Tensor:
    """The mask as bool, or all True for None.

    Raises:
        ShapeError: its shape differs from that of `tensor`, which the caller calls `like`.
        AlgosError: it holds something other than 0 and 1 (a weight is not a mask).
    """
    if mask is None:
        return torch.ones(tensor.shape, dtype=torch.bool, device=tensor.device)
    check_shape(name, mask, tensor.shape, like)
    if mask.dtype == torch.bool:
        return mask
    inside = mask != 0
    if (deferred := deferred_checks()) is not None:
        deferred.add(f"{name} has something other than 0 and 1", (inside.to(mask.dtype) == mask).all())
    elif not torch.equal(inside.to(mask.dtype), mask):
        index = tuple(((mask != 0) & (mask != 1)).nonzero()[0].tolist())
        raise AlgosError(f"{name}[{', '.join(map(str, index))}]={mask[index].item()}; a mask holds 0 and 1 only")
    return inside


def masked(name: str, tensor: Tensor, mask: Tensor) -> Tensor:
    """`tensor` in at least float32 with 0 where the mask is False, after a finite check where it is True.

    What lies outside the mask, NaN included, reaches neither the value nor the gradient.
    """
    filled = at_least_float32(tensor).masked_fill(~mask, 0.0)
    if deferred_checks() is not None or not _is_sum_finite(filled.detach()):
        check_finite(name, tensor, mask)
    return filled


def _is_sum_finite(tensor: Tensor) -> bool:
    """False if an element is not finite: a sum with NaN or infinity is never finite. One pass without writes; a sum of
    finite numbers that overflows also gives False, so False means that a closer check is needed."""
    return math.isfinite(tensor.sum().item())


def at_least_float32(tensor: Tensor) -> Tensor:
    """bfloat16, float16, integers and bools become float32; float32 and float64 stay."""
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()
