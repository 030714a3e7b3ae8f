"""The NCCL binding against a library of our own that logs its calls and fails as told; no GPU, no NCCL."""

import ctypes
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
import types

import pytest

from rlinf_comm import nccl
from rlinf_comm.errors import NcclError, NcclTimeout

SOURCE = pathlib.Path(__file__).with_name("fake_nccl.c")
COMPILER = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")
ID = b"the id".ljust(127, b"\0") + b"\x09"


def build(folder, *options, name="libfake.so", soname="libfake.so"):
    path = folder / name
    command = [COMPILER, "-shared", "-fPIC", "-O1", "-w", f"-Wl,-soname,{soname}", *options, SOURCE, "-o", path]
    subprocess.run(command, check=True, timeout=60)
    return str(path)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return build(tmp_path_factory.mktemp("nccl"))


@pytest.fixture
def fake(path):
    """Settings and the log of the fake; everything as new."""
    library = ctypes.CDLL(path)
    library.take_log.restype = ctypes.c_char_p
    library.take_log()

    class Fake:
        def log(self):
            return library.take_log().decode().splitlines()

        def set(self, **values):
            for name, value in values.items():
                ctypes.c_int.in_dll(library, name).value = value

    fake = Fake()
    fake.set(polls=2, async_error=0, send_result=7, child_is_none=0, abort_seconds=0)
    return fake


@pytest.fixture
def library(path):
    library = nccl.load_library([path])
    if library.origin == "mapped":
        pytest.skip("this process has a real NCCL mapped, which goes first")
    return library


def make(library, num_ranks=4, rank=1, **options):
    return nccl.Communicator.create(ID, num_ranks=num_ranks, rank=rank, timeout_s=10, library=library, **options)


class Array:
    """Device memory by CuPy's protocol."""

    def __init__(self, pointer, shape, strides=None, typestr="<f4"):
        self.__cuda_array_interface__ = {
            "data": (pointer, False),
            "shape": shape,
            "strides": strides,
            "typestr": typestr,
            "version": 3,
        }


def test_the_first_usable_candidate_is_taken_and_described(path, library, tmp_path):
    broken = tmp_path / "broken.so"
    broken.write_text("no library")
    loaded = nccl.load_library([str(tmp_path / "absent.so"), str(broken), path])
    assert (loaded.path, loaded.origin, loaded.version) == (path, "candidate", 22907)
    assert loaded.capabilities() == ["split", "shrink", "grow", "revoke", "suspend"]
    assert nccl.unique_id(loaded) == ID


def test_a_library_that_is_too_old_is_refused_with_its_version(library, tmp_path):
    old = build(tmp_path, "-DVERSION=22105", name="libold.so")
    with pytest.raises(NcclError, match=r"libold.so: its version is 22105, and at least 22703.*install nvidia-nccl"):
        nccl.load_library([old])


def test_the_least_torch_brings_a_library_that_is_new_enough():
    """What torch's wheels for Linux ask for, by their metadata on the index."""
    pinned = {"2.6": "2.21.5", "2.7": "2.26.2", "2.8": "2.27.3"}
    project = (pathlib.Path(__file__).parents[1] / "pyproject.toml").read_text()
    (least,) = re.findall(r'"torch>=([0-9.]+)"', project)
    major, minor, patch = map(int, pinned[least].split("."))
    header = pathlib.Path(__file__).parents[3] / "csrc/include/rlinf/comm/nccl/nccl_api.h"
    (oldest,) = re.findall(r"kOldestVersion = (\d+);", header.read_text())
    assert major * 10_000 + minor * 100 + patch >= int(oldest)


def test_a_library_without_a_needed_function_is_refused(library, tmp_path):
    lame = build(tmp_path, "-DncclCommAbort=other", name="liblame.so")
    with pytest.raises(NcclError, match=r"liblame.so: it has no ncclCommAbort"):
        nccl.load_library([lame])


def test_a_mapped_library_goes_before_the_candidates(path, tmp_path):
    mapped = build(tmp_path, name="libnccl-of-torch.so", soname="libnccl.so.2")
    program = (
        "import ctypes, sys; ctypes.CDLL(sys.argv[1])\nfrom rlinf_comm import nccl\n"
        "library = nccl.load_library([sys.argv[2]]); print(library.origin, library.path)"
    )
    run = subprocess.run([sys.executable, "-c", program, mapped, path], capture_output=True, text=True, timeout=60)
    assert run.stdout.split() == ["mapped", mapped], run.stderr


def test_without_any_the_error_lists_what_was_tried(library, tmp_path):
    try:
        ctypes.CDLL("libnccl.so.2")
        pytest.skip("the system has an NCCL")
    except OSError:
        pass
    with pytest.raises(NcclError, match=r"no usable NCCL \(mapped .*none; candidate /absent.*; system libnccl.so.2"):
        nccl.load_library(["/absent"])


def test_creation_passes_its_arguments_and_waits_until_done(library, fake):
    make(library, rank=2, name="weights", max_ctas=4)
    assert fake.log() == [
        "init 2/4 id=the id,9 size=72 magic=cafebeef version=22703 blocking=0 max_ctas=4 share=1 name=weights"
    ]
    with pytest.raises(ValueError, match=r"rank=4 is not one of the 4 ranks 0..3"):
        make(library, rank=4)
    with pytest.raises(ValueError, match="128 bytes, not 3"):
        nccl.Communicator.create(b"abc", num_ranks=1, rank=0, timeout_s=1, library=library)


def test_a_rank_that_never_comes_ends_in_a_timeout_and_an_abort(library, fake):
    fake.set(polls=-1)
    start = time.monotonic()
    with pytest.raises(
        NcclTimeout, match=r"rank 1 of 4 of NCCL communicator 'rlinf': creation was not done within 0.2 s"
    ):
        nccl.Communicator.create(ID, num_ranks=4, rank=1, timeout_s=0.2, library=library)
    assert 0.2 <= time.monotonic() - start < 10
    assert [line.split()[0] for line in fake.log()] == ["init", "abort"]


def test_a_check_ends_a_wait_undoes_a_creation_and_leaves_an_exchange_in_flight(library, fake):
    def check():
        raise KeyError("no more")

    fake.set(polls=-1)
    with pytest.raises(KeyError):
        make(library, check=check)
    assert [line.split()[0] for line in fake.log()] == ["init", "abort"]
    fake.set(polls=2)
    comm = make(library)
    fake.set(polls=-1)
    with pytest.raises(KeyError):
        comm.exchange([nccl.send(Array(0x1000, (2, 3)), to=0)], stream=0, timeout_s=float("inf"), check=check)
    fake.set(polls=2)
    comm = make(library)
    with pytest.raises(KeyError):
        comm.wait_until(lambda: False, timeout_s=float("inf"), check=check)
    comm.wait_until(lambda: True, timeout_s=5)
    assert "abort" not in {line.split()[0] for line in fake.log()}


def test_an_exchange_is_one_group_in_the_given_order(library, fake):
    comm = make(library)
    fake.log()
    transfers = [
        nccl.send(Array(0x1000, (2, 3)), to=0),
        nccl.receive(Array(0x2000, (5,), typestr="<f2"), from_=3),
        nccl.send(Array(0x3000, (1, 7), strides=(999, 1), typestr="|u1"), to=2),
    ]
    comm.exchange(transfers, stream=types.SimpleNamespace(ptr=0x77), timeout_s=5)
    assert fake.log() == [
        "start",
        "send 0x1000 24 type=1 to=0 stream=0x77",
        "recv 0x2000 10 type=1 from=3 stream=0x77",
        "send 0x3000 7 type=1 to=2 stream=0x77",
        "end",
    ]


def test_wrong_peers_and_scattered_arrays_are_refused_before_anything_is_enqueued(library, fake):
    comm = make(library)
    fake.log()
    with pytest.raises(ValueError, match=r"send to rank 4 \(16 bytes\): the ranks are 0..3"):
        comm.exchange([nccl.send(Array(1, (4,)), to=4)], stream=0, timeout_s=1)
    with pytest.raises(ValueError, match=r"byte strides \(32, 4\) is not contiguous"):
        nccl.send(Array(1, (2, 4), strides=(32, 4)), to=0)
    assert fake.log() == []


def test_a_failing_send_still_ends_the_group_and_names_peer_and_reason(library, fake):
    comm = make(library)
    fake.log()
    fake.set(send_result=5)
    with pytest.raises(
        NcclError, match=r"rank 1 of 4 .*send to rank 0 \(4 bytes\).* failed: some error \(detail of it\)"
    ):
        comm.exchange([nccl.send(Array(1, (1,)), to=0), nccl.receive(Array(9, (1,)), from_=0)], stream=0, timeout_s=1)
    assert [line.split()[0] for line in fake.log()] == ["start", "send", "end"]


def test_an_asynchronous_error_breaks_the_communicator_for_good(library, fake):
    comm = make(library)
    fake.set(async_error=6)
    with pytest.raises(NcclError, match=r"receive from rank 2 \(4 bytes\).* failed: remote process exited"):
        comm.exchange([nccl.receive(Array(1, (1,)), from_=2)], stream=0, timeout_s=5)
    with pytest.raises(NcclError, match=r"is broken: exchange .*remote process exited"):
        comm.exchange([], stream=0, timeout_s=5)
    fake.log()
    comm.close()
    assert [line.split()[0] for line in fake.log()] == ["abort"]  # never destroyed


def test_waiting_for_the_device_notices_the_communicator_s_error_and_the_deadline(library, fake):
    comm = make(library)
    with pytest.raises(NcclTimeout, match=r"bucket 3 was not done within 0.1 s"):
        comm.wait_until(lambda: False, timeout_s=0.1, what="bucket 3")
    polls = iter([False, False, True])
    make(library).wait_until(types.SimpleNamespace(query=lambda: next(polls)), timeout_s=5)
    assert list(polls) == []


def test_a_healthy_communicator_is_finalized_then_destroyed_once(library, fake):
    with make(library) as comm:
        fake.log()
    assert [line.split()[0] for line in fake.log()] == ["finalize", "destroy"]
    comm.close()
    assert fake.log() == []
    with pytest.raises(NcclError, match="aborted or closed"):
        comm.exchange([], stream=0, timeout_s=1)


def test_an_exception_in_a_with_block_aborts(library, fake):
    with pytest.raises(KeyError), make(library):
        raise KeyError
    assert [line.split()[0] for line in fake.log()] == ["init", "abort"]


def test_an_abort_that_hangs_does_not_hang_the_caller(library, fake):
    comm = make(library)
    fake.set(abort_seconds=2)
    assert comm.abort(timeout_s=0.1) is False
    with pytest.raises(NcclError, match="it was aborted"):
        comm.exchange([], stream=0, timeout_s=1)


def real_libraries():
    library_path = os.environ.get("RLINF_NCCL_LIBRARY")
    return ([library_path] if library_path else []) + nccl.wheel_libraries()


@pytest.mark.skipif(not real_libraries(), reason="no nvidia-nccl wheel is installed, and RLINF_NCCL_LIBRARY is not set")
def test_a_real_library_has_what_is_declared():
    program = (
        "import sys; from rlinf_comm import nccl\nfound = nccl.load_library(sys.argv[1:])\n"
        "print(found.version, found.error_string(6), *found.capabilities(), sep='|')"
    )
    run = subprocess.run([sys.executable, "-c", program, *real_libraries()], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    version, error, *capabilities = run.stdout.strip().split("|")
    assert int(version) >= 22703 and "remote" in error and "shrink" in capabilities
