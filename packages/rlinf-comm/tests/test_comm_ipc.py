"""Sharing device memory, against a driver that only writes down what is asked of it; descriptors really cross."""

import dataclasses
import gc
import multiprocessing
import os
import pathlib
import random
import signal

import pytest

from rlinf_comm import _C, pack, unpack
from rlinf_comm.errors import IpcError
from rlinf_comm.ipc import IpcArena, answer_probe, choose, facts_of, load_driver, probe
from rlinf_comm.ipc import driver as drivers
from rlinf_comm.ipc.arena import ALIGNMENT, ArenaHandle, DeviceMemory, IpcRecord, Ranges, open_memory
from rlinf_comm.ipc.opened import OpenedArenas
from rlinf_comm.ipc.transport import Facts
from rlinf_comm.testing.fake_driver import FakeDriver

A, B = b"A" * 16, b"B" * 16
SPAWN = multiprocessing.get_context("spawn")
OTHER = (os.getppid(), 0)


def facts(**changes):
    base = Facts(
        process=(1, 1, 9),
        host="here",
        uuid=A,
        visible=(A,),
        reachable=(),
        kinds=("legacy", "descriptor"),
        has_events=True,
    )
    return dataclasses.replace(base, **changes)


def echo_that(**refusals):
    kinds = []

    def echo(kind):
        kinds.append(kind)
        return refusals.get(kind)

    return echo, kinds


RECEIVER = {"process": (1, 1, 8)}  # the same numbers in another container
CHOICES = [
    # sender, receiver, refusals of the echo, transport, kind, asked, part of the reason
    ({}, {}, {}, "same process", None, [], "the pointer itself"),
    ({}, RECEIVER, {}, "same device", "legacy", ["legacy"], "4 KB came back through a legacy handle"),
    ({}, RECEIVER, {"legacy": "MPS"}, "same device", "descriptor", ["legacy", "descriptor"], "legacy handle: MPS"),
    ({}, RECEIVER, {"legacy": "x", "descriptor": "y"}, "host shared memory", None, ["legacy", "descriptor"], "x; desc"),
    ({}, {**RECEIVER, "has_events": False}, {}, "host shared memory", None, [], "cannot share events"),
    ({}, {**RECEIVER, "uuid": B, "visible": (B,)}, {}, "host shared memory", None, [], "CUDA_VISIBLE_DEVICES"),
    (
        {},
        {**RECEIVER, "uuid": B, "visible": (B, A)},
        {},
        "host shared memory",
        None,
        [],
        "no peer access from GPU-4242",
    ),
    (
        {},
        {**RECEIVER, "uuid": B, "visible": (B, A), "reachable": (A,)},
        {},
        "peer device",
        "legacy",
        ["legacy"],
        "peer access between",
    ),
    ({}, {**RECEIVER, "host": "there"}, {}, "network", None, [], "different hosts, and no fabric"),
    (
        {"kinds": ("legacy", "fabric")},
        {**RECEIVER, "host": "there", "kinds": ("fabric",)},
        {"fabric": "no IMEX"},
        "network",
        None,
        ["fabric"],
        "fabric: no IMEX",
    ),
    (
        {"kinds": ("legacy", "fabric")},
        {**RECEIVER, "host": "there", "kinds": ("fabric",)},
        {},
        "peer device",
        "fabric",
        ["fabric"],
        "one fabric",
    ),
]


@pytest.mark.parametrize(("sender", "receiver", "refusals", "transport", "kind", "kinds", "reason"), CHOICES)
def test_the_transport_follows_from_the_facts_and_the_echo(sender, receiver, refusals, transport, kind, kinds, reason):
    echo, log = echo_that(**refusals)
    choice = choose(facts(**sender), facts(**receiver), echo)
    assert (choice.transport, choice.kind, log) == (transport, kind, kinds)
    assert reason in choice.reason


def test_facts_are_uuids_and_kinds_of_the_device_whatever_its_ordinal():
    everything = {
        drivers.DESCRIPTORS_SUPPORTED,
        drivers.FABRIC_SUPPORTED,
        drivers.IPC_EVENTS_SUPPORTED,
        drivers.VIRTUAL_MEMORY_SUPPORTED,
    }
    device_facts = facts_of(FakeDriver([B, A], peers=[(A, B)], supports=everything), 1)
    assert (device_facts.uuid, device_facts.visible, device_facts.reachable) == (A, (B, A), (B,))
    assert device_facts.kinds == ("legacy", "descriptor", "fabric") and device_facts.has_events
    device_facts = facts_of(FakeDriver([A], supports={drivers.DESCRIPTORS_SUPPORTED, drivers.FABRIC_SUPPORTED}), 0)
    assert device_facts.kinds == ("legacy",) and not device_facts.has_events
    assert unpack(pack(device_facts)) == device_facts


def test_ranges_never_overlap_and_merge_to_the_whole_again():
    rng = random.Random(1)
    ranges, taken = Ranges(64 * ALIGNMENT), {}
    for _ in range(3000):
        if taken and rng.random() < 0.5:
            offset = rng.choice(list(taken))
            ranges.give(offset, taken.pop(offset))
        else:
            num_bytes = rng.choice([0, 1, ALIGNMENT, ALIGNMENT + 1, 9 * ALIGNMENT])
            offset = ranges.take(num_bytes)
            if offset is not None:
                end = offset + max(num_bytes, 1)
                assert offset % ALIGNMENT == 0 and end <= 64 * ALIGNMENT
                assert all(end <= other or offset >= other + max(size, 1) for other, size in taken.items())
                taken[offset] = num_bytes
    for offset, num_bytes in taken.items():
        ranges.give(offset, num_bytes)
    assert ranges.take(64 * ALIGNMENT) == 0


@pytest.mark.parametrize(
    ("refuses", "kind", "calls"),
    [
        ([], "legacy", ["allocate", "export_legacy"]),
        (
            ["export_legacy"],
            "descriptor",
            ["allocate", "export_legacy", "free", "create_mapping", "export_descriptor"],
        ),
        (["allocate", "export_descriptor"], "fabric", ["allocate", "create_mapping", "export_descriptor"]),
    ],
)
def test_the_first_handle_kind_that_works_is_taken_and_the_others_leave_nothing(refuses, kind, calls):
    driver = FakeDriver(refuses=refuses)
    arena = IpcArena.create(0, 5000, driver=driver)
    assert arena.handle.kind == kind
    assert [call[0] for call in driver.calls][: len(calls)] == calls
    assert len(driver.live) == 1
    arena.close()
    assert driver.live == {}


def test_when_no_kind_works_every_reason_is_named():
    driver = FakeDriver(refuses=["allocate", "create_mapping"])
    with pytest.raises(IpcError, match=r"legacy: cuallocate: .*; descriptor: cucreate_mapping: .*; fabric: "):
        IpcArena.create(0, 1 << 20, driver=driver)
    with pytest.raises(ValueError, match="kind='pipe' is none of"):
        IpcArena.create(0, 1, kind="pipe", driver=driver)


def test_reserved_memory_comes_back_when_its_last_user_is_gone_and_a_full_arena_says_so():
    arena = IpcArena.create(0, 4 * ALIGNMENT, driver=FakeDriver())
    first, second = arena.reserve(ALIGNMENT + 1), arena.reserve(1)
    assert second.__cuda_array_interface__["data"][0] == arena.handle.pointer + 2 * ALIGNMENT
    with pytest.raises(IpcError, match=r"512 of 2048 bytes free, and no 1000 bytes in a row"):
        arena.reserve(1000)
    del first, second
    gc.collect()
    assert arena._ranges.num_free() == 4 * ALIGNMENT


class View:
    def __init__(self, pointer, shape, strides, typestr="<f4"):
        self.__cuda_array_interface__ = {
            "data": (pointer, False),
            "shape": shape,
            "strides": strides,
            "typestr": typestr,
            "version": 3,
        }


def test_a_record_holds_offset_shape_and_strides_of_any_view_and_crosses_packed():
    arena = IpcArena.create(0, 4096, driver=FakeDriver())
    base = arena.handle.pointer
    record = arena.export(View(base + 64, (3, 5), (4, 12)))
    assert (record.offset, record.shape, record.strides, record.dtype) == (64, (3, 5), (1, 3), "float32")
    assert unpack(pack(record)) == record and len(pack(record)) < 600
    assert arena.export(View(base, (2,), None, "|b1")).dtype == "bool"
    assert arena.export(View(base + 4092, (1,), None)).offset == 4092
    for view in (View(base + 4093, (1,), None), View(base + 4080, (3, 5), (4, 12)), View(base + 4, (3,), (-4,))):
        with pytest.raises(ValueError, match="is not in the arena"):
            arena.export(view)
    with pytest.raises(ValueError, match="no multiples of the element size 4"):
        arena.export(View(base, (2,), (6,)))


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
    driver = FakeDriver([A])
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


def test_a_fabric_handle_may_come_from_a_process_that_is_not_seen_here():
    driver = FakeDriver()
    handle = IpcArena.create(0, 4096, kind="fabric", driver=driver).handle
    OpenedArenas(driver).open(foreign(handle, (4194399, 7)), 0)
    assert driver.calls[-1] == ("import_fabric", 0, handle.token, 4096)


def test_a_device_is_found_by_its_uuid_where_ordinals_differ(living):
    sender = FakeDriver([A, B])
    record = IpcRecord(foreign(IpcArena.create(1, 4096, driver=sender).handle, living), 128, (4,), (1,), "uint8")
    receiver = FakeDriver([B])  # CUDA_VISIBLE_DEVICES=1
    arenas = OpenedArenas(receiver)
    memory = open_memory(record, arenas=arenas, driver=receiver)
    assert receiver.calls[-1][:2] == ("open_legacy", 0)
    assert memory.__cuda_array_interface__["data"][0] in {base + 128 for base in receiver.live}
    del memory
    gc.collect()
    assert arenas.num_open() == 0 and receiver.live == {}
    with pytest.raises(
        IpcError, match=r"is on GPU-42424242-4242-.*does not see \(visible: GPU-41414141-.*set CUDA_VIS"
    ):
        open_memory(record, arenas=arenas, driver=FakeDriver([A]))


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


def echo_in_child(connection, refuses):
    driver = FakeDriver(refuses=refuses)
    choice = answer_probe(connection, device=0, driver=driver)
    connection.send_bytes(pack((choice, len(driver.live))))


@pytest.mark.parametrize(("refuses", "transport"), [([], "same device"), (["import_descriptor"], "host shared memory")])
def test_the_probe_sends_bytes_there_and_back_between_two_processes(refuses, transport):
    """Legacy handles are refused; the descriptor is a real one, handed over a socket."""
    here, there = SPAWN.Pipe()
    child = SPAWN.Process(target=echo_in_child, args=(there, [*refuses, "open_legacy"]))
    child.start()
    driver = FakeDriver(refuses=["allocate"])
    before = len(os.listdir("/proc/self/fd"))
    choice = probe(here, device=0, driver=driver)
    other, num_left = unpack(here.recv_bytes())
    child.join(30)
    assert choice == other and choice.transport == transport
    assert "legacy handle: no arena" in choice.reason
    assert num_left == 0 and driver.live == {}
    assert len(os.listdir("/proc/self/fd")) <= before + 1  # the segment server's socket


@pytest.mark.skipif(_C.num_cuda_devices() > 0, reason="has a device")
def test_without_a_driver_the_error_says_so():
    with pytest.raises(IpcError, match=r"no CUDA driver|finds no device"):
        load_driver()


def test_handles_are_hashable_records():
    handle = ArenaHandle("legacy", b"t", None, A, (1, 2), 3, 4, b"n")
    assert hash(handle) == hash(unpack(pack(handle)))
    assert DeviceMemory(5, 6, None).__cuda_array_interface__["shape"] == (6,)
