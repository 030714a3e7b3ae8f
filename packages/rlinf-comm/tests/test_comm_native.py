"""The native module itself: shared words, and what it is linked to."""

import pathlib
import subprocess
import threading

import pytest

import rlinf_comm
from rlinf_comm import _C


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
