"""The native module itself: copies of boxes, shared words, and what it is linked to."""

import pathlib
import subprocess
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rlinf_comm
from rlinf_comm import _C


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_copy_box_agrees_with_torch(data):
    """Any two views, transposed and sliced, of any element size."""
    dtype = data.draw(st.sampled_from([torch.uint8, torch.int16, torch.float32, torch.int64, torch.complex128]))
    shape = data.draw(st.lists(st.integers(0, 6), max_size=4))
    steps = data.draw(st.lists(st.integers(1, 2), min_size=len(shape), max_size=len(shape)))

    def view():
        order = data.draw(st.permutations(range(len(shape))))
        full = [shape[axis] * steps[axis] + 1 for axis in order]
        memory = torch.randint(0, 256, (*full, dtype.itemsize), dtype=torch.uint8).view(dtype).reshape(full)
        back = memory.permute([order.index(axis) for axis in range(len(shape))])
        return memory, back[tuple(slice(1, 1 + n * step, step) for n, step in zip(shape, steps, strict=True))]

    _, source = view()
    memory, destination = view()
    expected_memory = memory.clone()
    expected = torch.as_strided(expected_memory, destination.shape, destination.stride(), destination.storage_offset())
    expected.copy_(source)
    _C.copy_box(
        destination.data_ptr(),
        source.data_ptr(),
        dtype.itemsize,
        list(source.shape),
        [stride * dtype.itemsize for stride in destination.stride()],
        [stride * dtype.itemsize for stride in source.stride()],
    )
    assert memory.reshape(-1).view(torch.uint8).equal(expected_memory.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("num_bytes", [(4 << 20) - 1, 4 << 20, (5 << 20) + 77])
@pytest.mark.parametrize("shift", [0, 1, 33])
def test_large_copies_are_exact_at_any_alignment(num_bytes, shift):
    source = torch.randint(0, 256, (num_bytes + 64,), dtype=torch.uint8)
    destination = torch.zeros(num_bytes + 128, dtype=torch.uint8)
    _C.copy_box(destination.data_ptr() + shift, source.data_ptr() + 5, 1, [num_bytes], [1], [1])
    assert destination[shift : shift + num_bytes].equal(source[5 : 5 + num_bytes])
    assert destination[:shift].eq(0).all()
    assert destination[shift + num_bytes :].eq(0).all()


def test_shared_words_wake_a_waiter():
    segment = _C.Segment.create("words", _C.SharedWords.bytes_needed(4))
    words = _C.SharedWords(segment, 4)
    peer = _C.SharedWords(_C.Segment.open(segment.address()), 4)
    seen = peer.sequence()
    woken = []
    waiting = threading.Thread(target=lambda: woken.append(peer.wait(seen, 20.0)))
    waiting.start()
    words.store(3, -5)
    words.notify_all()
    waiting.join(20)
    assert woken == [None]
    assert peer.load(3) == -5
    with pytest.raises(ValueError, match="word 4 of a table of 4"):
        words.load(4)
    with pytest.raises(ValueError, match="needs"):
        _C.SharedWords(segment, 5000)


def test_the_module_needs_no_driver_and_no_torch():
    """Only the C and C++ run-time libraries; cudart is inside, and libcuda is not touched by an import."""
    listing = subprocess.run(["readelf", "-d", _C.__file__], capture_output=True, text=True, check=False)
    if listing.returncode:
        pytest.skip("readelf is not installed")
    needed = [line.split("[")[1].rstrip("]\n") for line in listing.stdout.splitlines() if "NEEDED" in line]
    assert {name.split(".so")[0] for name in needed} <= {"libstdc++", "libgcc_s", "libc", "libm", "ld-linux-x86-64"}


def test_cuda_is_reported():
    assert isinstance(rlinf_comm.has_cuda_kernels(), bool)
    assert rlinf_comm.num_cuda_devices() >= 0
    if not rlinf_comm.has_cuda_kernels():
        assert rlinf_comm.num_cuda_devices() == 0


def test_versions_agree():
    project = pathlib.Path(__file__).parents[1] / "pyproject.toml"
    assert f'version = "{rlinf_comm.__version__}"' in project.read_text()
