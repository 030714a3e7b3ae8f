"""Memory of one device of an SGLang engine: its shard of the weights, a KV pool, and working memory.

SGLang allocates the pool when it starts: `mem_fraction_static` of the memory including weights, and at most
`max_total_tokens`. The memory of forward passes and CUDA graphs is estimated as SGLang itself reserves it when it
chooses the fraction (0.5.23, `handle_gpu_memory_settings`): 512 MB, 1.5 MB per token of a prefill chunk, 2 MB per
sequence of the largest captured batch, 1 GB / 8 per device of the engine. On a CPU everything is in host memory.
"""

from __future__ import annotations

import math

from rlinf_sched.derive import FLOAT_BYTES, JobShape, ModelShape, RankMemory, feed_forward_bytes, kv_bytes
from rlinf_workers.engines.sglang.options import MEM_FRACTION, NOT_CUT, SGLangOptions

CPU_SHARE = 0.25
"""Maximum share of a CPU slot's memory for the KV pool, if the recipe sets no size."""
MB = 1 << 20
MIN_CHUNK_TOKENS = 2048
"""Minimum prefill chunk, in tokens, that SGLang reserves memory for."""
_CAPACITIES = (
    (20, 2048, 8, 8),
    (35, 4096, 48, 160),
    (60, 4096, 32, 160),
    (160, 8192, 256, 512),
    (math.inf, 16384, 512, 512),
)
"""Device memory in GiB below which a row applies, tokens of a prefill chunk, and the largest captured batch of an
engine on fewer than 4 devices and on more: SGLang's own choices."""


def sglang_memory(model: ModelShape, job: JobShape) -> RankMemory:
    """The memory of one device of a rank. Weights are filled in place, so a sync needs no extra memory; norms, which
    are replicated on each device, are counted as if sharded."""
    return RankMemory(
        weights=_weights_bytes(model, job),
        kv_pool=max(0, kv_tokens(model, job)) * kv_token_bytes(model, job),
        activations=_reserve_bytes(job) if job.on_gpu else _cpu_work_bytes(model, job),
    )


def kv_tokens(model: ModelShape, job: JobShape) -> int:
    """Capacity of an engine's KV pool in tokens; 0 or less if the weights leave no memory."""
    options = SGLangOptions.of(job.engine_options)
    most = options.max_total_tokens
    if not job.on_gpu:
        return _cpu_tokens(model, job) if most is None else most
    room = (options.mem_fraction_static or MEM_FRACTION) * job.device_bytes - _weights_bytes(model, job)
    fitting = math.floor(room / kv_token_bytes(model, job))
    return fitting if most is None else min(fitting, most)


def kv_token_bytes(model: ModelShape, job: JobShape) -> int:
    """Bytes of one token's keys and values on one device of an engine."""
    return kv_bytes(model, job.served) // job.tensor_parallel


def _weights_bytes(model: ModelShape, job: JobShape) -> int:
    return -(-job.served.dtype_bytes * model.num_parameters // job.tensor_parallel)


def _cpu_tokens(model: ModelShape, job: JobShape) -> int:
    """Tokens of all concurrent sequences of a rank at their maximum length, within a share of the slot's memory."""
    num_sequences = min(job.num_groups * job.lengths.group_size, job.max_sequences)
    most = int(CPU_SHARE * job.device_bytes) // kv_token_bytes(model, job)
    return min(num_sequences * job.longest_tokens, most)


def _reserve_bytes(job: JobShape) -> int:
    """Bytes besides weights and KV pool on a GPU."""
    options, size = SGLangOptions.of(job.engine_options), job.tensor_parallel
    chunk, few, many = next(row[1:] for row in _CAPACITIES if job.device_bytes < row[0] * 2**30)
    chunk = chunk if options.chunked_prefill_size is None else options.chunked_prefill_size
    if chunk == NOT_CUT:
        chunk = job.longest_tokens
    largest = options.cuda_graph_max_bs_decode or (few if size < 4 else many)
    if options.max_running_requests is not None:
        largest = min(largest, options.max_running_requests)
    graphs = 0 if options.disable_cuda_graph else 2 * MB * largest
    return 512 * MB + 3 * MB // 2 * max(chunk, MIN_CHUNK_TOKENS) + size * 128 * MB + graphs


def _cpu_work_bytes(model: ModelShape, job: JobShape) -> int:
    """Activations of a layer for a prefill chunk, or the logits of a decoding step with their log-probabilities."""
    options, pool = SGLangOptions.of(job.engine_options), max(job.longest_tokens, kv_tokens(model, job))
    num_tokens = min(max(options.chunked_prefill_size or 0, 4096), pool)
    inside = num_tokens * feed_forward_bytes(model, job.served) // job.tensor_parallel
    num_running = max(1, pool // job.longest_tokens)
    if options.max_running_requests is not None:
        num_running = min(num_running, options.max_running_requests)
    return max(inside, 3 * FLOAT_BYTES * num_running * model.vocab_size)
