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
from rlinf_workers.engines.inside import HeldWeights, check_held
from rlinf_workers.models.in_memory import renamed
from rlinf_workers.models.language_model import ModelSettings
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


def serving_layout(model: ModelSettings, held: Sequence[HeldWeights]) -> Layout:
    """The layout of an engine's processes, by the names of the model in transformers.

    Args:
        model: its config determines the tensors.
        held: the parameters of each process, in the engine's dtypes.

    Raises: LayoutError naming the process and the parameters that do not fit the model's architecture, or the weight
        of which an engine would go on computing with the old version.
    """
    config = json.loads(Path(model.folder, "config.json").read_text())
    if weight := COMPUTES_AFTER_LOADING.get(config.get("model_type")):
        raise LayoutError(
            f"model_type={config['model_type']!r}: engines compute with copies that they made of {weight} when it was "
            "loaded, which a weight sync does not reach; use rollout.engine=huggingface"
        )
    shape = TransformerShape.from_config(config, model.dtype)
    if model.quantization is not None:
        shape = replace(shape, fp8_scales=(128, 128))
    sizes = held[0].sizes
    expected = merged_layout(
        shape,
        tp=sizes["tp"],
        ep=sizes.get("ep", 1),
        expert_tp=sizes.get("expert_tp"),
        tower_tp=sizes.get("tower_tp"),
        tower_width=sizes.get("tower_width"),
        positions_tp=sizes.get("positions_tp"),
        num_ranks=len(held),
    )
    expected = renamed(expected, huggingface_layout(shape, fused_experts=CONVERTS))
    if model.adapter is not None:
        expected = adapted_layout(expected, model.adapter.rank, model.adapter.changes)
    ranks = []
    for number, (process, rank) in enumerate(zip(held, expected.ranks, strict=True)):
        buffers = {
            name: type(spec)(spec.shape, process.buffers[name].dtype if name in process.buffers else spec.dtype)
            for name, spec in rank.buffers.items()
        }
        try:
            check_held(process, buffers)
        except LayoutError as error:
            raise LayoutError(f"{config.get('model_type')}, engine process {number}: {error}") from error
        ranks.append(RankLayout(buffers, rank.blocks))
    return Layout(expected.specs, tuple(ranks))
