"""Digests of tensors, to see that they hold the same bits at two times."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rlinf_comm.copies import DigestProgram, DigestTable, StridedBox, addresses_of

if TYPE_CHECKING:
    import torch


def tensor_digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """The digest of each tensor's bytes, by name.

    Args:
        tensors: on one device, the CPU or a GPU.

    Raises:
        ValueError: a tensor is not contiguous; names it.
    """
    boxes = [
        StridedBox(
            buffer=number,
            shape=[tensor.numel()],
            strides=[tensor.element_size()],
            dtype=f"bytes{tensor.element_size()}",
            digest=number,
            first_index=0,
            index_strides=[1],
        )
        for number, tensor in enumerate(tensors.values())
    ]
    if gaps := [name for name, tensor in tensors.items() if not tensor.is_contiguous()]:
        raise ValueError(f"{gaps[0]}: not contiguous; pass tensor.contiguous()")
    if not boxes:
        return {}
    table = DigestTable.of(boxes)
    on_cpu = next(iter(tensors.values())).device.type == "cpu"
    program = DigestProgram(table) if on_cpu else _on_device(table)
    return dict(zip(tensors, program.run(addresses_of(tensors.values())), strict=True))


def _on_device(table: DigestTable) -> Any:
    from rlinf_comm.weights.device.device import CudaDevice

    return CudaDevice().digests(table)
