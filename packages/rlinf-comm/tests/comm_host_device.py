"""A device for weights where there is none. Its memory is the host's and really crosses to other processes; what its
kernels would do is done by their model on the CPU."""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING

from comm_fake_driver import FakeDriver

from rlinf_comm import _C, cuda
from rlinf_comm.copies import CopyProgram, DigestTable, Int64s
from rlinf_comm.ipc.arena import IpcArena
from rlinf_comm.ipc.driver import Driver
from rlinf_comm.ipc.opened import OpenedArenas

if TYPE_CHECKING:
    import torch


class HostDevice:
    """A `rlinf_comm.weights.device.Device`.

    Args:
        type: of the torch tensors that count as its own; with "cuda", all tensors are elsewhere.
        refuses: functions of the driver that fail.
        lends: whether others can map what `lasting` returns, as they can with torch's memory of a GPU.
        identity: devices with different ones are not the same.
    """

    ordinal = 0

    def __init__(
        self, type: str = "cpu", *, refuses: tuple[str, ...] = (), lends: bool = False, identity: int = 1
    ) -> None:
        self.type, self.identity = type, identity
        self.driver, self.arenas = _driver(refuses if lends else ("allocate", *refuses))

    def new_arena(self, num_bytes: int) -> IpcArena:
        return IpcArena.create(self.ordinal, num_bytes, driver=self.driver)

    def wait(self) -> None:
        pass

    def lasting(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copies of tensors, in one allocation of the driver's."""
        places, num_bytes = {}, 0
        for name, tensor in tensors.items():
            places[name] = num_bytes
            num_bytes += -(-tensor.nbytes // 512) * 512
        pointer = self.driver.allocate(self.ordinal, max(num_bytes, 1))
        lasting = {}
        for name, tensor in tensors.items():
            memory = self.bytes_at(pointer + places[name], max(tensor.nbytes, 1))[: tensor.nbytes]
            lasting[name] = memory.view(tensor.dtype).view(tensor.shape).copy_(tensor)
        return lasting

    def bytes_at(self, pointer: int, num_bytes: int) -> torch.Tensor:
        import torch

        return torch.frombuffer((ctypes.c_uint8 * num_bytes).from_address(pointer), dtype=torch.uint8)

    def copies(self, program: CopyProgram) -> _Copies:
        return _Copies(cuda.CudaCopyProgram(program.table, program.digests), program.digests)

    def digests(self, table: DigestTable) -> _Digests:
        return _Digests(cuda.CudaDigestProgram(table), table.num_digests)


@functools.cache
def _driver(refuses: tuple[str, ...]) -> tuple[Driver, OpenedArenas]:
    """The one of this process."""
    driver = FakeDriver(refuses=refuses, real_addresses=True)
    return driver, OpenedArenas(driver)


class _Copies:
    def __init__(self, program: cuda.CudaCopyProgram, digests: DigestTable | None) -> None:
        self._program, self._num_digests = program, digests.num_digests if digests else 0

    def run(self, src_pointers: Int64s, dst_pointers: Int64s) -> None:
        _C.run_copy_tiles_on_cpu(self._program.lower(src_pointers, dst_pointers))

    def run_with_digests(self, src_pointers: Int64s, dst_pointers: Int64s) -> list[int]:
        tiles = self._program.lower_with_digests(src_pointers, dst_pointers)
        sums = _C.run_digested_copy_tiles_on_cpu(*tiles, self._num_digests)
        return [low | high << 64 for low, high in sums]


class _Digests:
    def __init__(self, program: cuda.CudaDigestProgram, num_digests: int) -> None:
        self._program, self._num_digests = program, num_digests

    def run(self, pointers: Int64s) -> list[int]:
        sums = _C.digest_tiles_on_cpu(self._program.lower(pointers), self._num_digests)
        return [low | high << 64 for low, high in sums]
