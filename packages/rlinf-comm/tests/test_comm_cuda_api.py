"""rlinf_comm.cuda as far as it goes without a device: tables, errors, compiled kernels."""

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
