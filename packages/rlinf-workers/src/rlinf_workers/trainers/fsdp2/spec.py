"""The training backend `fsdp2`: torch's `fully_shard`, a part of every tensor on every rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rlinf_sched.derive import ModelShape
from rlinf_sched.derive.memory import NUM_MOMENTS, JobShape, RankMemory, update_bytes, warm_start_bytes
from rlinf_workers.trainers.spec import TrainerSpec, largest_tensor_bytes

NORM_BYTES = 8
"""Bytes of each squared gradient of the norm, which is float64."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FSDP2Options:
    """The keys of `actor.backend_options`."""

    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """bfloat16 computes in it; weights, reductions and moments stay as the model's dtype is."""
    recompute: bool = False
    """The backward pass computes the feed-forward half of each layer again instead of keeping its activations."""


@dataclass(frozen=True, kw_only=True)
class FSDP2Spec(TrainerSpec):
    """Sharded over all ranks of the actor, each with micro-batches of its own."""

    def compute_dtype(self, options: Mapping[str, Any], model_dtype: str) -> str:
        return "bfloat16" if options.get("compute_dtype") == "bfloat16" else model_dtype

    def module_problem(self, options: Mapping[str, Any], module: Callable[[], Any]) -> str | None:
        if not options.get("recompute"):
            return None
        from rlinf_workers.trainers.fsdp2.sharding import recompute_feed_forward

        try:
            recompute_feed_forward(module())
        except ValueError as error:
            return str(error)
        return None

    def smaller(
        self, options: Mapping[str, Any], model_dtype: str, num_devices: int
    ) -> Iterator[tuple[str, Sequence[Any]]]:
        if not options.get("recompute"):  # costs time
            yield "recompute", [True]
        if options.get("compute_dtype") != "bfloat16" and model_dtype == "float32":
            yield "compute_dtype", ["bfloat16"]

    def memory(self, model: ModelShape, job: JobShape, num_ranks: int) -> RankMemory:
        """A part of weights, one gradient and moments, and what a pass has gathered.

        What is in no layer is gathered for the whole pass. Of the layers, one is in use, the next is on its way, and a
        gradient is sent in the dtype of the weights. The norm squares a gradient in float64.
        """
        copy = job.dtype_bytes * model.num_parameters
        part = job.num_models * -(-copy // num_ranks)
        computed = self.computed(job)
        embeddings = model.vocab_size * model.hidden_size * (1 if model.tied_embeddings else 2)
        rest = embeddings + model.hidden_size + model.vision_parameters
        layer = -(-(model.num_parameters - rest) // model.num_layers)
        recomputes = bool(job.trainer_options.get("recompute"))
        update = update_bytes(model, computed, recomputes=recomputes)
        sent = 0 if num_ranks == 1 or job.sole_adapter else job.dtype_bytes * layer
        largest = largest_tensor_bytes(model, job)
        return RankMemory(
            weights=part,
            gradients=part,
            optimizer=NUM_MOMENTS * part,
            activations=max(update, warm_start_bytes(model, computed, recomputes=recomputes)),
            gathered=computed.dtype_bytes * (rest + 2 * layer) + sent,
            step=-(-2 * NORM_BYTES * largest // (job.dtype_bytes * num_ranks)),
            host_start=copy if job.adapter else 2 * largest,  # what is read, or made, whole
            host_copy=(1 + NUM_MOMENTS) * part + (0 if num_ranks == 1 else 2 * largest),  # gathered
        )

    def copies_sent(self, job: JobShape, num_ranks: int) -> int:
        """Gathered twice and reduced in each pass."""
        groups = -(-job.num_groups // (num_ranks * job.num_updates))
        if job.max_tokens_per_micro_batch is None:
            return 3 * max(1, -(-groups // job.micro_batch_groups))
        return 3 * max(1, math.ceil(groups * job.lengths.packed_group_tokens / job.max_tokens_per_micro_batch))


SPEC = FSDP2Spec(
    name="fsdp2",
    implementation="rlinf_workers.trainers.fsdp2.backend:fsdp2",
    options=FSDP2Options,
    trains_adapters=True,
    shards_state=True,
)
