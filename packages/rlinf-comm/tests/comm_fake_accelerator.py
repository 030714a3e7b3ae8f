"""A device for the transports of device memory where there is none: its memory is the host's, and really crosses.

Every torch tensor counts as one in device memory; numpy arrays are the host's. The driver's arenas are descriptors of
shared memory; NCCL is a mailbox in this process. Streams are done with their work when they get it.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import itertools
import queue
import sys
import time
import types
from collections.abc import Callable
from typing import Any, cast

import torch

from rlinf_comm import _arrays
from rlinf_comm.errors import NcclError
from rlinf_comm.ipc import facts_of
from rlinf_comm.ipc.driver import Driver
from rlinf_comm.ipc.opened import OpenedArenas
from rlinf_comm.nccl import Library
from rlinf_comm.peers.transports.accelerator import plain_tensor
from rlinf_comm.peers.transports.nccl import Nccl, NcclTransport
from rlinf_comm.testing.fake_driver import FakeDriver


class Stream:
    ptr = 0

    def query(self):
        return True


class FakeAccelerator:
    """One "process" of each `namespace`, so that two ends in one process take each other for two."""

    def __init__(self, *, namespace=0, uuid=b"A" * 16, refuses=()):
        self.driver: Driver = FakeDriver([uuid], refuses=["allocate", *refuses], real_addresses=True)
        self.device = 0
        self.arenas = OpenedArenas(self.driver)
        self.namespace = namespace

    def facts(self):
        facts = facts_of(self.driver, self.device)
        return dataclasses.replace(facts, process=(*facts.process[:2], self.namespace)) if self.namespace else facts

    def holds(self, value):
        if isinstance(value, torch.Tensor):
            return _arrays.has_plain_bytes(value)
        return _arrays.is_foreign_array(type(value))

    def as_tensor(self, array):
        return plain_tensor(array)

    def empty(self, shape, dtype):
        return torch.empty(tuple(shape), dtype=dtype)

    def tensor_over(self, memory, shape, strides, dtype):
        last = sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        start = memory.__cuda_array_interface__["data"][0]
        raw = (ctypes.c_uint8 * ((last + 1) * dtype.itemsize)).from_address(start)
        return torch.frombuffer(raw, dtype=dtype).as_strided(tuple(shape), tuple(strides))

    def make_current(self):
        pass

    def new_stream(self):
        return Stream()

    def current_stream(self):
        return Stream()

    def mark(self):
        return None

    def wait_for_mark(self, stream, mark):
        pass

    @contextlib.contextmanager
    def working_on(self, stream):
        yield

    def synchronize(self, stream):
        pass


class FakeNccl:
    """Matches sends with receives by their order alone, and bytes by their number, as NCCL does."""

    def __init__(self, version=22907):
        self.library: Library | NcclError = cast("Library", types.SimpleNamespace(version=version))
        self.made = []
        self.is_broken = False
        self._ids = 0
        self._pipes = {}
        transport = self

        class Communicator:
            def __init__(self, pipe, rank, name):
                self.pipe, self.rank, self.name = pipe, rank, name
                self.wanted, self.is_aborted = [], False
                pipe["ranks"].add(rank)
                transport.made.append(self)

            @classmethod
            def create(cls, unique_id, *, num_ranks, rank, timeout_s, name, check):
                assert num_ranks == 2
                pipe = transport._pipes.setdefault(unique_id, {"ranks": set(), "bytes": queue.Queue()})
                communicator = cls(pipe, rank, name)
                try:
                    communicator._until(lambda: len(pipe["ranks"]) == 2, check)
                except BaseException:
                    communicator.abort()
                    raise
                return communicator

            def _until(self, is_done, check):
                while not is_done():
                    check()
                    if self.is_aborted or transport.is_broken:
                        raise NcclError(f"{self.name}: remote process exited")
                    time.sleep(0.001)

            def exchange(self, transfers, *, stream, timeout_s, check):
                for transfer in transfers:
                    assert transfer.is_send == (self.rank == 0) and transfer.peer == 1 - self.rank
                    if transfer.is_send:
                        self.pipe["bytes"].put(ctypes.string_at(transfer.pointer, transfer.num_bytes))
                    else:
                        self.wanted.append(transfer)

            def wait_until(self, done, *, timeout_s, check):
                while self.wanted:
                    self._until(lambda: not self.pipe["bytes"].empty(), check)
                    content, transfer = self.pipe["bytes"].get(), self.wanted.pop(0)
                    assert len(content) == transfer.num_bytes, "a send was matched with another's receive"
                    ctypes.memmove(transfer.pointer, content, len(content))
                if self.rank == 0:
                    self._until(self.pipe["bytes"].empty, check)

            def abort(self):
                self.is_aborted = True

        self.Communicator: Any = Communicator

    def find_library(self):
        if isinstance(self.library, NcclError):
            raise self.library
        return self.library

    def unique_id(self):
        self._ids += 1
        return self._ids.to_bytes(128, sys.byteorder)


def nccl_transport(nccl: Nccl | None = None, uuids: Callable[[], bytes] | None = None):
    """The transport; each of its ends has a device of its own, unless `uuids()` says otherwise."""
    numbers = itertools.count(1)

    def open_accelerator():
        return FakeAccelerator(uuid=(uuids or (lambda: next(numbers).to_bytes(16, "little")))())

    return NcclTransport(open_accelerator, nccl or FakeNccl())
