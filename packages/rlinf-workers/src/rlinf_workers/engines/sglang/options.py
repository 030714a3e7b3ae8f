"""The options of the engine `sglang`: SGLang's own server arguments; checked without torch and without SGLang.

`SGLangOptions` has those that determine memory and times; `OWNED` lists those that the run itself sets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rlinf_workers.engines.server_arguments import ServerArguments, ServerOptions

MEM_FRACTION = 0.7
"""Largest fraction of a GPU for weights and KV pool, if the recipe sets none. SGLang itself would take nearly 0.9, all
that its own forward passes leave; a trainer's contexts and a published version on the same device need memory, too."""
SPARE_TOKENS = 8
"""SGLang ends a sequence a few tokens before the context length; these extra tokens let a completion use a model's
context to its last position."""
NOT_CUT = -1
"""The `chunked_prefill_size` that disables chunking."""

_MODEL, _DEVICES = (
    "the model and its dtype are those of the run",
    "an engine has tensor_parallel_size devices, which the plan chooses",
)
_PORTS = "an engine speaks to its own processes alone, through sockets that it names itself"
_REQUESTS = "prompts come as token ids, and completions go back as token ids"
_WEIGHTS = "weights come from the trainer by a weight sync"
_PICTURES = "pictures come processed, and all devices of an engine compute each of them"

OWNED: Mapping[str, str] = {
    **dict.fromkeys(("model_path", "tokenizer_path", "revision", "dtype", "json_model_override_args"), _MODEL),
    **dict.fromkeys(("tp_size", "dp_size", "pp_size", "nnodes", "node_rank", "device", "base_gpu_id"), _DEVICES),
    **dict.fromkeys(("gpu_id_step", "use_ray"), _DEVICES),
    **dict.fromkeys(("host", "port", "nccl_port", "dist_init_addr", "grpc_port", "grpc_mode", "smg_grpc_mode"), _PORTS),
    **dict.fromkeys(("tokenizer_worker_num", "detokenizer_worker_num", "disaggregation_mode"), _PORTS),
    **dict.fromkeys(("skip_tokenizer_init", "tokenizer_mode", "is_embedding", "stream_interval"), _REQUESTS),
    **dict.fromkeys(("incremental_streaming_output", "allow_auto_truncate", "preferred_sampling_params"), _REQUESTS),
    **dict.fromkeys(("load_format", "custom_weight_loader", "weight_version", "weight_cache_mode"), _WEIGHTS),
    **dict.fromkeys(("enable_lora", "lora_paths", "startup_weight_load_mode"), _WEIGHTS),
    **dict.fromkeys(("mm_feature_transport", "mm_enable_dp_encoder"), _PICTURES),
    "enable_precise_embedding_interpolation": "positions of patches are those of the trainer",
    "quantization": "rollout.quantization says it",
    "trust_remote_code": "code that a model's folder brings along is never run",
    "custom_sigquit_handler": "the worker watches the engine's processes",
}
"""Arguments that no recipe may set, and why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SGLangOptions(ServerOptions):
    """The server arguments that determine memory and times."""

    SPECIAL = frozenset({("chunked_prefill_size", NOT_CUT)})

    mem_fraction_static: float | None = None
    """Fraction of a device's memory for weights and KV pool."""
    max_total_tokens: int | None = None
    """Maximum tokens of the KV pool."""
    max_running_requests: int | None = None
    """Maximum number of running completions."""
    chunked_prefill_size: int | None = None
    """Prompt tokens per prefill chunk."""
    cuda_graph_max_bs_decode: int | None = None
    """Largest batch of a CUDA graph."""
    disable_cuda_graph: bool = False
    """Decode without CUDA graphs."""
    context_length: int | None = None
    """Longest sequence, prompt and completion together."""


ARGUMENTS = ServerArguments(
    title="SGLang",
    kind="server argument",
    names_file=Path(__file__).with_name("server_arguments.txt"),  # of 0.5.23
    owned=OWNED,
    options=SGLangOptions,
    help_command="python -m sglang.launch_server --help",
)
