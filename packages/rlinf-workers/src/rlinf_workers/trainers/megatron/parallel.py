"""megatron-core's process groups, which are global to a process, and this rank's place in them.

Ranks of a replica are consecutive. Within one, tensor parallelism varies fastest, then the row slices of a micro-batch,
then the pipeline stages.
"""

from __future__ import annotations

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
    row_slice: int
    """Index of its slice among the `options.num_row_slices` slices of a micro-batch's rows."""
    stage: RankGroup
    """The ranks of its stage."""


_made: dict[MegatronOptions, ParallelRank] = {}
"""At most one entry; the groups of a process are created once."""


def connect(worker: Worker, options: MegatronOptions) -> ParallelRank:
    """Creates the groups, on all ranks of the worker group together, or returns the place in existing ones.

    Raises: ValueError if the ranks do not match the options, or this process has groups of other sizes.
    """
    if options in _made:
        return _made[options]
    if _made:
        raise ValueError(f"this process has a model with {next(iter(_made))}; it cannot have one with {options} too")
    options.check_ranks(worker.num_ranks, worker.identity.num_ranks_per_replica)
    worker.ranks.barrier()  # connects
    if not dist.is_initialized():  # a single rank
        connect_alone(worker.identity)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=options.tensor_parallel,
        pipeline_model_parallel_size=options.pipeline_parallel,
        expert_model_parallel_size=options.expert_parallel,
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
    size, within = options.ranks_per_stage, worker.identity.rank_in_replica
    stage = worker.replica_ranks
    if options.pipeline_parallel > 1:
        # Every rank takes part in creating every group, in the same order.
        firsts = range(0, worker.num_ranks, size)
        groups: list[Any] = [dist.new_group(range(first, first + size), timeout=TIMEOUT) for first in firsts]
        stage = RankGroup(worker.rank % size, size, groups[worker.rank // size])
    return ParallelRank(
        tensor=within % options.tensor_parallel,
        row_slice=within % size // options.tensor_parallel,
        stage=stage,
    )
