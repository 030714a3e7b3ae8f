"""What the rest of the system asks about a training backend before one is made; imports no torch.

A backend that ships overrides in its `spec.py` what it answers differently. A custom backend class without a spec is
counted as one that holds the whole model on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from rlinf_envs import VenvSpec
from rlinf_workers.plugins import Spec

if TYPE_CHECKING:  # a spec is read while a recipe is looked at, which imports no numpy
    from rlinf_sched import StageProfile
    from rlinf_sched.derive import Gpu, JobShape, ModelShape, RankMemory

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, kw_only=True)
class TrainerSpec(Spec):
    """A training backend. `job.trainer_options` are the options that the recipe gives it."""

    venv: VenvSpec | None = None
    """The virtual environment that its packages need."""
    trains_policies: bool = True
    """Holds robot policies too, not language models alone."""
    trains_adapters: bool = False
    """Keeps what the protocol promises of models with an adapter: parameters without a gradient stay and cost neither
    gradients nor optimizer state, what is served is merged, and `forward` can leave the adapter out."""
    packs_sequences: bool = True
    """Computes micro-batches without padding (actor.max_tokens_per_micro_batch)."""
    exposes_logits: bool = True
    """Gives statistics of every probability of a token's distribution."""
    exposes_routers: bool = True
    """Gives the logits of the routers of a mixture of experts."""
    shards_state: bool = False
    """Its ranks share one copy of the training state and each compute on micro-batches of their own."""
    sums_shards_apart: bool = False
    """Keeps a gradient buffer for each shard, so fewer shards take less memory."""
    computes_transformers: bool = True
    """Computes with the modules of transformers, so the architecture probe applies."""

    # -- options -----------------------------------------------------------------------------------------------------

    def ranks_per_replica(self, options: Mapping[str, Any]) -> int | None:
        """Ranks that hold one copy of the model together; None: the plan says."""
        return None

    def compute_dtype(self, options: Mapping[str, Any], model_dtype: str) -> str:
        """What a pass computes in: "float32" or "bfloat16"."""
        return model_dtype

    def dtype_problem(self, options: Mapping[str, Any], model_dtype: str) -> str | None:
        """Why it cannot serve a model of that type, after "the options "; None: it can."""
        return None

    def model_problem(self, options: Mapping[str, Any], model: ModelShape) -> tuple[str, str] | None:
        """The option by which the model cannot be cut, and the text that follows its name; None: it can."""
        return None

    def config_problem(self, options: Mapping[str, Any], config: Mapping[str, Any]) -> str | None:
        """Why the model of that config.json cannot be trained, or what has to be installed, as a sentence that follows
        the backend's name; None: it can."""
        return None

    def module_problem(self, options: Mapping[str, Any], module: Callable[[], Any]) -> str | None:
        """Why a policy, whose module `module` makes, cannot be trained with the options: "OPTION=VALUE, reason"; None:
        it can."""
        return None

    def notes(self, *, on_gpu: bool) -> tuple[str, ...]:
        """What the manifest of a run says of it."""
        return ()

    def smaller(
        self, options: Mapping[str, Any], model_dtype: str, num_devices: int
    ) -> Iterator[tuple[str, Sequence[Any]]]:
        """Other values of its options to try where a recipe does not fit on so many devices, mild ones first: (option,
        values). Of any backend that has the options, to compute layers again and to compute in bfloat16."""
        names = [field.name for field in fields(self.options)] if self.options else []
        if "recompute" in names and not options.get("recompute"):  # costs time
            yield "recompute", [True]
        computes_less = options.get("compute_dtype") == "bfloat16"
        if "compute_dtype" in names and not computes_less and model_dtype == "float32":
            yield "compute_dtype", ["bfloat16"]

    # -- memory ------------------------------------------------------------------------------------------------------

    def memory(self, model: ModelShape, job: JobShape, num_ranks: int) -> RankMemory:
        """One of `num_ranks` ranks that train whole models: the model, a gradient buffer for each of the rank's shards,
        both moments. What an adapter changes of it is counted in `rank_memory`."""
        from rlinf_workers.trainers.counts import whole_copy_memory

        return whole_copy_memory(model, job, num_ranks)

    def rank_memory(self, model: ModelShape, job: JobShape, num_ranks: int) -> RankMemory:
        """What one of `num_ranks` ranks of the actor holds."""
        whole = self.memory(model, job, num_ranks)
        if job.adapter is None:
            return whole
        return job.adapter.added_to(whole, model, job.dtype_bytes * model.num_parameters, job.num_models)

    def num_ranks_of_replica(self, job: JobShape) -> int:
        """Ranks, each on a device of its own, that hold one copy of the model together, as far as the options say."""
        return self.ranks_per_replica(job.trainer_options) or 1

    def computed(self, job: JobShape) -> JobShape:
        """The job in the numbers that a pass computes in, and in which a frozen model is held: the reference."""
        dtype = next(name for name, size in DTYPE_BYTES.items() if size == job.dtype_bytes)
        return replace(job, dtype_bytes=DTYPE_BYTES[self.compute_dtype(job.trainer_options, dtype)])

    # -- times -------------------------------------------------------------------------------------------------------

    def copies_sent(self, job: JobShape, num_ranks: int) -> int:
        """Copies of the weights that each of `num_ranks` ranks sends and receives in an update."""
        return 2

    def num_passes(self, job: JobShape) -> int:
        """Forward passes that a micro-batch's training costs; a backward pass is two."""
        return 4 if job.trainer_options.get("recompute") else 3

    def cut(self, job: JobShape) -> tuple[int, int]:
        """Ranks that share experts out, and stages that share layers out."""
        return 1, 1

    def train_profile(self, model: ModelShape, gpu: Gpu, job: JobShape) -> StageProfile:
        """Times and memory of a stage that trains: one choice for each number of replicas, which decides how many
        gradient buffers a rank has. An instance is a replica, whose ranks share its work out."""
        from rlinf_workers.trainers.counts import train_profile

        return train_profile(self, model, gpu, job)

    def forward_profile(self, model: ModelShape, gpu: Gpu, job: JobShape) -> StageProfile:
        """Times and memory of a stage that reads with a frozen model: the reference."""
        from rlinf_sched.derive import read_profile

        expert_parallel, num_stages = self.cut(job)
        return read_profile(model, gpu, self.computed(job), expert_parallel=expert_parallel, num_stages=num_stages)
