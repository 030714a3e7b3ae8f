"""The entry point of SGLang's scheduler processes, around SGLang's own.

On failure, SGLang logs the reason and sends SIGQUIT to the parent. This entry point also writes the last error to a
file, so that the worker can report it, and makes the process die with its parent from the start.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rlinf_workers.addresses import ON_ONE_MACHINE
from rlinf_workers.engines.server_processes import end_with_parent, keep_errors
from rlinf_workers.models.lora_settings import LoraSettings

FOLDER_VARIABLE = "RLINF_SGLANG_FOLDER"
"""Env var with the folder that a worker shares with its engine's processes."""
MEETING_VARIABLE = "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"
"""SGLang's env var for the rendezvous URL of an engine's ranks, as in torch.distributed."""

ADAPTER_VARIABLE = "RLINF_SGLANG_ADAPTER"
"""Env var with the `LoraSettings` of the model as JSON; empty: it has no adapter."""

QWEN2_5_VL = "Qwen2_5_VLForConditionalGeneration"
QWEN3_VL_MOE = "qwen3_vl_moe"


def run_scheduler(*arguments: Any, **keywords: Any) -> None:
    """The target of a scheduler process; takes the arguments of SGLang's `run_scheduler_process`."""
    end_with_parent()
    os.environ.update(ON_ONE_MACHINE)
    keep_errors(Path(os.environ[FOLDER_VARIABLE]), "sglang")
    from rlinf_workers.gloo_guard import guard_gloo

    guard_gloo()
    from sglang.srt.managers.scheduler import run_scheduler_process  # pyright: ignore[reportMissingImports]

    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        _pin_nothing()
    adapter = os.environ.get(ADAPTER_VARIABLE)
    _change_loaded_models(msgspec.json.decode(adapter, type=LoraSettings) if adapter else None)

    run_scheduler_process(*arguments, **keywords)


def _pin_nothing() -> None:
    """Recorded experts are kept in pinned host memory, which needs CUDA (read in 0.5.23)."""
    from sglang.srt.mem_cache.pool_host import common  # pyright: ignore[reportMissingImports]

    def allocate(dims: Any, *, dtype: Any, device: Any, allocator: Any, **_: Any) -> Any:
        return allocator.allocate(dims, dtype=dtype, device=device)

    common.ALLOC_MEMORY_FUNCS["cpu"] = allocate


def _change_loaded_models(adapter: LoraSettings | None) -> None:
    """Adds the adapter to each model that SGLang loads, before it captures graphs and where it allocates weights, so
    that they are released and allocated with these; lets it compute all pixels, and read experts in either order."""
    from sglang.srt.model_executor.model_runner_components import (  # pyright: ignore[reportMissingImports]
        load_model_utils,
    )

    get_model_loader = load_model_utils.get_model_loader

    def get_changing_loader(*arguments: Any, **keywords: Any) -> Any:
        loader = get_model_loader(*arguments, **keywords)
        load_model = loader.load_model

        @functools.wraps(load_model)
        def load_changed(*arguments: Any, model_config: Any, **keywords: Any) -> Any:
            if model_config.hf_config.model_type == QWEN3_VL_MOE:
                _turn_experts(Path(model_config.model_path))
            model = load_model(*arguments, model_config=model_config, **keywords)
            if adapter is not None:
                _adapt(model, model_config.model_path, adapter)
            if type(model).__name__ == QWEN2_5_VL:
                model.get_image_feature = functools.partial(_image_feature, model)
            return model

        loader.load_model = load_changed
        return loader

    load_model_utils.get_model_loader = get_changing_loader


def _adapt(model: Any, folder: str, lora: LoraSettings) -> None:
    from sglang.srt.runtime_context import get_parallel  # pyright: ignore[reportMissingImports]

    from rlinf_workers.engines.inside import RenamedModel
    from rlinf_workers.engines.serving_layout import adapt_served
    from rlinf_workers.engines.sglang.inside import merged_name, shard_sizes

    held, parallel = RenamedModel(model, merged_name), get_parallel()
    adapt_served(held, folder, lora, shard_sizes(model), parallel.tp_rank, parallel.tp_size)


def _turn_experts(folder: Path) -> None:
    """Makes Qwen3-VL-MoE read its experts as its files have them."""
    from sglang.srt.models.qwen3_vl_moe import (  # pyright: ignore[reportMissingImports]
        Qwen3VLMoeForConditionalGeneration as Model,
    )

    from rlinf_workers.engines.fused_experts import FUSED, experts_as_modelled

    if not experts_as_modelled(folder):
        return
    load_weights = Model.load_weights

    def load_turned(model: Any, weights: Iterable[tuple[str, Any]]) -> Any:
        turned = ((name, one.transpose(-1, -2) if name.endswith(FUSED) else one) for name, one in weights)
        return load_weights(model, turned)

    Model.load_weights = load_turned


def _image_feature(model: Any, items: Sequence[Any]) -> Any:
    """What the tower of Qwen2.5-VL makes of pictures and videos, in place of the model's own method.

    SGLang 0.5.23 takes pixels for features unless a patch has 14 x 14 of them. And its layers attend to a whole video
    where those of transformers attend to one pair of frames; so each pair goes in as a picture.

    Args:
        items: `MultimodalDataItem` of SGLang.
    """
    import torch

    pixels = torch.cat([item.feature for item in items]).type(model.visual.dtype)
    grids = torch.cat([item.image_grid_thw for item in items])
    frames = grids.repeat_interleave(grids[:, 0], dim=0)
    frames[:, 0] = 1
    return model.visual(pixels, grid_thw=frames)
