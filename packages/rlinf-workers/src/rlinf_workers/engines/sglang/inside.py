"""The function that SGLang calls in each scheduler process (server argument `custom_weight_loader`, read in 0.5.23).

A custom weight loader gets the model and named tensors. Here it gets one empty tensor whose name is the ticket of
`EngineProcesses`; weights come through the weight sync and commands through a socket. Errors are reported there,
because an exception here would end the engine's process.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from rlinf_workers.engines.inside import enter


def run(model: nn.Module, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Called between two batches, while no request is in flight."""
    from sglang.srt.runtime_context import get_parallel  # pyright: ignore[reportMissingImports]

    parallel = get_parallel()
    sizes = {"tp": parallel.attn_tp_size, "ep": parallel.moe_ep_size, "expert_tp": parallel.moe_tp_size}
    for ticket, _ in named_tensors:
        enter(ticket, model, rank=parallel.tp_rank, sizes=sizes)
