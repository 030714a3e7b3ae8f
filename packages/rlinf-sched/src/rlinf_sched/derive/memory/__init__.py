"""What a rank holds on its device, by kind, before any process starts.

    adapters.py     what is trained where the model stays
    job.py          what a step asks of its ranks
    rank.py         RankMemory, the bytes of one rank
    activations.py  what a pass through the model keeps, and what its head takes
    trainers.py     one line for each training backend: how its parts are counted
    served.py       ranks that generate, with one line for each engine, and ranks that only read
    sglang.py       what a device of an SGLang engine holds
    refill.py       the cache whose rows go from one completion to the next

Every count is at the longest sequences that a recipe allows.
"""

from rlinf_sched.derive.memory.activations import MAX_LOGITS_BYTES
from rlinf_sched.derive.memory.adapters import Adapter
from rlinf_sched.derive.memory.job import JobShape
from rlinf_sched.derive.memory.rank import RankMemory
from rlinf_sched.derive.memory.served import forward_memory, generator_memory
from rlinf_sched.derive.memory.trainers import TRAINERS, Trainer, trainer_memory, trainer_of

__all__ = [
    "Adapter",
    "MAX_LOGITS_BYTES",
    "JobShape",
    "RankMemory",
    "TRAINERS",
    "Trainer",
    "trainer_of",
    "trainer_memory",
    "forward_memory",
    "generator_memory",
]
