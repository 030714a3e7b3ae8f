"""What a recipe says to the engine `sglang`, as far as it decides memory and times; checked without torch.

The server arguments themselves are SGLang's; those that the run sets stand in `OWNED`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from rlinf_sched.derive.shapes import ModelShape

WHERE = "rollout.sglang"
NOT_CUT = -1
"""A `chunked_prefill_size` with which SGLang does not cut prompts."""
SHOWN_SIZES = 6

_MODEL, _DEVICES = (
    "the model is that of the recipe (model.*, rollout.dtype)",
    "an engine has rollout.tensor_parallel_size devices of the plan's (cluster.*)",
)
_PORTS = "an engine speaks to its own processes alone, through sockets that it names itself"
_REQUESTS = "prompts come as token ids, and completions go back as token ids"
_WEIGHTS = "weights come from the trainer (cluster.weight_sync)"

OWNED: Mapping[str, str] = {
    **dict.fromkeys(("model_path", "tokenizer_path", "revision", "dtype", "json_model_override_args"), _MODEL),
    **dict.fromkeys(("tp_size", "dp_size", "pp_size", "nnodes", "node_rank", "device", "base_gpu_id"), _DEVICES),
    **dict.fromkeys(("gpu_id_step", "use_ray"), _DEVICES),
    **dict.fromkeys(("host", "port", "nccl_port", "dist_init_addr", "grpc_port", "grpc_mode", "smg_grpc_mode"), _PORTS),
    **dict.fromkeys(("tokenizer_worker_num", "detokenizer_worker_num", "disaggregation_mode"), _PORTS),
    **dict.fromkeys(("skip_tokenizer_init", "tokenizer_mode", "is_embedding", "stream_interval"), _REQUESTS),
    **dict.fromkeys(("incremental_streaming_output", "allow_auto_truncate", "preferred_sampling_params"), _REQUESTS),
    **dict.fromkeys(("load_format", "custom_weight_loader", "weight_version", "weight_cache_mode"), _WEIGHTS),
    **dict.fromkeys(("enable_lora", "lora_paths", "startup_weight_load_mode", "quantization"), _WEIGHTS),
    "trust_remote_code": "code that a model's folder brings along is never run",
    "custom_sigquit_handler": "the worker watches the engine's processes",
}
"""Arguments that no recipe sets, and why."""


def unknown_argument(name: str, known: Iterable[str]) -> str:
    """What is wrong with a name that is not among SGLang's `known` ones, with the closest that a recipe may set."""
    near = difflib.get_close_matches(name, sorted(set(known) - OWNED.keys()), n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else "`python -m sglang.launch_server --help` lists them"
    return f": SGLang has no server argument of that name; {hint}"


@dataclass(frozen=True, kw_only=True, slots=True)
class SGLangOptions:
    """The server arguments that are read here; None: SGLang's own choice, or that of `memory.sglang`.

    Raises: ValueError for a value that cannot be, with its key.
    """

    mem_fraction_static: float | None = None
    """Share of a device's memory for weights and KV pool."""
    max_total_tokens: int | None = None
    """Tokens of the KV pool at most."""
    max_running_requests: int | None = None
    """Completions that run at once at most."""
    chunked_prefill_size: int | None = None
    """Tokens of prompts that are prefilled at once."""
    cuda_graph_max_bs_decode: int | None = None
    """Completions of the largest captured batch."""
    disable_cuda_graph: bool = False
    context_length: int | None = None
    """Longest sequence, prompt and completion together."""

    def __post_init__(self) -> None:
        share = self.mem_fraction_static
        if share is not None and (isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share < 1):
            raise ValueError(f"{WHERE}.mem_fraction_static={share!r} is no share; use a number between 0 and 1")
        if not isinstance(self.disable_cuda_graph, bool):
            raise ValueError(f"{WHERE}.disable_cuda_graph={self.disable_cuda_graph!r} is neither true nor false")
        for name in (
            "max_total_tokens",
            "max_running_requests",
            "chunked_prefill_size",
            "cuda_graph_max_bs_decode",
            "context_length",
        ):
            value = getattr(self, name)
            if value is None or (name == "chunked_prefill_size" and value == NOT_CUT):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{WHERE}.{name}={value!r} is not a number of at least 1")

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> SGLangOptions:
        """From the server arguments of a recipe; those of other names are left out."""
        names = [field.name for field in fields(cls)]
        return cls(**{name: arguments[name] for name in names if arguments.get(name) is not None})


def check_engine_cut(model: ModelShape, size: int) -> None:
    """Whether an engine can cut the model over so many devices.

    Raises: ValueError that names the part that does not divide, and sizes that do.
    """
    parts = {"attention heads": model.num_heads, "KV heads": model.num_kv_heads}
    if model.num_experts:
        parts["columns of an expert"] = model.expert_intermediate_size
    else:
        parts["columns of the MLP"] = model.intermediate_size
    for what, number in parts.items():
        if number % size:
            fitting = [n for n in range(1, model.num_kv_heads + 1) if not any(p % n for p in parts.values())]
            raise ValueError(
                f"rollout.tensor_parallel_size={size} does not divide the model's {number} {what}; "
                f"use {' or '.join(map(str, fitting[:SHOWN_SIZES]))}"
            )
