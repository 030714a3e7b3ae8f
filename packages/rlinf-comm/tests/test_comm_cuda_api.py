"""rlinf_comm.cuda as far as it goes without a device: arrays seen through their protocols, errors, compiled kernels."""

import pathlib
import re
import shutil
import subprocess
import types

import numpy as np
import pytest
import torch

from rlinf_comm import _C, cuda

SOURCES = pathlib.Path(__file__).parents[3] / "csrc"


class FakeDlpack:
    """A CPU tensor that says it is on a device."""

    def __init__(self, tensor, device_type=2):
        self.tensor, self.device_type, self.stream = tensor, device_type, None

    def __dlpack_device__(self):
        return self.device_type, 3

    def __dlpack__(self, stream=None):
        self.stream = stream
        return self.tensor.__dlpack__()


def interface(**changes):
    fields = {"data": (4096, False), "shape": (2, 3), "typestr": "<f4", "version": 3, **changes}
    return types.SimpleNamespace(__cuda_array_interface__=fields)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint8", "int64"])
def test_dlpack_gives_pointer_strides_dtype_and_device(dtype):
    tensor = torch.zeros(4, 6, dtype=getattr(torch, dtype)).T[1:]
    fake = FakeDlpack(tensor)
    region = cuda.as_region(fake)
    assert region.pointer == tensor.data_ptr() and region.shape == (5, 4) and region.device == 3
    assert region.strides == tuple(stride * tensor.itemsize for stride in tensor.stride())
    assert region.dtype.rstrip("0123456789") in dtype and region.dtype.endswith(str(tensor.itemsize * 8))
    assert fake.stream == -1


def test_the_array_interface_gives_row_major_strides_where_it_has_none():
    assert cuda.as_region(interface()).strides == (12, 4)
    region = cuda.as_region(interface(strides=(4, 8), typestr="<i2"))
    assert region == cuda.DeviceRegion(pointer=4096, shape=(2, 3), strides=(4, 8), dtype="int16", device=None)
    assert cuda.pointers_of([interface(), interface(data=(64, True))]).tolist() == [4096, 64]


def test_what_is_not_in_device_memory_is_refused():
    with pytest.raises(ValueError, match="not in CUDA memory"):
        cuda.as_region(torch.zeros(2))
    with pytest.raises(TypeError, match="neither"):
        cuda.as_region([1.0])
    with pytest.raises(ValueError, match="typestr"):
        cuda.as_region(interface(typestr="|V3"))


def test_a_parameter_is_taken_without_its_gradient():
    plain = interface(data=(64, False))
    parameter = types.SimpleNamespace(requires_grad=True, detach=lambda: plain)
    assert cuda.as_region(parameter) == cuda.as_region(plain)


def one_copy():
    fields = {"src_buffer": [0], "dst_buffer": [1], "src_offset": [8], "dst_offset": [2], "lengths": [[5]]}
    fields |= {"src_strides": [[4]], "dst_strides": [[2]], "src_dtype": [0], "dst_dtype": [1]}
    return types.SimpleNamespace(**fields)


def test_a_program_lowers_to_the_table_s_copy():
    source = torch.arange(7, dtype=torch.float32)
    target = torch.zeros(8, dtype=torch.bfloat16)
    _C.run_copy_tiles_on_cpu(cuda.CudaCopyProgram(one_copy()).lower([source.data_ptr()], [0, target.data_ptr()]))
    assert target.tolist() == [0, 2, 3, 4, 5, 6, 0, 0]
    with pytest.raises(ValueError, match=r"copy 0: dst_buffer=1, but 1 dst_pointers"):
        cuda.CudaCopyProgram(one_copy()).lower([0], [0])


@pytest.mark.skipif(_C.num_cuda_devices() > 0, reason="has a device")
def test_without_a_device_the_error_says_so():
    with pytest.raises(cuda.DeviceUnavailable, match=r"no CUDA device|built without CUDA"):
        cuda.CudaCopyProgram(one_copy()).run(np.zeros(1), np.zeros(2), stream=0)
    with pytest.raises(ValueError, match="num_sums=1"):
        cuda.device_digests([(0, 4, 0, [1], [4], [1], 1)], 1, stream=0)


@pytest.mark.parametrize("kernel", ["batched_copy", "device_digest"])
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_kernels_use_neither_stack_nor_spills(kernel, architecture, tmp_path):
    """Compile-time evidence: what the assembler reports for the code of each architecture."""
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if nvcc is None or not SOURCES.is_dir():
        pytest.skip("needs nvcc and the repository")
    command = [nvcc, "-std=c++17", "-O3", f"-arch={architecture}", "-DRLINF_WITH_CUDA=1", f"-I{SOURCES / 'include'}"]
    command += ["-Xptxas", "-v", "-cubin", SOURCES / f"comm/cuda/{kernel}.cu", "-o", tmp_path / "kernel.cubin"]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", report)
    assert frames and set(frames) == {("0", "0", "0")}, report
