"""The engine `sglang`: SGLang in its own processes, on the devices of a rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlinf_envs import VenvSpec
from rlinf_workers.engines.served_spec import MAX_HALVINGS, ServedSpec
from rlinf_workers.engines.sglang.options import ARGUMENTS, MEM_FRACTION, SGLangOptions

if TYPE_CHECKING:
    from rlinf_sched.derive import JobShape, ModelShape, RankMemory

KEEPS_CACHE = ("disable_radix_cache", "disable_overlap_schedule")
"""Server arguments without which completions cannot keep their KV cache when new weights arrive."""
FP8_ROWS = 128
"""Rows of a block with a scale; a projection that SGLang merges with others, or shards, has whole blocks."""


@dataclass(frozen=True, kw_only=True)
class SGLangSpec(ServedSpec):
    """Adds FP8, and the experts of tokens."""

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

    def kv_tokens(self, model: ModelShape, job: JobShape) -> int:
        from rlinf_workers.engines.sglang.memory import kv_tokens

        return kv_tokens(model, job)

    def max_running(self, job: JobShape) -> int | None:
        return SGLangOptions.of(job.engine_options).max_running_requests

    def smaller(self, options: Mapping[str, Any], job: JobShape) -> Iterator[tuple[str, Sequence[Any]]]:
        tokens, needed = options.get("max_total_tokens"), job.longest_tokens
        if isinstance(tokens, int) and tokens > needed:  # completions wait
            yield "max_total_tokens", [max(needed, tokens >> n) for n in range(1, MAX_HALVINGS + 1)]
        yield self.share_option, self.near_shares(options)

    def keep_problem(self, options: Mapping[str, Any]) -> str | None:
        missing = [option for option in KEEPS_CACHE if options.get(option) is not True]
        if not missing:
            return None
        needed = " and ".join(f"engine_options.{option}=true" for option in missing)
        return (
            "SGLang cannot drop prompts that the earlier weights computed while it keeps the KV cache of completions, "
            "and with overlapped scheduling a token of the earlier weights may count for the new ones; set "
            f"{needed}, or use recompute"
        )

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
        from rlinf_workers.engines.sglang.memory import gpu_sizes

        sizes = gpu_sizes(model, job) if job.on_gpu else {"max_total_tokens": self.kv_tokens(model, job)}
        return {**sizes, **job.engine_options}


SPEC = SGLangSpec(
    name="sglang",
    implementation="rlinf_workers.engines.sglang.engine:SGLangEngine",
    options=SGLangOptions,
    arguments=ARGUMENTS,
    share_option="mem_fraction_static",
    default_share=MEM_FRACTION,
    length_options=("max_total_tokens", "context_length"),
    venv=VenvSpec(
        name="sglang",
        purpose="the engine sglang",
        folder=Path(__file__).parent,
        modules=("sglang.srt.entrypoints.engine",),
        packages=("torch", "transformers", "sglang"),
        cpu_variables={"SGLANG_USE_CPU_ENGINE": "1"},
        cpu_stand_ins=("sglang-kernel", "torchvision"),
    ),
    syncs_adapters=True,
    picture_models=("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"),
    quantizations=("fp8",),
    quantizes_activations=True,
    packages=("sglang",),
    known_versions=("0.5.23",),
    process_bytes=800 << 20,  # no engine in benchmarks/results/sglang-memory.json takes more
)
