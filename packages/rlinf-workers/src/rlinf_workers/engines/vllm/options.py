"""The options of the engine `vllm`: vLLM's own engine arguments; checked without torch and without vLLM.

`VLLMOptions` has those that determine memory and times; `OWNED` lists those that the run itself sets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rlinf_workers.engines.server_arguments import ServerArguments, ServerOptions

MEMORY_SHARE = 0.7
"""Default fraction of a GPU for weights, KV cache and forward passes. vLLM itself would take 0.92; a trainer's contexts
and a published version on the same device need memory, too."""
CPU_BLOCK_TOKENS = 32
"""Tokens of a KV block on a CPU: vLLM's kernels there accept multiples of 32. Prompts are shared in whole blocks."""

_MODEL, _DEVICES = (
    "the model and its dtype are those of the run",
    "an engine has tensor_parallel_size devices, which the plan chooses",
)
_REQUESTS = "prompts come as token ids, and completions go back as token ids"
_WEIGHTS = "weights come from the trainer by a weight sync, into parameters as the model has them"
_PICTURES = "pictures come processed, with their prompts"
_PROCESSES = "the worker starts, watches and ends the engine's processes"

OWNED: Mapping[str, str] = {
    **dict.fromkeys(("model", "model_weights", "tokenizer", "revision", "code_revision", "hf_token"), _MODEL),
    **dict.fromkeys(("hf_config_path", "hf_overrides", "dtype", "model_impl", "runner", "convert"), _MODEL),
    **dict.fromkeys(("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "nnodes"), _DEVICES),
    **dict.fromkeys(("prefill_context_parallel_size", "decode_context_parallel_size", "node_rank"), _DEVICES),
    **dict.fromkeys(("enable_expert_parallel", "device_ids", "master_addr", "master_port"), _DEVICES),
    **dict.fromkeys(("skip_tokenizer_init", "tokenizer_mode", "stream_interval", "logprobs_mode"), _REQUESTS),
    **dict.fromkeys(("generation_config", "override_generation_config", "logits_processors"), _REQUESTS),
    **dict.fromkeys(("load_format", "model_loader_extra_config", "quantization", "enable_lora"), _WEIGHTS),
    **dict.fromkeys(("quantization_config", "weight_transfer_config", "moe_backend", "linear_backend"), _WEIGHTS),
    **dict.fromkeys(("enable_eplb", "cpu_offload_gb", "offload_backend", "speculative_config"), _WEIGHTS),
    **dict.fromkeys(("distributed_executor_backend", "worker_cls", "worker_extension_cls"), _PROCESSES),
    **dict.fromkeys(("scheduler_cls", "enable_sleep_mode", "disable_log_stats", "enable_log_requests"), _PROCESSES),
    **dict.fromkeys(("limit_mm_per_prompt", "language_model_only", "mm_encoder_only", "enable_mm_embeds"), _PICTURES),
    **dict.fromkeys(("mm_processor_cache_gb", "mm_processor_cache_type", "mm_processor_kwargs"), _PICTURES),
    **dict.fromkeys(("mm_processor_device", "mm_device_do_normalize", "mm_tensor_ipc"), _PICTURES),
    "trust_remote_code": "code that a model's folder brings along is never run",
}
"""Arguments that no recipe may set, and why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VLLMOptions(ServerOptions):
    """The engine arguments that determine memory and times."""

    ALLOWS_WHOLE = True

    gpu_memory_utilization: float | None = None
    """Fraction of a GPU for weights, KV cache and forward passes."""
    kv_cache_memory_bytes: int | None = None
    """Bytes of the KV cache on each device; takes the place of the fraction."""
    max_num_seqs: int | None = None
    """Maximum number of running completions."""
    max_num_batched_tokens: int | None = None
    """Tokens that one forward pass computes at most."""
    max_model_len: int | None = None
    """Longest sequence, prompt and completion together."""
    block_size: int | None = None
    """Tokens of a block of the KV cache."""
    enable_prefix_caching: bool = True
    """Share the keys and values of equal prompts."""
    enforce_eager: bool = False
    """Compute without CUDA graphs and torch.compile; always on CPU slots."""


ARGUMENTS = ServerArguments(
    title="vLLM",
    kind="engine argument",
    names_file=Path(__file__).with_name("engine_arguments.txt"),  # of 0.32.0 (`AsyncEngineArgs`)
    owned=OWNED,
    options=VLLMOptions,
    help_command="vllm serve --help",
)
