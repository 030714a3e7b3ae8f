"""The thin layer over the CUDA driver, against a libcuda.so.1 of our own that logs its calls: arguments, clean-up."""

import ctypes
import os
import pathlib
import shutil
import subprocess

import pytest

from rlinf_comm import _C

SOURCE = pathlib.Path(__file__).with_name("fake_cuda.c")
COMPILER = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")


def build(folder, *options):
    path = str(folder / "libfakecuda.so")
    command = [COMPILER, "-shared", "-fPIC", "-w", "-Wl,-soname,libfakecuda.so", *options, SOURCE, "-o", path]
    subprocess.run(command, check=True, timeout=600)
    return path


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return build(tmp_path_factory.mktemp("cuda"))


@pytest.fixture
def fake(path):
    library = ctypes.CDLL(path)
    library.take_log.restype = ctypes.c_char_p
    library.fail_in(b"")
    library.take_log()
    yield library
    library.fail_in(b"")
    assert library.context_depth() == 0  # whatever failed, the caller's context is current again


@pytest.fixture
def driver(path, fake):
    return _C.CudaDriver.load(path)


def log(fake, depth=1):
    """The calls, all made with the device's context current."""
    lines = [line.rsplit(" @", 1) for line in fake.take_log().decode().splitlines()]
    assert all(int(at) == depth for name, at in lines if not name.startswith("retain"))
    return [name for name, _ in lines if not name.startswith("retain")]


def test_a_context_is_retained_once_per_device(driver, fake):
    for device in (0, 1, 0, 1):
        driver.free(device, 1)
    lines = fake.take_log().decode().splitlines()
    assert [line for line in lines if line.startswith("retain")] == ["retain 10 @0", "retain 11 @0"]


def test_legacy_handles(driver, fake):
    pointer = driver.allocate(0, 100)
    handle = driver.export_legacy(0, pointer)
    assert (pointer, handle) == (0x5000, b"A" * 64)
    assert driver.open_legacy(1, b"x" + bytes(62) + b"y") == 0x6000
    driver.close_legacy(1, 0x6000)
    assert driver.allocation_of(0, 0x5010) == (0x5000, 100)
    driver.free(0, pointer)
    assert log(fake) == ["alloc 100", "export 5000", "open xy flags=1", "close 6000", "range 5010", "free 5000"]
    with pytest.raises(ValueError, match="64 bytes, not 3"):
        driver.open_legacy(0, b"abc")


def test_mapped_memory_is_exported_imported_and_released(driver, fake):
    mapping = driver.create_mapping(1, 5000)
    assert mapping == (0x99, 0x7000, 8192)
    calls = ["create 8192 type=1 handles=1 location=1,11 flags=0", "reserve 8192", "map 7000 8192 0 99"]
    assert log(fake) == [*calls, "access 7000 8192 location=1,11 flags=3 x1"]
    assert driver.export_descriptor(mapping) == 55
    assert driver.import_descriptor(0, 56, 8192) == (0x9A, 0x7000, 8192)
    lines = [line for line in fake.take_log().decode().splitlines() if not line.startswith("retain")]
    assert lines[:2] == ["share 99 type=1 @0", "import 56 type=1 @1"]
    assert lines[-1] == "access 7000 8192 location=1,10 flags=3 x1 @1"
    driver.release_mapping(1, mapping)
    assert log(fake) == ["unmap 7000 8192", "unreserve 7000 8192", "release 99"]


@pytest.mark.parametrize(
    ("failing", "undone"),
    [
        ("reserve", ["release 99"]),
        ("map", ["unreserve 7000 4096", "release 99"]),
        ("access", ["unmap 7000 4096", "unreserve 7000 4096", "release 99"]),
    ],
)
def test_a_mapping_that_fails_half_way_leaves_nothing(driver, fake, failing, undone):
    fake.fail_in(failing.encode())
    if failing == "reserve":
        undone = ["unreserve 7000 4096", *undone]  # the fake gives an address even so
    with pytest.raises(OSError, match=r"CUDA error 801 \(CUDA_ERROR_NOT_SUPPORTED\)"):
        driver.create_mapping(0, 1)
    assert log(fake)[-len(undone) :] == undone


def test_bytes_go_there_and_back(driver, fake):
    driver.write(0, 0x5000, b"abc")
    assert driver.read(0, 0x5004, 3) == b"zzz"
    assert log(fake) == ["write 5000 abc", "read 5004 3"]


def test_what_cannot_be_loaded_is_told(path, fake, tmp_path):
    with pytest.raises(ValueError, match=r"no CUDA driver: /absent.so"):
        _C.CudaDriver.load("/absent.so")
    with pytest.raises(ValueError, match=r"has no cuMemCreate; update it"):
        _C.CudaDriver.load(build(tmp_path, "-DcuMemCreate=other"))
    fake.fail_in(b"cuInit")
    with pytest.raises(ValueError, match=r"finds no device it can use \(cuInit: error 100\)"):
        _C.CudaDriver.load(path)
