"""What decision 002 takes for granted of matrix products, in a process that imports RLinf before its first one."""

import os
import subprocess
import sys

import pytest
import torch

PROGRAM = """
import torch
import rlinf_workers

torch.set_num_threads(1)
draw = torch.Generator().manual_seed(0)
for width in (96, 192, 256, 384, 896):
    x, weight, bias = (torch.randn(*size, generator=draw) for size in ((40, width), (64, width), (64,)))
    whole = torch.nn.functional.linear(x, weight, bias)
    for rows in range(8, 40):
        if not torch.equal(torch.nn.functional.linear(x[:rows], weight, bias), whole[:rows]):
            print(f"{rows} rows of {width}")
"""


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="the products of another library")
def test_a_row_of_a_product_does_not_depend_on_how_many_there_are():
    env = {name: value for name, value in os.environ.items() if not name.startswith("MKL_")}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == ""
