"""Memory of a rank by kind, before any process starts: the common parts for all backends and engines.

    adapters.py     trained weights of low-rank adapters
    job.py          JobShape, the sizes of a step
    rank.py         RankMemory, the bytes of one rank
    activations.py  activations of a pass through the model, and the memory of its head
    forward.py      ranks that only run forward passes, and ranks that generate whole batches

All numbers are for the longest sequences that a recipe allows. The memory of a training backend or an engine is defined
with it (`rlinf_workers.trainers`, `rlinf_workers.engines`).
"""

from rlinf_sched.derive.memory.activations import (
    CPU_CHUNK_BYTES,
    GPU_CHUNK_BYTES,
    MAX_LOGITS_BYTES,
    feed_forward_bytes,
    kv_bytes,
    packed_pass,
    sft_warm_up_bytes,
    update_bytes,
)
from rlinf_sched.derive.memory.adapters import FLOAT_BYTES, Adapter
from rlinf_sched.derive.memory.forward import batch_memory, forward_memory
from rlinf_sched.derive.memory.job import JobShape
from rlinf_sched.derive.memory.rank import MEMORY_KINDS, NUM_MOMENTS, RankMemory

__all__ = [
    "Adapter",
    "JobShape",
    "RankMemory",
    "MEMORY_KINDS",
    "NUM_MOMENTS",
    "FLOAT_BYTES",
    "MAX_LOGITS_BYTES",
    "CPU_CHUNK_BYTES",
    "GPU_CHUNK_BYTES",
    "forward_memory",
    "batch_memory",
    "update_bytes",
    "sft_warm_up_bytes",
    "feed_forward_bytes",
    "kv_bytes",
    "packed_pass",
]
