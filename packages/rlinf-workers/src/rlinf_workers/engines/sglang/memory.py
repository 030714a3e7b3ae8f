"""Sizes and memory of an SGLang engine on one of its devices: weights, a KV pool, CUDA graphs, and working memory.

SGLang allocates the pool when it starts: `mem_fraction_static` of the memory that is then free, weights included, and
at most `max_total_tokens`. On a GPU both follow from the completions that an engine has at once and from their length,
unless the recipe sets one of them. CUDA graphs are estimated as SGLang itself reserves memory for them (0.5.23,
`reserve_for_graph_mb`), and working memory from the model's shape; neither has been measured on a GPU. On a CPU
everything is in host memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rlinf_sched.derive import (
    FLOAT_BYTES,
    JobShape,
    ModelShape,
    RankMemory,
    feed_forward_bytes,
    group_cache_tokens,
)
from rlinf_workers.engines.served_profile import CPU_SHARE, cpu_sequences, kv_token_bytes, weights_bytes
from rlinf_workers.engines.sglang.options import MEM_FRACTION, NOT_CUT, SPARE_TOKENS, SGLangOptions

MB = 1 << 20
MAX_GRAPH_ROWS = 1024
"""Largest batch for which a CUDA graph is captured. SGLang's own limit, 256 rows on most cards, is less than the
completions of a usual step, and larger batches decode without a graph. Captured batches are up to 32 rows apart."""
MAX_REQUESTS = 4096
"""Most running completions for which an engine keeps tables; SGLang's own limit."""
WORKSPACE_BYTES, GROUP_BYTES = 512 * MB, 128 * MB
"""What SGLang reserves for its attention kernels, and for each device of an engine (`handle_gpu_memory_settings`)."""
GRAPH_ROW_BYTES, PREFILL_GRAPH_BYTES = 2 * MB, 8 * MB
"""What SGLang reserves for each row of the largest decode graph, and for each prefill graph."""
FEATURE_BYTES = 100 * MB
"""SGLang's cache of the features of pictures (its env var SGLANG_VLM_CACHE_SIZE_MB)."""
UNMEASURED = 2
"""Factor on working memory that follows from the model's shape, because no GPU has confirmed it. SGLang itself reserves
1.5 MB for each token of a prefill chunk, whatever the model."""
_CHUNKS = ((20, 2048), (60, 4096), (160, 8192), (math.inf, 16384))
"""Device memory in GiB below which SGLang chooses prefill chunks of so many tokens."""
_PREFILL_STEPS = ((32, 4), (256, 16), (512, 32), (1024, 64), (4096, 256), (math.inf, 512))
"""Tokens up to which SGLang captures prefill graphs, and how many tokens these are apart
(`generate_prefill_cuda_graph_batch_sizes`)."""


def sglang_memory(model: ModelShape, job: JobShape) -> RankMemory:
    """The memory of one device of a rank. Weights are filled in place, so a sync needs no extra memory. What the tower
    computes of pictures is not counted, only what it leaves."""
    work_bytes = _gpu_work_bytes(model, job) if job.on_gpu else _cpu_work_bytes(model, job)
    return RankMemory(
        weights=weights_bytes(model, job),
        kv_pool=max(0, kv_tokens(model, job)) * kv_token_bytes(model, job),
        activations=work_bytes + (FEATURE_BYTES if model.vision_parameters else 0),
    )


def kv_tokens(model: ModelShape, job: JobShape) -> int:
    """Capacity of an engine's KV pool in tokens; 0 or less if the weights leave no memory."""
    options = SGLangOptions.of(job.engine_options)
    most = options.max_total_tokens
    if not job.on_gpu:
        return _cpu_tokens(model, job) if most is None else most
    if most is None and options.mem_fraction_static is None:
        most = _num_sequences(job) * job.longest_tokens
    room = (options.mem_fraction_static or MEM_FRACTION) * job.device_bytes - weights_bytes(model, job)
    fitting = math.floor(room / kv_token_bytes(model, job))
    return fitting if most is None else min(fitting, most)


def gpu_sizes(model: ModelShape, job: JobShape) -> dict[str, Any]:
    """Arguments of an engine on GPUs that follow from what the run needs, besides those of the recipe.

    Prefill graphs are captured for episodes alone: their turns bring many short prompts, and other steps a few large
    ones.
    """
    options: Mapping[str, Any] = job.engine_options
    sizes: dict[str, Any] = {}
    if options.get("mem_fraction_static") is None:
        sizes["max_total_tokens"] = kv_tokens(model, job)
        memory = sglang_memory(model, job)
        sizes["static_bytes"] = memory.weights + memory.kv_pool
    sizes["context_length"] = job.longest_tokens + SPARE_TOKENS
    sizes["max_running_requests"] = _num_sequences(job)
    if "cuda_graph_config" not in options:
        sizes["cuda_graph_max_bs_decode"] = _graph_rows(model, job)
        if not any("cuda_graph" in name and "prefill" in name for name in options):
            sizes["disable_prefill_cuda_graph"] = job.lengths.num_turns == 1
    return sizes


def _num_sequences(job: JobShape) -> int:
    """Completions that an engine has at once, as far as its memory allows."""
    limit = SGLangOptions.of(job.engine_options).max_running_requests
    return limit or min(job.engine_sequences or job.num_groups * job.lengths.group_size, MAX_REQUESTS)


def _num_running(model: ModelShape, job: JobShape) -> int:
    """Completions of expected lengths that run at once: as many as the KV pool holds."""
    groups = max(0, kv_tokens(model, job)) / group_cache_tokens(job.lengths)
    return max(1, min(_num_sequences(job), math.ceil(groups * job.lengths.group_size)))


def _graph_rows(model: ModelShape, job: JobShape) -> int:
    """Rows of the largest CUDA graph."""
    largest = SGLangOptions.of(job.engine_options).cuda_graph_max_bs_decode
    return min(_num_running(model, job), MAX_GRAPH_ROWS) if largest is None else largest


def _cpu_tokens(model: ModelShape, job: JobShape) -> int:
    """Tokens of all concurrent sequences of a rank at their maximum length, within a share of the slot's memory."""
    most = int(CPU_SHARE * job.device_bytes) // kv_token_bytes(model, job)
    return min(cpu_sequences(job) * job.longest_tokens, most)


def _gpu_work_bytes(model: ModelShape, job: JobShape) -> int:
    """Bytes besides weights and KV pool on a GPU: workspaces, graphs, tables of the running completions, and a forward
    pass over a prefill chunk or over the rows of a decoding step."""
    options = SGLangOptions.of(job.engine_options)
    num_tokens, context = _chunk_tokens(job), job.longest_tokens + SPARE_TOKENS
    width = feed_forward_bytes(model, job.served) // job.tensor_parallel
    width += 6 * model.hidden_size * job.served.dtype_bytes  # the residual, norms, queries, keys, values, the output
    logits = 3 * FLOAT_BYTES * _num_running(model, job) * model.vocab_size  # sampled from, and their logarithms
    tables = 4 * _num_sequences(job) * context  # places of a completion's tokens in the pool
    graphs = 0 if options.disable_cuda_graph else (GRAPH_ROW_BYTES + 8 * context) * _graph_rows(model, job)
    if not options.disable_cuda_graph and job.lengths.num_turns > 1:
        graphs += PREFILL_GRAPH_BYTES * _num_prefill_graphs(num_tokens)
    fixed = WORKSPACE_BYTES + GROUP_BYTES * job.tensor_parallel
    return fixed + graphs + tables + UNMEASURED * max(num_tokens * width, logits)


def _chunk_tokens(job: JobShape) -> int:
    """Tokens of the largest prefill."""
    chunk = SGLangOptions.of(job.engine_options).chunked_prefill_size
    if chunk is None:
        chunk = next(tokens for below, tokens in _CHUNKS if job.device_bytes < below * 2**30)
    whole = _num_sequences(job) * job.longest_tokens
    return job.longest_tokens if chunk == NOT_CUT else min(chunk, whole)


def _num_prefill_graphs(num_tokens: int) -> int:
    count, at = 0, 0
    for end, step in _PREFILL_STEPS:
        span = max(0, min(end, num_tokens) - at)
        count, at = count + int(span // step), end
    return count


def _cpu_work_bytes(model: ModelShape, job: JobShape) -> int:
    """Activations of a layer for a prefill chunk, or the logits of a decoding step with their log-probabilities."""
    options, pool = SGLangOptions.of(job.engine_options), max(job.longest_tokens, kv_tokens(model, job))
    num_tokens = min(max(options.chunked_prefill_size or 0, 4096), pool)
    inside = num_tokens * feed_forward_bytes(model, job.served) // job.tensor_parallel
    num_running = max(1, pool // job.longest_tokens)
    if options.max_running_requests is not None:
        num_running = min(num_running, options.max_running_requests)
    return max(inside, 3 * FLOAT_BYTES * num_running * model.vocab_size)
