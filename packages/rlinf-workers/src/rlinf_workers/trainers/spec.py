"""What the rest of the system asks about a training backend before it is created; imports no torch.

A shipped backend overrides the defaults in its `spec.py`. A custom backend class without a spec is assumed to hold the
whole model on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from rlinf_envs import VenvSpec
from rlinf_workers.plugins import Spec

if TYPE_CHECKING:  # specs are read when a recipe is checked, which must not import numpy
    from rlinf_sched import StageProfile
    from rlinf_sched.derive import Gpu, JobShape, ModelShape, RankMemory

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
"""Name of a dtype -> bytes of one number."""


@dataclass(frozen=True, kw_only=True)
class TrainerSpec(Spec):
    """A training backend. `job.trainer_options` are its options in the recipe."""

    venv: VenvSpec | None = None
    """The venv that its packages need."""
    trains_policies: bool = True
    """Supports robot policies, not only language models."""
    trains_adapters: bool = False
    """Supports models with an adapter as the protocol requires: parameters without a gradient stay unchanged and cost
    neither gradients nor optimizer state, served weights are merged, and `forward` can leave the adapter out."""
    packs_sequences: bool = True
    """Computes micro-batches without padding (actor.max_tokens_per_micro_batch)."""
    sequence_option: str = "sequence_parallel"
    """The option that counts ranks that share each packed micro-batch, and needs them."""
    exposes_logits: bool = True
    """Provides statistics of every probability of a token's distribution."""
    exposes_routers: bool = True
    """Provides the router logits of a mixture of experts."""
    replays_routers: bool = True
    """Lets the actor replace the experts of a mixture's routers (router replay)."""
    shards_state: bool = False
    """Its ranks share one copy of the training state, and each computes its own micro-batches."""
    sums_shards_apart: bool = False
    """Keeps a gradient buffer per shard, so fewer shards take less memory."""
    computes_transformers: bool = True
    """Computes with the modules of transformers, so the architecture probe applies."""

    # -- options -----------------------------------------------------------------------------------------------------

    def ranks_per_replica(self, options: Mapping[str, Any]) -> int | None:
        """Ranks that hold one copy of the model, or compute each micro-batch, together; None: the plan decides."""
        size = self.sequence_ranks(options)
        return size if size > 1 else None

    def sequence_ranks(self, options: Mapping[str, Any]) -> int:
        """Ranks that compute each packed micro-batch together, each an equal part of its tokens."""
        return 1

    def compute_dtype(self, options: Mapping[str, Any], model_dtype: str) -> str:
        """The compute dtype of a pass: "float32" or "bfloat16"."""
        return model_dtype

    def dtype_problem(self, options: Mapping[str, Any], model_dtype: str) -> str | None:
        """Why it cannot serve a model of that dtype, as text after "the options "; None: it can."""
        return None

    def model_problem(self, options: Mapping[str, Any], model: ModelShape) -> tuple[str, str] | None:
        """The option that makes sharding the model impossible, and the text after its name; None: no problem."""
        return None

    def config_problem(self, options: Mapping[str, Any], config: Mapping[str, Any]) -> str | None:
        """Why the model of that config.json cannot be trained, or what must be installed, as a sentence that follows
        the backend's name; None: no problem."""
        return None

    def module_problem(self, options: Mapping[str, Any], module: Callable[[], Any]) -> str | None:
        """Why a policy, whose module `module()` creates, cannot be trained with the options: "OPTION=VALUE, reason";
        None: no problem."""
        return None

    def notes(self, *, on_gpu: bool) -> tuple[str, ...]:
        """Notes for the manifest of a run."""
        return ()

    def smaller(
        self, options: Mapping[str, Any], model_dtype: str, num_devices: int
    ) -> Iterator[tuple[str, Sequence[Any]]]:
        """Suggested settings if a recipe does not fit on this many devices, mild ones first: (option, values). By
        default, if the backend has these options, recomputation and bfloat16."""
        names = [field.name for field in fields(self.options)] if self.options else []
        if "recompute" in names and not options.get("recompute"):  # costs time
            yield "recompute", [True]
        computes_less = options.get("compute_dtype") == "bfloat16"
        if "compute_dtype" in names and not computes_less and model_dtype == "float32":
            yield "compute_dtype", ["bfloat16"]

    def num_communicators(self, options: Mapping[str, Any], num_ranks: int) -> int:
        """Groups of several ranks with which each of `num_ranks` ranks of the actor communicates: all of them, and
        those that share micro-batches."""
        return int(num_ranks > 1) + int(self.sequence_ranks(options) > 1)

    # -- memory ------------------------------------------------------------------------------------------------------

    def memory(self, model: ModelShape, job: JobShape, num_ranks: int) -> RankMemory:
        """Memory of one of `num_ranks` ranks that train whole models: the model, a gradient buffer per shard, both
        moments. `rank_memory` accounts for an adapter."""
        from rlinf_workers.trainers.counts import whole_copy_memory

        return whole_copy_memory(model, job, num_ranks)

    def rank_memory(self, model: ModelShape, job: JobShape, num_ranks: int) -> RankMemory:
        """Memory of one of `num_ranks` ranks of the actor."""
        job = replace(job, sequence_ranks=self.sequence_ranks(job.trainer_options))
        whole = self.memory(model, job, num_ranks)
        if job.adapter is None:
            return whole
        return job.adapter.added_to(whole, model, job.dtype_bytes * model.num_parameters, job.num_models)

    def num_ranks_of_replica(self, job: JobShape) -> int:
        """`ranks_per_replica`, each rank on its own device; 1 if the options do not determine it."""
        return self.ranks_per_replica(job.trainer_options) or 1

    def computed(self, job: JobShape) -> JobShape:
        """The job in the compute dtype, in which also a frozen model (the reference) is stored."""
        dtype = next(name for name, size in DTYPE_BYTES.items() if size == job.dtype_bytes)
        return replace(job, dtype_bytes=DTYPE_BYTES[self.compute_dtype(job.trainer_options, dtype)])

    # -- times -------------------------------------------------------------------------------------------------------

    def copies_sent(self, job: JobShape, num_ranks: int) -> int:
        """Copies of the weights that each of `num_ranks` ranks sends and receives per update."""
        return 2

    def num_passes(self, job: JobShape) -> int:
        """Cost of a micro-batch's training in forward passes; a backward pass counts as two."""
        return 4 if job.trainer_options.get("recompute") else 3

    def cut(self, job: JobShape) -> tuple[int, int]:
        """Expert parallelism and pipeline stages."""
        return 1, 1

    def num_chunks(self, job: JobShape) -> int:
        """Chunks of layers of a pipeline stage, through which a micro-batch passes in turn."""
        return 1

    def stage_imbalance(self, model: ModelShape, job: JobShape) -> float:
        """Time of the longest pipeline stage over that of a mean one."""
        return 1.0

    def train_profile(self, model: ModelShape, gpu: Gpu, job: JobShape) -> StageProfile:
        """Times and memory of a training stage: one choice per number of replicas, which determines the gradient
        buffers of a rank. An instance is a replica, whose ranks share its work."""
        from rlinf_workers.trainers.counts import train_profile

        return train_profile(self, model, gpu, job)

    def forward_profile(self, model: ModelShape, gpu: Gpu, job: JobShape) -> StageProfile:
        """Times and memory of a stage that runs forward passes of a frozen model: the reference."""
        from rlinf_sched.derive import read_profile

        expert_parallel, num_stages = self.cut(job)
        return read_profile(model, gpu, self.computed(job), expert_parallel=expert_parallel, num_stages=num_stages)
