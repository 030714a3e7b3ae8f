"""What the weights of a rank need of its device. Tests put host memory in its place."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Protocol

from rlinf_comm import cuda
from rlinf_comm.copies import CopyProgram, DigestTable, Int64s
from rlinf_comm.errors import IpcError
from rlinf_comm.ipc.arena import IpcArena, opened_arenas
from rlinf_comm.ipc.driver import Driver, load_driver
from rlinf_comm.ipc.opened import OpenedArenas

if TYPE_CHECKING:
    import torch

MAX_CTAS = 1056
"""Thread blocks: 8 on each of the 132 multiprocessors of an H100. Somebody waits for a copy, and a digest that runs
beside generation is over the sooner."""


class Copies(Protocol):
    """A copy program that was prepared once for a device."""

    def run(self, src_pointers: Int64s, dst_pointers: Int64s) -> None:
        """Copies after what is on the current stream; returns when the bytes are there."""
        ...

    def run_with_digests(self, src_pointers: Int64s, dst_pointers: Int64s) -> list[int]:
        """The same in one pass with the digests of what is written."""
        ...


class Digests(Protocol):
    """A digest table that was prepared once."""

    def run(self, pointers: Int64s) -> list[int]:
        """The digests of what the memory holds now, from any thread."""
        ...


class TransferDevice(Protocol):
    """One device of this process."""

    driver: Driver
    ordinal: int
    """As the driver counts the devices of this process."""
    identity: int
    """The same in every process that has this device, and not 0; below 2^63."""
    type: str
    """Of torch's devices: "cuda"."""
    arenas: OpenedArenas
    """The arenas of other processes that are open in this one."""

    def new_arena(self, num_bytes: int) -> IpcArena:
        """Memory that other processes can open. Raises IpcError."""
        ...

    def wait(self) -> None:
        """Returns when all work that was begun on the device has been done."""
        ...

    def bytes_at(self, pointer: int, num_bytes: int) -> torch.Tensor:
        """uint8[num_bytes], at least one, of the device's memory, which somebody else keeps alive."""
        ...

    def copies(self, program: CopyProgram) -> Copies:
        """The program's copies and digests, on this device."""
        ...

    def digests(self, table: DigestTable) -> Digests:
        """The table has no casts."""
        ...


class CudaDevice:
    """The current CUDA device of torch."""

    type = "cuda"

    def __init__(self) -> None:
        """Raises: DeviceUnavailable or IpcError, with the reason, where there is none that can be used."""
        import torch

        cuda.check_device()
        if not torch.cuda.is_available():
            raise cuda.DeviceUnavailable("torch finds no CUDA device, or was built without CUDA")
        torch.cuda.init()
        self.driver = load_driver()
        self.ordinal = torch.cuda.current_device()
        uuid = str(torch.cuda.get_device_properties(self.ordinal).uuid)
        self.identity = int.from_bytes(hashlib.blake2b(uuid.encode(), digest_size=8).digest(), "little") >> 1 | 1
        self.arenas = opened_arenas(self.driver)
        self._checks = torch.cuda.Stream(self.ordinal)
        """Digests run beside what a model does on its own stream."""

    def new_arena(self, num_bytes: int) -> IpcArena:
        import torch

        try:
            return IpcArena.create(self.ordinal, num_bytes, driver=self.driver)
        except IpcError:
            torch.cuda.empty_cache()  # freed blocks that torch keeps may be what is missing
            return IpcArena.create(self.ordinal, num_bytes, driver=self.driver)

    def wait(self) -> None:
        import torch

        torch.cuda.synchronize(self.ordinal)

    def bytes_at(self, pointer: int, num_bytes: int) -> torch.Tensor:
        import torch

        return torch.as_tensor(_DeviceBytes(pointer, num_bytes), device=f"cuda:{self.ordinal}")

    def copies(self, program: CopyProgram) -> Copies:
        return _CudaCopies(cuda.CudaCopyProgram(program.table, program.digests, device=self.ordinal), self.ordinal)

    def digests(self, table: DigestTable) -> Digests:
        return _CudaDigests(cuda.CudaDigestProgram(table, device=self.ordinal), self._checks)


class _DeviceBytes:
    """Bytes on a device, by the protocol that torch takes."""

    def __init__(self, pointer: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (pointer, False),
            "shape": (num_bytes,),
            "strides": None,
            "typestr": "|u1",
            "version": 3,
        }


class _CudaCopies:
    def __init__(self, program: cuda.CudaCopyProgram, device: int) -> None:
        self._program, self._device = program, device

    def run(self, src_pointers: Int64s, dst_pointers: Int64s) -> None:
        import torch

        stream = torch.cuda.current_stream(self._device)
        self._program.run(src_pointers, dst_pointers, stream=stream, max_ctas=MAX_CTAS)
        stream.synchronize()

    def run_with_digests(self, src_pointers: Int64s, dst_pointers: Int64s) -> list[int]:
        import torch

        stream = torch.cuda.current_stream(self._device)
        return self._program.run_with_digests(src_pointers, dst_pointers, stream=stream, max_ctas=MAX_CTAS)


class _CudaDigests:
    def __init__(self, program: cuda.CudaDigestProgram, stream: torch.cuda.Stream) -> None:
        self._program, self._stream = program, stream

    def run(self, pointers: Int64s) -> list[int]:
        return self._program.run(pointers, stream=self._stream, max_ctas=MAX_CTAS)
