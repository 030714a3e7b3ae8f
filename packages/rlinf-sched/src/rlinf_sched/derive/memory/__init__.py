"""What a rank holds on its device, by kind, before any process starts: what all backends and engines are counted with.

    adapters.py     what is trained where the model stays
    job.py          what a step asks of its ranks
    rank.py         RankMemory, the bytes of one rank
    activations.py  what a pass through the model keeps, and what its head takes
    forward.py      ranks that only read, and ranks that generate whole batches

Every count is at the longest sequences that a recipe allows. How a training backend or an engine is counted stands
with it (`rlinf_workers.trainers`, `rlinf_workers.engines`).
"""

from rlinf_sched.derive.memory.activations import (
    CPU_CHUNK_BYTES,
    GPU_CHUNK_BYTES,
    MAX_LOGITS_BYTES,
    feed_forward_bytes,
    kv_bytes,
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
]
