"""The device sync on a GPU, between two processes; their tensors are on the host, and meet in device memory."""

import pytest
import torch

from rlinf_comm import _C
from rlinf_workers.testing.weight_sync import CHECKS
from rlinf_workers.weight_sync.device.sync import DeviceWeightSync

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(_C.num_cuda_devices() == 0 or not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_device_memory_conforms(check):
    check(DeviceWeightSync)
