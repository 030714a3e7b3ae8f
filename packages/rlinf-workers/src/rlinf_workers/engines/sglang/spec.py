"""The engine `sglang`: SGLang in its own processes, on the devices of a rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlinf_envs import VenvSpec
from rlinf_workers.engines.sglang import options as server
from rlinf_workers.engines.sglang.options import MEM_FRACTION, SGLangOptions
from rlinf_workers.engines.spec import EngineSpec

if TYPE_CHECKING:
    from rlinf_sched import StageProfile
    from rlinf_sched.derive import Gpu, JobShape, ModelShape, RankMemory

OTHER_SHARES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9)
"""Suggested GPU memory fractions; the nearest few are tried."""
KEEPS_CACHE = ("disable_radix_cache", "disable_overlap_schedule")
"""Server arguments without which completions cannot keep their KV cache when new weights arrive."""
FP8_ROWS = 128
"""Rows of a block with a scale; a projection that SGLang merges with others, or shards, has whole blocks."""
MAX_SHARES = 4
MAX_HALVINGS = 5


@dataclass(frozen=True, kw_only=True)
class SGLangSpec(EngineSpec):
    """Continuous batching in a paged KV cache that is allocated when the engine starts."""

    def problems(self, options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        return server.problems(options)

    def length_problems(self, options: Mapping[str, Any], num_tokens: int) -> Iterator[tuple[str, str]]:
        for option in ("max_total_tokens", "context_length"):
            value = options.get(option)
            if isinstance(value, int) and 0 < value < num_tokens:
                yield option, f"={value}"

    def devices_per_rank(self, tensor_parallel_size: int) -> int:
        return tensor_parallel_size

    def quantization_problem(self, model: ModelShape | None, tensor_parallel_size: int, *, on_gpu: bool) -> str | None:
        if not on_gpu:
            return (
                "SGLang serves FP8 on GPUs alone, as on a CPU it repacks the weights for AMX, and no digest could be "
                "checked; use rollout.engine=huggingface"
            )
        if model is None:
            return None
        sizes = {
            "query heads": model.num_heads * model.head_dim,
            "key heads": model.num_kv_heads * model.head_dim,
            "an expert" if model.num_experts else "the MLP": model.expert_intermediate_size or model.intermediate_size,
        }
        for part, rows in sizes.items():
            if rows % (FP8_ROWS * tensor_parallel_size):
                return (
                    f"SGLang needs whole blocks of {FP8_ROWS} rows, and {rows} rows of {part} over rollout."
                    f"tensor_parallel_size={tensor_parallel_size} are not; use a smaller size, or "
                    "rollout.engine=huggingface"
                )
        return None

    def memory(self, model: ModelShape, job: JobShape) -> RankMemory:
        from rlinf_workers.engines.sglang.memory import sglang_memory

        return sglang_memory(model, job)

    def profile(self, model: ModelShape, gpu: Gpu, job: JobShape) -> StageProfile:
        from rlinf_workers.engines.served_profile import served_profile
        from rlinf_workers.engines.sglang.memory import kv_tokens

        limit = server.SGLangOptions.of(job.engine_options).max_running_requests
        memory, num_tokens = self.memory(model, job), kv_tokens(model, job)
        return served_profile("SGLang", model, gpu, job, memory, num_tokens=num_tokens, max_running=limit)

    def fills_its_memory(self, options: Mapping[str, Any]) -> bool:
        return True

    def shortage(self, model: ModelShape, job: JobShape) -> str | None:
        from rlinf_workers.engines.sglang.memory import kv_token_bytes, kv_tokens

        num_tokens, needed = kv_tokens(model, job), job.longest_tokens
        if num_tokens >= needed:
            return None
        size, share = job.tensor_parallel, job.engine_options.get("mem_fraction_static")
        weights, pool = self.memory(model, job).weights, needed * kv_token_bytes(model, job)
        return (
            f"the KV cache of an engine on {size} device{'s' if size > 1 else ''} would hold {max(0, num_tokens):,} "
            f"tokens, and the longest sequence has {needed:,} ({pool / 2**30:.2f} GiB on each device, beside "
            f"{weights / 2**30:.2f} of weights; a device has {job.device_bytes / 2**30:.1f}"
            + (f", mem_fraction_static={share})" if share else ")")
        )

    def smaller(self, options: Mapping[str, Any], job: JobShape) -> Iterator[tuple[str, Sequence[Any]]]:
        tokens, needed = options.get("max_total_tokens"), job.longest_tokens
        if isinstance(tokens, int) and tokens > needed:  # completions wait
            yield "max_total_tokens", [max(needed, tokens >> n) for n in range(1, MAX_HALVINGS + 1)]
        chosen = options.get("mem_fraction_static")
        share = float(chosen) if isinstance(chosen, int | float) else MEM_FRACTION
        near = sorted((other for other in OTHER_SHARES if other != share), key=lambda other: abs(other - share))
        yield "mem_fraction_static", near[:MAX_SHARES]

    def new_weights_problem(self, options: Mapping[str, Any], on_new_weights: str, *, has_stop: bool) -> str | None:
        if on_new_weights == "finish":
            return None
        if has_stop:
            return (
                "SGLang does not report which weights sampled the tokens of a completion that ends at a stop string; "
                "use finish, or no stop strings"
            )
        missing = [option for option in KEEPS_CACHE if options.get(option) is not True]
        if on_new_weights != "keep" or not missing:
            return None
        needed = " and ".join(f"engine_options.{option}=true" for option in missing)
        return (
            "SGLang cannot drop prompts that the earlier weights computed while it keeps the KV cache of completions, "
            "and with overlapped scheduling a token of the earlier weights may count for the new ones; set "
            f"{needed}, or use recompute"
        )

    def late_groups_problem(self, options: Mapping[str, Any]) -> str | None:
        return None  # abort hands back what it has of a completion

    def episodes_problem(self, options: Mapping[str, Any]) -> str | None:
        return None

    def experts_problem(self, options: Mapping[str, Any], *, has_stop: bool) -> str | None:
        if not has_stop:
            return None
        return "SGLang returns no experts of a completion that ends at a stop string; leave rollout.stop out"

    def experts_options(self) -> Mapping[str, Any]:
        return {"enable_return_routed_experts": True}

    def keeps_prefixes(self, options: Mapping[str, Any]) -> bool:
        return options.get("disable_radix_cache") is not True

    def filled_options(self, model: ModelShape, job: JobShape) -> dict[str, Any]:
        """Adds sizes that follow from what the run needs, if the recipe does not set them. All other defaults are set
        when the engine starts (arguments.py)."""
        from rlinf_workers.engines.sglang.memory import gpu_sizes, kv_tokens

        sizes = gpu_sizes(model, job) if job.on_gpu else {"max_total_tokens": kv_tokens(model, job)}
        return {**sizes, **job.engine_options}


SPEC = SGLangSpec(
    name="sglang",
    implementation="rlinf_workers.engines.sglang.engine:SGLangEngine",
    options=SGLangOptions,
    venv=VenvSpec(
        name="sglang",
        purpose="the engine sglang",
        folder=Path(__file__).parent,
        modules=("sglang.srt.entrypoints.engine",),
        packages=("torch", "transformers", "sglang"),
        cpu_variables={"SGLANG_USE_CPU_ENGINE": "1"},
        cpu_stand_ins=("sglang-kernel", "torchvision"),
    ),
    quantizations=("fp8",),
    quantizes_activations=True,
    packages=("sglang",),
    known_versions=("0.5.23",),
    process_bytes=800 << 20,  # no engine in benchmarks/results/sglang-memory.json takes more
)
