"""Engine arguments of vLLM: what a recipe may set, and what is set here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import torch

from rlinf_workers.engines.vllm.options import CPU_BLOCK_TOKENS, MEMORY_SHARE
from rlinf_workers.models.language_model import ModelSettings
from rlinf_workers.models.picture_texts import TILED

Argument = bool | int | float | str | list | dict

EXTENSION = "rlinf_workers.engines.vllm.extension.Extension"
"""vLLM mixes this class into its workers, and imports its module in each of them before it loads a model."""
PLAIN, PLAIN_DUMMY = "rlinf", "rlinf_dummy"
"""Load formats that extension.py registers: weights stay as the model has them; with values of the folder, or any."""
ADAPTER = "rlinf_adapter"
"""Key of vLLM's `additional_config` with the `LoraSettings` of the model. It counts in the hash under which vLLM stores
compiled code."""

ON_CPU: Mapping[str, Argument] = {
    "enforce_eager": True,
    "block_size": CPU_BLOCK_TOKENS,
    "kv_cache_memory_bytes": 1 << 30,
}
"""Defaults on CPU slots. Compiling takes longer than a small run. A run whose plan can compute the model's memory sets
the size of the cache; this one is for a run that cannot."""

ON_GPU: Mapping[str, Argument] = {
    "gpu_memory_utilization": MEMORY_SHARE,
    "enable_sleep_mode": True,
    "moe_backend": "triton",
}
"""Defaults on GPUs: plans assume this memory fraction, memory can be released to a trainer on the same devices, and the
experts' kernels read weights as the model has them; others shuffle them."""

FIXED: dict[str, Argument] = {
    "skip_tokenizer_init": True,
    "generation_config": "vllm",
    "logprobs_mode": "raw_logprobs",
    "worker_extension_cls": EXTENSION,
    "disable_log_stats": True,
    "model_impl": "vllm",
}
"""Arguments of every engine. The extension replaces what raw log-probabilities are: see its `TemperedSampler`."""

FOR_PICTURES: dict[str, Argument] = {
    "skip_tokenizer_init": False,  # vLLM starts the model's processor with it, which says how large a picture may be
    "limit_mm_per_prompt": {"video": 0},
    "mm_processor_cache_gb": 1,
}
"""Further arguments for a model that reads pictures, which come processed. The core process keeps those that it got
last, so that each comes once for the completions of a group."""
UNMEASURED: dict[str, Argument] = {"skip_mm_profiling": True}
"""There nothing is measured, and the stand-in for torchvision makes no pictures to measure with. Nor is it on GPUs for
models of tiles, whose processor needs a package that the venv does not have."""


LEFT_OUT: dict[str, dict[str, Any]] = {"qwen3_vl_moe": {"text_config": {"norm_topk_prob": True}}}
"""`model_type` -> what vLLM reads of a config.json, and transformers 5 does not write: its model has no other value."""


def engine_arguments(
    model: ModelSettings,
    device: torch.device,
    *,
    num_devices: int,
    folder: str,
    model_type: str | None = None,
    has_pictures: bool = False,
    engine_options: Mapping[str, Any],
) -> dict[str, Any]:
    """All arguments with which an engine is started.

    Args:
        folder: the folder that vLLM loads, with config.json; `model.folder` or a copy.
        model_type: of its config.json.
        has_pictures: whether the model reads pictures.
        engine_options: the recipe's options, already checked.
    """
    own = {}
    if model.adapter is not None:
        settings = {ADAPTER: msgspec.to_builtins(model.adapter)}
        own["additional_config"] = (engine_options.get("additional_config") or {}) | settings
    of_pictures: dict[str, Any] = {}
    if has_pictures:
        of_pictures = FOR_PICTURES | {"tokenizer": model.folder}
        if device.type == "cpu" or model_type in TILED:
            of_pictures |= UNMEASURED
    return {
        **(ON_CPU if device.type == "cpu" else ON_GPU),
        "max_model_len": -1,  # as long as the model and the cache allow
        **engine_options,
        **FIXED,
        **own,
        **of_pictures,
        "hf_overrides": LEFT_OUT.get(model_type or "", {}),
        "model": folder,
        "dtype": model.dtype,
        "load_format": PLAIN if model.has_weights else PLAIN_DUMMY,
        "tensor_parallel_size": num_devices,
        "distributed_executor_backend": "uni" if num_devices == 1 else "mp",
    }


def env_vars(device: torch.device, cores: str) -> dict[str, str]:
    """Env vars that vLLM and its processes read; `cores` are those of `bound_cores`."""
    variables = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # its sampler is another, and not that of extension.py
        "VLLM_PLUGINS": "",  # no package of the venv changes how models are computed
    }
    if device.type == "cpu":
        variables["VLLM_CPU_OMP_THREADS_BIND"] = cores
        variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # else one device gets a process of its own beside the core's
    return variables
