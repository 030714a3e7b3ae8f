"""Copies between memory that both sides already have."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlinf_comm import _C

if TYPE_CHECKING:
    import torch


def copy_into(destination: torch.Tensor, source: torch.Tensor) -> None:
    """Copies a taken tensor into one of your own, so that the taken one can go. Other Python threads run meanwhile.

    From 4 MB on the first copies of a size (of the same power of two) are written by turns through the caches and past
    them, with non-temporal stores, and the faster way stays for the process. The environment variable RLINF_COMM_STORES
    decides without: cached, streaming, or measured, which is the default.

    Args:
        destination: Contiguous CPU tensor.
        source: Contiguous CPU tensor of the same shape and dtype, in other memory.

    Raises:
        ValueError: shapes, dtypes, devices or strides are not as above, or the two share memory; says which.
    """
    if destination.shape != source.shape or destination.dtype != source.dtype:
        raise ValueError(
            f"copy_into: destination is {destination.dtype} {tuple(destination.shape)}, "
            f"source is {source.dtype} {tuple(source.shape)}; they must agree"
        )
    for name, tensor in (("destination", destination), ("source", source)):
        if not tensor.is_cpu or not tensor.is_contiguous() or tensor.is_neg() or tensor.is_conj():
            raise ValueError(f"copy_into: {name} must be a contiguous CPU tensor; this one is not, on {tensor.device}")
    if destination.requires_grad and not destination.is_leaf:
        raise ValueError("copy_into: destination is the result of a differentiated operation; use destination.detach()")
    to, start, num_bytes = destination.data_ptr(), source.data_ptr(), source.nbytes
    if max(to, start) < min(to, start) + num_bytes and num_bytes:
        raise ValueError("copy_into: destination and source share memory")
    _C.copy_bytes(to, start, num_bytes)
