"""Server arguments of SGLang: what a recipe may set, what is set here, and what nobody may set."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from rlinf_workers.engines.serving_layout import has_parameters_alone
from rlinf_workers.engines.sglang.options import MEM_FRACTION, SPARE_TOKENS
from rlinf_workers.models.language_model import ModelSettings
from rlinf_workers.models.pictures import VISION_LANGUAGE

Argument = bool | int | float | str | list

ON_CPU: Mapping[str, Argument] = {
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_overlap_schedule": True,
    "disable_cuda_graph": True,
    "sleep_on_idle": True,
    "mem_fraction_static": 0.9,
    "max_total_tokens": 20_000,
}
"""Defaults on CPU slots: the only kernels that need no SGLang build for the processor. The number of tokens bounds the
pool; a run whose plan can compute the model's memory sets it, these are for one that cannot. SGLang counts memory that
other processes take meanwhile as its own, so a small fraction of the machine's memory may already be gone at its next
measurement. Without sleep-on-idle, an idle engine would take a whole core."""

ON_GPU: Mapping[str, Argument] = {
    "sleep_on_idle": True,
    "grammar_backend": "none",
    "enable_memory_saver": True,
    "mem_fraction_static": MEM_FRACTION,
}
"""Defaults on GPUs: memory can be released to a trainer on the same devices. SGLang copies no weights to the host then
(`enable_weights_cpu_backup`): a sync fills them, and where none follows, the engine copies the parameters; SGLang does
where it computes with more than those (`has_parameters_alone`), which no sync can fill. The memory fraction is for a
model that cannot be counted; for others it follows from their sizes (`fraction_of`)."""

FOR_PICTURES: Mapping[str, Argument] = {
    "mm_feature_transport": "cpu",
    "enable_precise_embedding_interpolation": True,
}
"""Further arguments for a model that reads pictures. These come processed, in the message of a request, where SGLang
would reserve gigabytes of some GPUs for its own processor. With CUDA graphs of the tower, it would interpolate
positions of patches otherwise than the trainer."""

START_BYTES = 3 << 29
"""GPU memory that the processes of an engine take before SGLang measures what is free: a CUDA context and the buffers
of its process groups."""
LOADING_BYTES = 1 << 29
"""Further memory that loading leaves beside weights and KV pool, whose size SGLang takes from what is then free."""
MAX_FRACTION = 0.95

FP8_BLOCKS: Mapping[str, Argument] = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
}
"""As in the config of DeepSeek-V3. SGLang quantizes activations, too, in groups of 128."""


def server_arguments(
    model: ModelSettings,
    device: torch.device,
    *,
    num_devices: int,
    folder: str,
    loader: str,
    stop_token_ids: Sequence[int],
    engine_options: Mapping[str, Any],
    static_fraction: float | None = None,
) -> dict[str, Any]:
    """All arguments with which an engine is started.

    Args:
        folder: the folder that SGLang loads, with config.json; `model.folder` or a copy.
        loader: import path of the function that fills its weights.
        engine_options: the recipe's options, already checked.
        static_fraction: `mem_fraction_static` unless the options have one; None: the device's default.
    """
    config = json.loads((Path(folder) / "config.json").read_text())
    arguments: dict[str, Any] = dict(ON_CPU if device.type == "cpu" else ON_GPU)
    if device.type != "cpu" and not has_parameters_alone(config):
        arguments["enable_weights_cpu_backup"] = True
    if (window := config.get("max_position_embeddings")) is not None:
        arguments["context_length"] = window + SPARE_TOKENS
    # The model's files are not quantized, so SGLang cannot load them; the first sync fills its weights.
    quantized = {"quantization_config": FP8_BLOCKS} if model.quantization == "fp8" else {}
    if static_fraction is not None:
        arguments["mem_fraction_static"] = static_fraction
    arguments |= {
        "model_impl": "sglang",
        "log_level": "error",
        **engine_options,
        "model_path": folder,
        "dtype": model.dtype,
        "json_model_override_args": json.dumps({"eos_token_id": list(stop_token_ids), **quantized}),
        "load_format": "auto" if model.has_weights and not quantized else "dummy",
        "device": device.type,
        "tp_size": num_devices,
        "skip_tokenizer_init": True,
        "custom_weight_loader": [loader],
    }
    if config.get("model_type") in VISION_LANGUAGE:
        arguments |= {**FOR_PICTURES, "tokenizer_path": model.folder}
    return arguments


def fraction_of(static_bytes: int, free_bytes: int) -> float:
    """The `mem_fraction_static` that holds this many bytes of weights and KV pool on a device with so many free ones.

    SGLang applies it to what is free when the engine starts, which is less than the card where others hold memory. A
    fraction that is a little too large allocates nothing: `max_total_tokens` ends the pool.

    Example: 3.5 GB on an H100 of which a trainer has left 60 GB -> 0.07
    """
    free = max(1, free_bytes - START_BYTES)
    return min(MAX_FRACTION, math.ceil(1000 * (static_bytes + LOADING_BYTES) / free) / 1000)
