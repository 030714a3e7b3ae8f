"""Ranks with frozen weights: those that generate, and those that score completions."""

from dataclasses import replace

from rlinf_sched.derive.memory.activations import (
    feed_forward_bytes,
    head_bytes,
    kv_bytes,
    packed_pass,
    passes_of_micro_batch,
)
from rlinf_sched.derive.memory.adapters import FLOAT_BYTES
from rlinf_sched.derive.memory.job import JobShape
from rlinf_sched.derive.memory.rank import RankMemory
from rlinf_sched.derive.shapes import ModelShape


def forward_memory(model: ModelShape, job: JobShape) -> RankMemory:
    """The memory of a rank that computes log-probabilities, a group (packed, at most a budget) at a time, or on GPUs as
    many packed groups as the budget allows: first the inside of one layer, then the logits, put together from those of
    the prompts and of the completions.

    Args:
        job: in the numbers that the rank computes in (`dtype_bytes`).
    """
    job = replace(job, micro_batch_groups=1)
    prompts, completions = passes_of_micro_batch(job)
    packed = packed_pass(job if job.on_gpu else replace(job, num_groups=job.num_shards))  # a group, or a part of it
    completions = packed or completions
    keys = completions.num_rows * (completions.num_before + completions.num_tokens)
    attention = 2 * keys * model.num_heads * model.head_dim * job.dtype_bytes
    inside = max(attention, completions.all_tokens * feed_forward_bytes(model, job))
    logits = head_bytes(model, job, completions.all_tokens, 2 * job.dtype_bytes, num_kept=0)
    cached = 0 if packed is not None else keys + prompts.all_tokens
    return RankMemory(
        weights=job.dtype_bytes * model.num_parameters,
        activations=max(inside, logits),
        kv_cache=cached * kv_bytes(model, job),
    )


def batch_memory(model: ModelShape, job: JobShape) -> RankMemory:
    """The memory of a rank that generates whole batches; an item is a group. Caches grow by copying, one layer at a
    time."""
    lengths, weights, job = job.lengths, job.served_weights_bytes(model), job.served
    cache = job.longest_tokens * kv_bytes(model, job) * (1 + 1 / model.num_layers)
    logits = model.vocab_size * (job.dtype_bytes + 3 * FLOAT_BYTES)
    return RankMemory(
        weights=weights,
        kv_cache_of_item=round(lengths.group_size * cache),
        activations_of_item=lengths.group_size * logits,
    )
