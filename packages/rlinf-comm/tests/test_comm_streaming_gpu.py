"""Streams between ends on a GPU: nothing is packed on the host, and the host's end takes what the GPU's packed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from comm_links import HANG_S, Net, together

from rlinf_comm import _C
from rlinf_comm.weights import Layout, TensorSpec, WeightStreamReceiver, WeightStreamSender, reshard_plan
from rlinf_comm.weights.device import CudaDevice
from rlinf_comm.weights.stream.wire import Content

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(_C.num_cuda_devices() == 0 or not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("unpacks", [True, False])
def test_shards_on_a_gpu_become_whole_tensors(unpacks: bool):
    trained = {"a": TensorSpec((1000, 64), "float32"), "b": TensorSpec((64,), "float32")}
    served = Layout.replicated(trained, 1, dtype="bfloat16")
    reshard, net = reshard_plan(Layout.sharded(trained, 2), served), Net()
    shards: list[dict[str, torch.Tensor]] = [
        {name: torch.randn(spec.shape, device="cuda") for name, spec in buffers.items()}
        for buffers in reshard.src_buffers
    ]
    where = "cuda" if unpacks else "cpu"
    tensors = {name: torch.zeros(spec.shape, dtype=torch.bfloat16, device=where) for name, spec in trained.items()}
    senders = [
        WeightStreamSender(reshard, rank, net.link(f"t{rank}"), ["e"], bucket_bytes=20_000, device=CudaDevice())
        for rank in range(2)
    ]
    receiver = WeightStreamReceiver(reshard, 0, net.link("e"), ["t0", "t1"], device=CudaDevice() if unpacks else None)
    for version in range(2):
        calls: list[Any] = [
            lambda sender=sender, shard=shard, version=version: sender.publish(shard, version, HANG_S)
            for sender, shard in zip(senders, shards, strict=True)
        ]
        results = together(*calls, lambda version=version: receiver.receive(tensors, version, HANG_S))
        assert not [one for one in results if isinstance(one, BaseException)], results
        for name, tensor in tensors.items():
            expected = torch.cat([shard[name] for shard in shards]).bfloat16()
            assert torch.equal(tensor.cuda(), expected), (name, version)
        for shard in shards:
            shard["a"].neg_()
    assert not [one for one in net.sent if isinstance(one, Content) and isinstance(one.data, np.ndarray)]
