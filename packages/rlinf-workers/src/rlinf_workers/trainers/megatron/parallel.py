"""megatron-core's process groups, which are global to a process, and this rank's place in them.

Ranks of a replica are consecutive. Within one, tensor parallelism varies fastest, then the slices of a micro-batch,
then the pipeline stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from rlinf_workers.collectives import TIMEOUT, RankGroup, connect_alone
from rlinf_workers.trainers.megatron.options import MegatronOptions
from rlinf_workers.worker import Worker

SEED = 1
"""Arbitrary: weights are loaded, and there is no dropout."""


@dataclass(frozen=True, kw_only=True)
class ParallelRank:
    """This rank in its replica."""

    tensor: int
    """Rank within its tensor parallel group."""
    stage: RankGroup
    """The ranks of its stage."""
    slices: RankGroup
    """Those of them that have the same shard of each matrix, and divide a micro-batch."""


_made: dict[MegatronOptions, ParallelRank] = {}
"""At most one entry; the groups of a process are created once."""


def connect(worker: Worker, options: MegatronOptions, *, has_experts: bool) -> ParallelRank:
    """Creates the groups, on all ranks of the worker group together, or returns the place in existing ones.

    Raises: ValueError if the ranks do not match the options, or this process has groups of other sizes.
    """
    if options in _made:
        return _made[options]
    if _made:
        raise ValueError(f"this process has a model with {next(iter(_made))}; it cannot have one with {options} too")
    options.check_ranks(worker.num_ranks, worker.identity.num_ranks_per_replica, has_experts=has_experts)
    worker.ranks.barrier()  # connects
    if not dist.is_initialized():  # a single rank
        connect_alone(worker.identity)
    # Slices are data parallel for megatron-core, which cannot count them inside of stages and replicas outside of them;
    # with both they have its context parallel ranks, over which it sums and shards in the same way.
    replicates_slices = options.replicates_slices(worker.num_ranks)
    expert_parallel = options.expert_parallel
    if replicates_slices and not has_experts:  # as many ranks as the stage has, which megatron-core requires
        expert_parallel = options.num_row_slices
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=options.tensor_parallel,
        pipeline_model_parallel_size=options.pipeline_parallel,
        virtual_pipeline_model_parallel_size=options.num_chunks,
        context_parallel_size=options.num_row_slices if replicates_slices else 1,
        expert_model_parallel_size=expert_parallel,
        expert_tensor_parallel_size=options.expert_tensor_parallel,
        distributed_timeout_minutes=TIMEOUT // timedelta(minutes=1),
        # Stages are outermost, as in layouts, with replicas outside of them.
        order="tp-cp-ep-pp-dp" if worker.num_ranks > options.ranks_per_replica else "tp-cp-ep-dp-pp",
    )
    on_gpu = worker.device.type == "cuda"
    with torch.random.fork_rng(devices=[worker.device] if on_gpu else []):
        model_parallel_cuda_manual_seed(SEED)
    _made[options] = _place(worker, options)
    return _made[options]


def disconnect() -> None:
    """Destroys the groups; models that use them must not be used any more."""
    parallel_state.destroy_model_parallel()
    _made.clear()


def _place(worker: Worker, options: MegatronOptions) -> ParallelRank:
    size, width = options.ranks_per_stage, options.tensor_parallel
    firsts = range(0, worker.num_ranks, size)
    stage = worker.replica_ranks
    if options.pipeline_parallel > 1:
        stage = _group(worker, [range(first, first + size) for first in firsts])
    slices = RankGroup(0, 1)
    if width == 1:
        slices = stage
    elif options.num_row_slices > 1:
        slices = _group(
            worker, [range(first + shard, first + size, width) for first in firsts for shard in range(width)]
        )
    return ParallelRank(tensor=worker.rank % width, stage=stage, slices=slices)


def _group(worker: Worker, groups: Sequence[range]) -> RankGroup:
    """That of disjoint groups which has this rank. Every rank takes part in creating every group, in the same order."""
    process_groups: list[Any] = [dist.new_group(members, timeout=TIMEOUT) for members in groups]
    own = next(number for number, members in enumerate(groups) if worker.rank in members)
    return RankGroup(groups[own].index(worker.rank), len(groups[own]), process_groups[own])
