"""The function that SGLang calls in each scheduler process (server argument `custom_weight_loader`, read in 0.5.23).

A custom weight loader gets the model and named tensors. Here it gets one empty tensor whose name is the ticket of
`EngineProcesses`; weights come through the weight sync and commands through a socket. Errors are reported there,
because an exception here would end the engine's process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from rlinf_workers.engines.inside import Inside, RenamedModel, enter


def run(model: nn.Module, named_tensors: Sequence[tuple[str, Tensor]], kind: type[Inside] = Inside) -> None:
    """Called between two batches, while no request is in flight."""
    from sglang.srt.runtime_context import get_parallel  # pyright: ignore[reportMissingImports]

    forget_pictures()
    for ticket, _ in named_tensors:
        held = RenamedModel(model, merged_name)
        enter(ticket, held, rank=get_parallel().tp_rank, sizes=shard_sizes(model), kind=kind)


def merged_name(name: str) -> str:
    """SGLang names the projection of a vision tower as that of a decoder."""
    return name.replace(".attn.qkv_proj.", ".attn.qkv.")


def shard_sizes(model: nn.Module) -> dict[str, int]:
    """How SGLang shards and pads a model, see `HeldWeights.sizes`."""
    from sglang.srt.runtime_context import get_parallel  # pyright: ignore[reportMissingImports]

    parallel = get_parallel()
    sizes = {"tp": parallel.attn_tp_size, "ep": parallel.moe_ep_size, "expert_tp": parallel.moe_tp_size}
    tower: Any = getattr(model, "visual", None)
    if tower is None:
        return sizes
    mlp, tp = tower.blocks[0].mlp, parallel.attn_tp_size
    last = mlp.linear_fc2 if hasattr(mlp, "linear_fc2") else mlp.down_proj
    return sizes | {"tower_tp": tp, "positions_tp": tp, "tower_width": last.weight.shape[1] * tp}


def forget_pictures() -> None:
    """Drops the features of pictures that the tower computed with earlier weights. SGLang 0.5.23 keeps them by the
    picture alone, also when it flushes its caches."""
    from sglang.srt.managers import mm_schedule  # pyright: ignore[reportMissingImports]

    if mm_schedule.embedding_cache is not None:
        mm_schedule.embedding_cache.clear()
