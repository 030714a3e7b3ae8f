"""A CUDA driver without a device (rlinf_comm.ipc.driver): it notes what is called. Its descriptors are real, and so are
its legacy handles where pointers are, so two processes can share the memory that it gives."""

import ctypes
import errno
import mmap
import os
import struct


class FakeDriver:
    def __init__(self, *, refuses=(), real_addresses=False):
        self.refuses = set(refuses)
        self.calls = []
        self.live = {}
        self.maps = {}
        self.fds = {}
        """Of what `allocate` gave."""
        self.next = 0x10000
        self.real_addresses = real_addresses
        """Whether pointers of mappings are addresses of this process."""

    def _call(self, name, *arguments):
        self.calls.append((name, *arguments))
        if name in self.refuses:
            raise OSError(errno.EIO, f"cu{name}: CUDA error 801 (CUDA_ERROR_NOT_SUPPORTED)")

    def _address(self, num_bytes):
        self.next += 0x1000000
        self.live[self.next] = num_bytes
        return self.next

    def allocate(self, device, num_bytes):
        self._call("allocate", device, num_bytes)
        if not self.real_addresses:
            return self._address(num_bytes)
        fd, pointer, _ = self._mapped_file(num_bytes)
        self.fds[pointer] = fd
        return pointer

    def free(self, device, pointer):
        self._call("free", device, pointer)
        fd = self.fds.pop(pointer, None)
        self._unmap(pointer)
        if fd is not None:
            os.close(fd)

    def allocation_of(self, device, pointer):
        self._call("allocation_of", device, pointer)
        for base in self.fds:
            if base <= pointer < base + self.live[base]:
                return base, self.live[base]
        raise OSError(errno.EIO, "cuMemGetAddressRange_v2: CUDA error 1 (CUDA_ERROR_INVALID_VALUE)")

    def export_legacy(self, device, pointer):
        self._call("export_legacy", device, pointer)
        if pointer in self.fds:
            return struct.pack("<3q40x", os.getpid(), self.fds[pointer], self.live[pointer])
        return pointer.to_bytes(64, "little")

    def open_legacy(self, device, handle):
        self._call("open_legacy", device, handle)
        if not self.real_addresses:
            return self._address(0)
        pid, fd, num_bytes = struct.unpack("<3q40x", handle)
        own_fd = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
        pointer = self._map(own_fd, num_bytes)[1]
        os.close(own_fd)
        return pointer

    def close_legacy(self, device, pointer):
        self._call("close_legacy", device, pointer)
        self._unmap(pointer)

    def create_mapping(self, device, num_bytes):
        self._call("create_mapping", device, num_bytes)
        return self._mapped_file(num_bytes)

    def _mapped_file(self, num_bytes):
        num_bytes = -(-num_bytes // 4096) * 4096
        fd = os.memfd_create("fake device")
        os.ftruncate(fd, num_bytes)
        return self._map(fd, num_bytes)

    def _map(self, fd, num_bytes):
        mapped = mmap.mmap(fd, num_bytes)
        if self.real_addresses:
            pointer = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
            self.live[pointer] = num_bytes
        else:
            pointer = self._address(num_bytes)
        self.maps[pointer] = mapped
        return fd, pointer, num_bytes

    def _unmap(self, pointer):
        """Forgets memory before its address can be given to another thread. Returns whether it was mapped."""
        mapped = self.maps.pop(pointer, None)
        del self.live[pointer]
        if mapped is not None:
            mapped.close()
        return mapped is not None

    def export_descriptor(self, mapping):
        self._call("export_descriptor", mapping)
        return os.dup(mapping[0])

    def import_descriptor(self, device, fd, num_bytes):
        self._call("import_descriptor", device, fd, num_bytes)
        return self._map(os.dup(fd), num_bytes)

    def release_mapping(self, device, mapping):
        self._call("release_mapping", device, mapping)
        if self._unmap(mapping[1]):
            os.close(mapping[0])

    def _place(self, pointer):
        base = next(base for base in list(self.maps) if base <= pointer < base + self.live.get(base, 0))
        return self.maps[base], pointer - base

    def read(self, device, source, num_bytes):
        memory, at = self._place(source)
        return memory[at : at + num_bytes]

    def write(self, device, target, content):
        memory, at = self._place(target)
        memory[at : at + len(content)] = content
