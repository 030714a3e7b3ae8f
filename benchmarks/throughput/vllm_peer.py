"""What benchmarks call in the processes of a vLLM as its users start it: its own ways of loading weights."""

from __future__ import annotations

import pickle
from typing import Any

import torch
from torch import Tensor


class Peer:
    """Mixed into vLLM's worker (`worker_extension_cls`)."""

    model_runner: Any

    def rlinf_prepare(self) -> None:
        """Weights stay as vLLM arranges them."""

    def peer_load(self, pickled: bytes) -> None:
        """Tensors in shared memory, whose handles came with the call."""
        tensors = pickle.loads(pickled)  # noqa: S301 - of the benchmark's own process
        self.model_runner.reload_weights(weights_iterator=iter(tensors))

    def peer_join(self, host: str, port: int) -> None:
        """The counterpart of `join`; vLLM's transfer engines do the same with NCCL, which needs GPUs."""
        self.group = join(host, port, rank=1)

    def peer_receive(self, metadata: list[tuple[str, list[int], str]]) -> None:
        """A broadcast for each tensor, and a layerwise reload, as vLLM's NCCL transfer without packing."""
        from vllm.model_executor.model_loader.reload import (  # pyright: ignore[reportMissingImports]
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        model = self.model_runner.get_model()
        initialize_layerwise_reload(model)
        for name, shape, dtype in metadata:
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            broadcast(self.group, tensor)
            model.load_weights([(name, tensor)])
        finalize_layerwise_reload(model, self.model_runner.model_config)


def join(host: str, port: int, *, rank: int) -> Any:
    """The process group of the trainer, rank 0, and one process of vLLM."""
    from vllm.distributed.utils import (  # pyright: ignore[reportMissingImports]
        stateless_init_torch_distributed_process_group,
    )

    return stateless_init_torch_distributed_process_group(host, port, rank, 2, "gloo")


def broadcast(group: Any, tensor: Tensor) -> None:
    options = torch.distributed.BroadcastOptions()
    options.rootRank = 0
    group.broadcast([tensor.view(torch.uint8)], options).wait()
