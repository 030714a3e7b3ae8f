"""Memory of one device of a vLLM engine: its shard of the weights, a KV cache, and working memory.

vLLM allocates the cache when it starts. On a GPU it fills `gpu_memory_utilization` of the device: what is left of it
beside weights and a forward pass with as many tokens as it ever computes at once. On a CPU the cache has
`kv_cache_memory_bytes`, and everything is in host memory.
"""

from __future__ import annotations

from rlinf_sched.derive import FLOAT_BYTES, JobShape, ModelShape, RankMemory, feed_forward_bytes
from rlinf_workers.engines.served_profile import CPU_SHARE, cpu_sequences, kv_token_bytes, weights_bytes
from rlinf_workers.engines.vllm.options import CPU_BLOCK_TOKENS, MEMORY_SHARE, VLLMOptions

BATCHED_TOKENS = {False: 2048, True: 8192}
"""vLLM's own limit of the tokens in one forward pass, on CPU slots and on GPUs."""
RUNNING = {False: 128, True: 1024}
"""vLLM's own limit of running completions, on CPU slots and on GPUs."""

PICTURE_TOKENS = 16384
"""Tokens of the largest picture that Qwen's processors make by default; vLLM's cache of features holds at least one."""
FEATURE_WIDTHS = 4
"""Hidden widths of a token's features: Qwen3-VL has those of three deeper layers beside its own."""


def vllm_memory(model: ModelShape, job: JobShape) -> RankMemory:
    """The memory of one device of a rank. Weights are filled in place, so a sync needs no extra memory."""
    return RankMemory(
        weights=weights_bytes(model, job),
        kv_pool=max(0, _cache_bytes(model, job)),
        activations=_work_bytes(model, job),
    )


def kv_tokens(model: ModelShape, job: JobShape) -> int:
    """Capacity of an engine's KV cache in tokens; 0 or less if nothing is left for it. One block is never used."""
    block_bytes = _block_tokens(job) * kv_token_bytes(model, job)
    return (_cache_bytes(model, job) // block_bytes - 1) * _block_tokens(job)


def cpu_cache_bytes(model: ModelShape, job: JobShape) -> int:
    """Bytes of a cache for all concurrent sequences of a rank at their maximum length, within a share of the slot's
    memory."""
    block, token_bytes = _block_tokens(job), kv_token_bytes(model, job)
    needed = (cpu_sequences(job) * -(-job.longest_tokens // block) + 1) * block * token_bytes
    return min(needed, int(CPU_SHARE * job.device_bytes) // (block * token_bytes) * block * token_bytes)


def running(job: JobShape) -> int:
    """vLLM's maximum number of running completions."""
    return VLLMOptions.of(job.engine_options).max_num_seqs or RUNNING[job.on_gpu]


def _cache_bytes(model: ModelShape, job: JobShape) -> int:
    options = VLLMOptions.of(job.engine_options)
    if options.kv_cache_memory_bytes is not None:
        return options.kv_cache_memory_bytes
    if not job.on_gpu:
        return cpu_cache_bytes(model, job)
    share = options.gpu_memory_utilization or MEMORY_SHARE
    return int(share * job.device_bytes) - weights_bytes(model, job) - _work_bytes(model, job)


def _block_tokens(job: JobShape) -> int:
    return VLLMOptions.of(job.engine_options).block_size or (16 if job.on_gpu else CPU_BLOCK_TOKENS)


def _work_bytes(model: ModelShape, job: JobShape) -> int:
    """Activations of a layer for a full forward pass, or the logits of all running completions with their
    log-probabilities; and the features of pictures. What the tower computes is not counted."""
    num_tokens = VLLMOptions.of(job.engine_options).max_num_batched_tokens or BATCHED_TOKENS[job.on_gpu]
    inside = num_tokens * feed_forward_bytes(model, job.served) // job.tensor_parallel
    features = 0
    if model.vision_parameters:
        width = FEATURE_WIDTHS * model.hidden_size * job.served.dtype_bytes
        features = max(num_tokens, PICTURE_TOKENS) * width
    return max(inside, 3 * FLOAT_BYTES * running(job) * model.vocab_size) + features
