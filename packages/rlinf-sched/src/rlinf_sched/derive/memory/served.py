"""Ranks whose weights no gradient changes: those that generate, and those that read what was generated."""

from dataclasses import replace

from rlinf_sched.derive.memory.activations import NUM_LOGIT_COPIES, head_bytes, kv_bytes, mlp_width
from rlinf_sched.derive.memory.job import FLOAT_BYTES, ReplicatedJob
from rlinf_sched.derive.memory.rank import RankMemory
from rlinf_sched.derive.memory.trainers import trainer_of
from rlinf_sched.derive.shapes import ModelShape


def forward_memory(model: ModelShape, job: ReplicatedJob) -> RankMemory:
    """The memory of a rank that computes log-probabilities, a group or a packed part of it at a time: first the inside
    of one layer, then the logits."""
    job = replace(job, dtype_bytes=trainer_of(job).frozen_bytes(job))
    lengths, size = job.lengths, job.lengths.group_size
    num_tokens = min(size * lengths.limit_tokens, job.packed_tokens or size * lengths.limit_tokens)
    layer = num_tokens * 4 * mlp_width(model) * job.dtype_bytes
    logits = head_bytes(model, job, num_tokens, 2 * job.dtype_bytes + 2 * FLOAT_BYTES, num_kept=0)
    return RankMemory(
        weights=job.dtype_bytes * model.num_parameters,
        activations=max(layer, logits),
        kv_cache=0
        if job.packed_tokens
        else size * (lengths.prompt_tokens + lengths.limit_tokens) * kv_bytes(model, job),
    )


def generator_memory(model: ModelShape, job: ReplicatedJob) -> RankMemory:
    """The memory of a rank that generates; an item is a group. Caches grow by copying, one layer at a time."""
    lengths = job.lengths
    context = lengths.prompt_tokens + lengths.limit_tokens
    cache = context * kv_bytes(model, job) * (1 + 1 / model.num_layers)
    logits = model.vocab_size * (job.dtype_bytes + NUM_LOGIT_COPIES * FLOAT_BYTES)
    return RankMemory(
        weights=job.dtype_bytes * model.num_parameters,
        kv_cache_of_item=round(lengths.group_size * cache),
        activations_of_item=lengths.group_size * logits,
    )
