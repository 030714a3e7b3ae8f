"""Sizes and memory of the cache for continuous batching (option `refill`), whose rows are reused.

A row holds the longest sequence. The cache has one row per running sequence, up to a share of the free memory, and
stays allocated between turns until the engine is offloaded. The free memory is known when prompts arrive; the estimate
here assumes that only the engine's own weights are on the device. slots.py takes its sizes from here.
"""

from __future__ import annotations

from itertools import count

from rlinf_sched.derive import FLOAT_BYTES, JobShape, ModelShape, RankMemory, feed_forward_bytes, kv_bytes

KEY_STEP = 16
"""Tokens of a row, and of a prefilled prompt, are rounded up to a multiple of it."""
FEWEST_ROWS = 8
ROW_STEP = 16
"""With `keep_turns`, the number of rows of the cache is a multiple of it (kept.py)."""
PREFILL_TOKENS = 16384
"""Maximum prompt tokens per forward pass, unless a single prompt has more."""
CACHE_SHARE = {"cuda": 0.8, "cpu": 0.25}
"""Share of the free memory that the cache may take: a GPU belongs to one rank, a host is shared with other ranks."""


def refill_memory(model: ModelShape, job: JobShape) -> RankMemory:
    """The memory of a rank at its maximum number of sequences.

    Prompts that begin together are prefilled a few at a time, and their keys and values are kept until they are copied
    to rows. When the cache grows, it is copied one layer at a time.
    """
    weights, job, lengths = job.served_weights_bytes(model), job.served, job.lengths
    token_bytes = kv_bytes(model, job)
    row_bytes = row_tokens(job.longest_tokens) * token_bytes
    keeps = job.engine_options.get("keep_turns") is True
    num_copies = 2 if keeps else 1  # what is kept is as large as the rows
    most = _most_rows(job, weights, num_copies * row_bytes)
    num_rows = cache_rows(job.most_under_way, most=most, keeps_turns=keeps)
    num_prompts, width = -(-num_rows // lengths.group_size), row_tokens(lengths.prompt_tokens)
    num_prefilled = min(num_prompts, max(1, PREFILL_TOKENS // width)) * width
    logits = model.vocab_size * (job.dtype_bytes + 3 * FLOAT_BYTES)
    return RankMemory(
        weights=weights,
        kv_pool=num_copies * num_rows * row_bytes,
        kv_cache=(num_prompts * width + num_prefilled) * token_bytes,
        activations=max(num_prefilled * feed_forward_bytes(model, job), num_rows * logits),
    )


def row_tokens(num_tokens: int) -> int:
    """Tokens of a row that can hold `num_tokens`."""
    return -(-num_tokens // KEY_STEP) * KEY_STEP


def cache_rows(num_sequences: int, *, most: int | None, keeps_turns: bool = False) -> int:
    """Cache rows for this many running sequences, of which `most` fit: 8, 12, 16, 24, 32, ..., so that the cache seldom
    grows and at most a third is idle. With `keep_turns` a multiple of 16 (kept.py)."""
    sizes = (size for doublings in count() for size in (FEWEST_ROWS << doublings, 3 * FEWEST_ROWS // 2 << doublings))
    rows = next(size for size in sizes if size >= num_sequences)
    rows = rows if most is None else max(FEWEST_ROWS, min(rows, most))
    return -(-rows // ROW_STEP) * ROW_STEP if keeps_turns else rows


def _most_rows(job: JobShape, weights: int, row_bytes: int) -> int | None:
    """Rows that fit in memory; None: the memory size is not known."""
    has = job.device_bytes if job.on_gpu else job.host_bytes
    share = job.engine_options.get("cache_share") or CACHE_SHARE["cuda" if job.on_gpu else "cpu"]
    return int(share * (has - weights) / row_bytes) if has else None
