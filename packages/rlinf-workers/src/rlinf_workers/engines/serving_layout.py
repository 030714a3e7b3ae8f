"""The layout of an engine that merges parameters, checked against the parameters it reports."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlinf_comm import LayoutError
from rlinf_comm.weights import Layout, RankLayout
from rlinf_comm.weights.layouts import (
    MODEL_TYPES,
    TransformerShape,
    adapted_layout,
    huggingface_layout,
    merged_layout,
)
from rlinf_workers.engines.adapted_layers import adapt_layers
from rlinf_workers.engines.inside import HeldWeights, RenamedModel, check_held
from rlinf_workers.models.in_memory import renamed
from rlinf_workers.models.language_model import ModelSettings
from rlinf_workers.models.lora_settings import LoraSettings
from rlinf_workers.models.weight_names import CONVERTS

COMPUTES_AFTER_LOADING = {
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), "kv_b_proj"),
    "glm4_moe": "mlp.gate",
}
"""Architectures of which engines keep what they computed from a weight when it was loaded: with latent attention its
two halves (SGLang and vLLM), and routers in float32 (SGLang)."""


def has_parameters_alone(config: Mapping[str, Any]) -> bool:
    """Whether an engine computes with a model's parameters and buffers alone, and with nothing that it made of them
    when they were loaded; False for an architecture that is not known.

    Args:
        config: the model's config.json.
    """
    return config.get("model_type") in MODEL_TYPES and config["model_type"] not in COMPUTES_AFTER_LOADING


def merged_layout_of(model: ModelSettings, sizes: Mapping[str, int], num_ranks: int) -> Layout:
    """The parameters that an engine's processes should have, by the names of the model in transformers.

    Args:
        model: its config determines the tensors.
        sizes: how the engine shards it, see `HeldWeights`.

    Raises: LayoutError for a weight of which the engine would go on computing with the old version, and for an adapter
        that changes no layer.
    """
    config = _config(model)
    kind = config.get("model_type")
    if weight := COMPUTES_AFTER_LOADING.get(str(kind)):
        raise LayoutError(
            f"model_type={kind!r}: engines compute with copies that they made of {weight} when it was "
            "loaded, which a weight sync does not reach; use rollout.engine=huggingface"
        )
    shape = TransformerShape.from_config(config, model.dtype)
    if model.quantization is not None:
        shape = replace(shape, fp8_scales=(128, 128))
    merged = merged_layout(
        shape,
        tp=sizes["tp"],
        ep=sizes.get("ep", 1),
        expert_tp=sizes.get("expert_tp"),
        tower_tp=sizes.get("tower_tp"),
        tower_width=sizes.get("tower_width"),
        positions_tp=sizes.get("positions_tp"),
        num_ranks=num_ranks,
    )
    merged = renamed(merged, huggingface_layout(shape, fused_experts=CONVERTS))
    if model.adapter is None:
        return merged
    if not any(model.adapter.changes(name.removesuffix(".weight")) for name in merged.specs):
        targets = " or ".join(model.adapter.targets)
        raise LayoutError(f"adapter: {kind} has no linear layer {targets}")
    return adapted_layout(merged, model.adapter.rank, model.adapter.changes)


def adapt_served(
    model: RenamedModel, folder: str, lora: LoraSettings, sizes: Mapping[str, int], rank: int, num_ranks: int
) -> None:
    """Adds an adapter of zeros to the layers of a model that an engine has loaded in this process.

    Args:
        folder: of the model.
        sizes: how the engine shards it, see `HeldWeights`.

    Raises: ValueError as `merged_layout_of` and `adapt_layers`.
    """
    settings = ModelSettings(folder=folder, has_weights=False, adapter=lora)
    held = merged_layout_of(settings, sizes, num_ranks).ranks[rank]
    adapt_layers(model.module, held, lora.scale, model.rename)


def serving_layout(model: ModelSettings, held: Sequence[HeldWeights]) -> Layout:
    """The layout of an engine's processes, as `merged_layout_of`, in the engine's dtypes.

    Args:
        held: the parameters of each process.

    Raises: LayoutError, also naming the process and the parameters that do not fit the model's architecture.
    """
    expected = merged_layout_of(model, held[0].sizes, len(held))
    ranks = []
    for number, (process, rank) in enumerate(zip(held, expected.ranks, strict=True)):
        buffers = {
            name: type(spec)(spec.shape, process.buffers[name].dtype if name in process.buffers else spec.dtype)
            for name, spec in rank.buffers.items()
        }
        try:
            check_held(process, buffers)
        except LayoutError as error:
            raise LayoutError(f"{_config(model).get('model_type')}, engine process {number}: {error}") from error
        ranks.append(RankLayout(buffers, rank.blocks))
    return Layout(expected.specs, tuple(ranks))


def _config(model: ModelSettings) -> dict[str, Any]:
    return json.loads(Path(model.folder, "config.json").read_text())
