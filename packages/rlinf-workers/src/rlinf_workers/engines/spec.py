"""What the rest of the system asks about a generation engine before it is created; imports no torch.

A shipped engine overrides the defaults in its `spec.py`. A custom engine class without a spec is assumed to generate
whole batches on a single device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlinf_envs import VenvSpec
from rlinf_workers.plugins import Spec

if TYPE_CHECKING:  # specs are read when a recipe is checked, which must not import numpy
    from rlinf_sched import StageProfile
    from rlinf_sched.derive import Gpu, JobShape, ModelShape, RankMemory

MAX_SHOWN_SIZES = 6


@dataclass(frozen=True, kw_only=True)
class EngineSpec(Spec):
    """A generation engine. `job.engine_options` are its options in the recipe."""

    venv: VenvSpec | None = None
    """The venv that its packages need."""
    packages: tuple[str, ...] = ()
    """Distributions of which one must be installed in the rollout's venv: builds of the same for other devices."""
    known_versions: tuple[str, ...] = ()
    """Tested versions of them; the option `any_version` accepts others."""
    cuts_models: bool = True
    """Can shard a model over the devices of a rank (`tensor_parallel_size`)."""
    serves_adapters: bool = False
    """Can load a folder with an adapter beside its base model."""
    syncs_adapters: bool = False
    """Serves a LoRA adapter beside its base when `ModelSettings.adapter` says so, and has its tensors in `weights`, so
    that a weight sync moves only the adapter; others receive merged weights."""
    picture_models: tuple[str, ...] = ()
    """`model_type` of the vision-language models that it serves, with the pictures and videos of prompts."""
    quantizations: tuple[str, ...] = ()
    """Values of `rollout.quantization` that it supports."""
    quantizes_activations: bool = False
    """With them, it also rounds what weights are multiplied with."""
    process_bytes: int = 0
    """Host bytes of each of its own processes on a CPU slot besides the model; one process per device."""

    def length_problems(self, options: Mapping[str, Any], num_tokens: int) -> Iterator[tuple[str, str]]:
        """Options that are too small for a sequence of `num_tokens`: (option, `=VALUE`)."""
        return iter(())

    def devices_per_rank(self, tensor_parallel_size: int) -> int:
        """As in rlinf_sched.flow_graph.Stage; 0: a rank uses only its first device."""
        return tensor_parallel_size if tensor_parallel_size > 1 else 0

    def cut_problem(self, model: ModelShape, tensor_parallel_size: int) -> str | None:
        """Why an engine cannot shard the model over this many devices, with possible sizes; None: it can."""
        parts = {"attention heads": model.num_heads, "KV heads": model.num_kv_heads}
        if model.num_experts:
            parts["columns of an expert"] = model.expert_intermediate_size
        if model.num_dense_layers or not model.num_experts:
            parts["columns of the MLP"] = model.intermediate_size
        for what, number in parts.items():
            if number % tensor_parallel_size:
                sizes = [n for n in range(1, model.num_kv_heads + 1) if not any(part % n for part in parts.values())]
                return (
                    f"={tensor_parallel_size} does not divide the model's {number} {what}; "
                    f"use {' or '.join(map(str, sizes[:MAX_SHOWN_SIZES]))}"
                )
        return None

    def quantization_problem(self, model: ModelShape | None, tensor_parallel_size: int, *, on_gpu: bool) -> str | None:
        """Why it cannot serve a model with its `quantizations`, and what to do about it; None: it can.

        Args:
            model: None: its parts cannot be counted.
        """
        return None

    def memory(self, model: ModelShape, job: JobShape) -> RankMemory:
        """Memory of one device of a rank; an item is a group."""
        from rlinf_sched.derive import batch_memory

        return batch_memory(model, job)

    def profile(self, model: ModelShape, gpu: Gpu, job: JobShape) -> StageProfile:
        """Times and memory of the rollout stage. Raises: ProfileError if nothing fits."""
        from rlinf_sched.derive import batch_profile

        return batch_profile(model, gpu, job, self.memory(model, job))

    def fills_its_memory(self, options: Mapping[str, Any]) -> bool:
        """Whether it runs as many completions as its memory holds, not a number that the run sets."""
        return False

    def shortage(self, model: ModelShape, job: JobShape) -> str | None:
        """Why its cache is too small for the longest sequence; None: it is large enough, or grows as needed."""
        return None

    def options_beside(self, options: Mapping[str, Any], num_engines: int, *, on_gpu: bool) -> Mapping[str, Any] | None:
        """Options of each of several engines with models of their own in one rank; None: it cannot be one of them."""
        return None

    def smaller(self, options: Mapping[str, Any], job: JobShape) -> Iterator[tuple[str, Sequence[Any]]]:
        """Suggested settings if a recipe does not fit, mild ones first: (option, values)."""
        return iter(())

    def filled_options(self, model: ModelShape, job: JobShape) -> dict[str, Any]:
        """Arguments of its constructor: the options, and values that follow from the model's size."""
        return dict(job.engine_options)

    def new_weights_problem(self, options: Mapping[str, Any], on_new_weights: str, *, has_stop: bool) -> str | None:
        """Why running completions cannot go on like this when new weights arrive (`engines.OnNewWeights`), and what to
        use instead; None: they can.

        Args:
            has_stop: whether stop strings end completions.
        """
        return None if on_new_weights == "finish" else "it cannot pause running completions; use finish"

    def late_groups_problem(self, options: Mapping[str, Any]) -> str | None:
        """Why completions cannot outlive a step (`rollout.sampler: as_finished`), and what to do about it; None: they
        can."""
        return "it cannot suspend completions"

    def episodes_problem(self, options: Mapping[str, Any]) -> str | None:
        """Why it cannot sample the turns of episodes (`rollout.agent`), which come while others are sampled, and what
        to do about it; None: it can."""
        return "it takes no prompts while it generates"

    def experts_problem(self, options: Mapping[str, Any], *, has_stop: bool) -> str | None:
        """Why it cannot record the experts of each token (`SamplingSettings.records_experts`), and what to do about it;
        None: it can.

        Args:
            has_stop: whether stop strings end completions.
        """
        return "it does not record the experts of its tokens; use huggingface or sglang"

    def experts_options(self) -> Mapping[str, Any]:
        """Options with which it records them."""
        return {}

    def kept_problem(self, options: Mapping[str, Any]) -> str | None:
        """Why it cannot say which tokens top_p, top_k and min_p left (`SamplingSettings.records_kept`), as text after
        the engine's name; None: it can."""
        return "the engine does not say which these are (huggingface does)"

    def keeps_prefixes(self, options: Mapping[str, Any]) -> bool:
        """Whether a turn finds the keys and values of the conversation that it continues in the cache."""
        return False

    def pictures_problem(self, options: Mapping[str, Any], kind: str) -> str | None:
        """Why it cannot compute prompts with pictures of a model (`model_type`) with these options, though it supports
        pictures; None: it can."""
        return None

    def probe_ways(self, options: Mapping[str, Any], *, on_gpu: bool) -> tuple[str, ...]:
        """How it computes a transformers model, as names of the architecture probe (`probe.WAYS`); empty for an engine
        with its own model code."""
        return ()
