"""The engine `huggingface`: a transformers model with its KV cache, in whole batches or with continuous batching."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rlinf_workers.engines.spec import EngineSpec
from rlinf_workers.models.picture_texts import PICTURE_TEXTS, TILED
from rlinf_workers.plugins import OptionError

if TYPE_CHECKING:
    from rlinf_sched.derive import JobShape, ModelShape, RankMemory

DEQUANTIZED_BYTES = 8
"""Bytes a weight of a layer in FP8 while it is dequantized: the value and its scale in float32."""
CACHE_SHARES = (0.6, 0.4, 0.25, 0.2, 0.1, 0.05)
"""Suggested values of `cache_share`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HuggingFaceOptions:
    """The engine's options."""

    cuda_graphs: bool = True
    """On a GPU, decode with CUDA graphs if the model allows it."""
    refill: bool = False
    """Continuous batching: reuse the cache row of an ended completion while others run; without CUDA graphs."""
    cache_share: float | None = None
    """With refill, fraction of the memory free on the device that the cache may take; null: 0.8 of a GPU's, 0.25 of a
    host's."""
    keep_turns: bool = False
    """With refill, for agents: keep the cache of turns, so that the next turn computes only what was added. Half of the
    cache's memory is for what is kept."""

    def __post_init__(self) -> None:
        if self.cache_share is not None and not 0 < self.cache_share <= 1:
            raise OptionError("cache_share", f"={self.cache_share!r} is not a fraction; use one above 0 and up to 1")
        if self.keep_turns and not self.refill:
            raise OptionError("keep_turns", "=true needs continuous batching; set refill: true")


@dataclass(frozen=True, kw_only=True)
class HuggingFaceSpec(EngineSpec):
    """One device per rank."""

    def memory(self, model: ModelShape, job: JobShape) -> RankMemory:
        if not self.fills_its_memory(job.engine_options):
            memory = super().memory(model, job)
        else:
            from rlinf_workers.engines.huggingface.rows import refill_memory

            memory = refill_memory(model, job)
        if not job.serves_fp8:
            return memory
        # While a layer computes, it has its weights in the dtype of the model, and float32 on the way there.
        computed = (DEQUANTIZED_BYTES + job.served.dtype_bytes) * model.largest_linear_parameters
        return replace(memory, activations=memory.activations + computed)

    def fills_its_memory(self, options: Mapping[str, Any]) -> bool:
        return options.get("refill") is True

    def options_beside(self, options: Mapping[str, Any], num_engines: int, *, on_gpu: bool) -> Mapping[str, Any] | None:
        if not self.fills_its_memory(options):
            return options
        from rlinf_workers.engines.huggingface.rows import CACHE_SHARE

        share = options.get("cache_share") or CACHE_SHARE["cuda" if on_gpu else "cpu"]
        return {**options, "cache_share": share / num_engines}

    def smaller(self, options: Mapping[str, Any], job: JobShape) -> Iterator[tuple[str, Sequence[Any]]]:
        if self.fills_its_memory(options):  # completions wait
            most = float(options.get("cache_share", 1.0))
            yield "cache_share", [share for share in CACHE_SHARES if share < most]

    def new_weights_problem(self, options: Mapping[str, Any], on_new_weights: str, *, has_stop: bool) -> str | None:
        if on_new_weights == "finish" or options.get("refill") is True:
            return None
        return (
            "without continuous batching a batch is generated as a whole and cannot pause; set "
            "engine_options.refill=true, or use finish"
        )

    def late_groups_problem(self, options: Mapping[str, Any]) -> str | None:
        if options.get("refill") is True:
            return None
        return "without continuous batching a batch is generated as a whole; set engine_options.refill: true"

    def episodes_problem(self, options: Mapping[str, Any]) -> str | None:
        return self.late_groups_problem(options)  # both need rows that can be refilled

    def experts_problem(self, options: Mapping[str, Any], *, has_stop: bool) -> str | None:
        if not self.keeps_prefixes(options):
            return None
        return "it does not keep the experts of the turns that it keeps; leave engine_options.keep_turns out"

    def kept_problem(self, options: Mapping[str, Any]) -> str | None:
        return None

    def pictures_problem(self, options: Mapping[str, Any], kind: str) -> str | None:
        if kind not in TILED or not self.keeps_prefixes(options):
            return None
        return "the turns that it keeps may end within a picture's tiles; leave engine_options.keep_turns out"

    def keeps_prefixes(self, options: Mapping[str, Any]) -> bool:
        return options.get("keep_turns") is True

    def probe_ways(self, options: Mapping[str, Any], *, on_gpu: bool) -> tuple[str, ...]:
        if self.fills_its_memory(options):
            return ("refill",)
        return ("engine", "graphs") if on_gpu and options.get("cuda_graphs") is not False else ("engine",)


SPEC = HuggingFaceSpec(
    name="huggingface",
    implementation="rlinf_workers.engines.huggingface.engine:HuggingFaceEngine",
    options=HuggingFaceOptions,
    cuts_models=False,
    serves_adapters=True,
    syncs_adapters=True,
    picture_models=tuple(PICTURE_TEXTS),
    quantizations=("fp8",),
)
