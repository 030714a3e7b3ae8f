"""Sharing device memory, against a driver that only writes down what is asked of it."""

import dataclasses
import multiprocessing
import pathlib
import signal

import pytest
from comm_fake_driver import FakeDriver

from rlinf_comm import _C, pack, unpack
from rlinf_comm.errors import IpcError
from rlinf_comm.ipc.arena import ArenaHandle, IpcArena
from rlinf_comm.ipc.driver import load_driver
from rlinf_comm.ipc.opened import OpenedArenas

SPAWN = multiprocessing.get_context("spawn")


@pytest.mark.parametrize(
    ("refuses", "kind", "calls"),
    [
        ([], "legacy", ["allocate", "export_legacy"]),
        (
            ["export_legacy"],
            "descriptor",
            ["allocate", "export_legacy", "free", "create_mapping", "export_descriptor"],
        ),
    ],
)
def test_the_first_handle_kind_that_works_is_taken_and_the_others_leave_nothing(refuses, kind, calls):
    driver = FakeDriver(refuses=refuses)
    arena = IpcArena.create(0, 5000, driver=driver)
    assert arena.handle.kind == kind
    assert [call[0] for call in driver.calls] == calls
    assert len(driver.live) == 1
    arena.close()
    assert driver.live == {}


def test_when_no_kind_works_every_reason_is_named():
    driver = FakeDriver(refuses=["allocate", "export_descriptor"])
    with pytest.raises(IpcError, match=r"legacy: cuallocate: .*; descriptor: cuexport_descriptor: "):
        IpcArena.create(0, 1 << 20, driver=driver)
    assert driver.live == {}


def foreign(handle, process):
    return dataclasses.replace(handle, process=process)


@pytest.fixture
def living():
    """(pid, start time) of another process that lives."""
    process = SPAWN.Process(target=signal.pause)
    process.start()
    ticks = int(pathlib.Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()[19])
    yield process.pid, ticks
    process.kill()
    process.join()


def test_an_arena_is_opened_once_and_closed_with_its_last_user(living):
    driver = FakeDriver()
    handle = foreign(IpcArena.create(0, 4096, driver=driver).handle, living)
    arenas = OpenedArenas(driver)
    driver.calls.clear()
    first, second = arenas.open(handle, 0), arenas.open(handle, 0)
    assert first == second and [call[0] for call in driver.calls] == ["open_legacy"]
    other = arenas.open(dataclasses.replace(handle, nonce=b"another "), 0)  # same address and handle, later arena
    assert other != first and arenas.num_open() == 2
    arenas.close(handle, 0)
    assert arenas.num_open() == 2
    arenas.close(handle, 0)
    assert driver.calls[-1] == ("close_legacy", 0, first) and arenas.num_open() == 1


def test_the_own_process_s_arena_is_its_pointer_and_never_opened():
    driver = FakeDriver()
    arena = IpcArena.create(0, 4096, driver=driver)
    driver.calls.clear()
    arenas = OpenedArenas(driver)
    assert arenas.open(arena.handle, 0) == arena.handle.pointer
    arenas.close(arena.handle, 0)
    assert driver.calls == []


def test_a_process_of_another_container_with_the_same_number_is_not_taken_for_this_one():
    driver = FakeDriver()
    made_elsewhere = dataclasses.replace(IpcArena.create(0, 4096, driver=driver).handle, nonce=b"unknown!")
    assert OpenedArenas(driver).open(made_elsewhere, 0) != made_elsewhere.pointer
    assert driver.calls[-1][0] == "open_legacy"


def test_dead_processes_and_refusals_of_the_driver_are_told(living):
    driver = FakeDriver(refuses=["open_legacy"])
    handle = IpcArena.create(0, 4096, driver=FakeDriver()).handle
    with pytest.raises(IpcError, match=r"process 4194399, whose device memory this is, is gone"):
        OpenedArenas(driver).open(foreign(handle, (4194399, 7)), 0)
    arenas = OpenedArenas(driver)
    with pytest.raises(
        IpcError, match=rf"cannot open the legacy handle of process {living[0]}: cuopen_legacy: CUDA.*801"
    ):
        arenas.open(foreign(handle, living), 0)
    assert arenas.num_open() == 0


@pytest.mark.skipif(_C.num_cuda_devices() > 0, reason="has a device")
def test_without_a_driver_the_error_says_so():
    with pytest.raises(IpcError, match=r"no CUDA driver|finds no device"):
        load_driver()


def test_handles_are_hashable_records():
    handle = ArenaHandle("legacy", b"t", None, (1, 2), 3, 4, b"n")
    assert hash(handle) == hash(unpack(pack(handle)))
