"""What a step asks of the ranks that hold models."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rlinf_sched.derive.lengths import Lengths
from rlinf_sched.derive.memory.adapters import FLOAT_BYTES, Adapter
from rlinf_sched.errors import ProfileError


@dataclass(frozen=True, kw_only=True, slots=True)
class JobShape:
    """What a step of a recipe asks of its ranks. `lengths.prompt_tokens` is the longest prompt."""

    lengths: Lengths
    num_groups: int
    dtype_bytes: int = FLOAT_BYTES
    """Bytes of each number in weights, gradients, moments and activations."""
    served_bytes: int | None = None
    """Bytes of each number in the weights that generate and in their cache; None: dtype_bytes."""
    num_shards: int = 1
    """Parts of a batch, dealt out to the ranks of the trainer."""
    trainer_options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the training backend, which counts them."""
    micro_batch_groups: int = 1
    """Groups of one forward and backward pass, padded to one length."""
    max_tokens_per_micro_batch: int | None = None
    """Tokens of one forward and backward pass, packed without padding; None: as `micro_batch_groups` says."""
    num_updates: int = 1
    """Optimizer steps of a batch."""
    adapter: Adapter | None = None
    """What is trained of the policy; None: all of it."""
    has_critic: bool = False
    """A second model of the same shape in the trainer's processes."""
    sft_warm_up_sequences: int = 0
    """Whole sequences of one forward and backward pass of an SFT warm-up, whose moments stay; 0: there is
    none."""
    on_gpu: bool = True
    """Where the ranks are; torch works in larger pieces there."""
    max_sequences: int = 512
    """Most sequences that a rank generates at once, in engines that are bounded by a number of them."""
    engine_options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the engine that generates, which counts them."""
    tensor_parallel: int = 1
    """Devices over which an engine cuts the model."""
    device_bytes: int = 0
    """Memory of a device on which the engine runs; read by those that take a share of it."""
    host_bytes: int = 0
    """Memory of the machine whose CPU slots the devices are; read where device_bytes is, by those that share it."""
    under_way: int | None = None
    """Sequences that a rank has under way at most, where no number of them bounds it; None: those of all groups."""

    def __post_init__(self) -> None:
        for key in ("num_groups", "dtype_bytes", "num_shards", "micro_batch_groups", "num_updates", "max_sequences"):
            if getattr(self, key) < 1:
                raise ProfileError(f"{key}={getattr(self, key)} must be at least 1")

    @property
    def longest_tokens(self) -> int:
        """Tokens of the longest sequence, prompt and completion together."""
        return self.lengths.prompt_tokens + self.lengths.limit_tokens

    @property
    def num_models(self) -> int:
        """Models that a rank of the trainer trains."""
        return 2 if self.has_critic else 1

    @property
    def most_under_way(self) -> int:
        """`under_way`, or the sequences of all groups."""
        return self.num_groups * self.lengths.group_size if self.under_way is None else self.under_way

    @property
    def served(self) -> "JobShape":
        """The job in the numbers of the weights that generate."""
        return replace(self, dtype_bytes=self.served_bytes or self.dtype_bytes)

    @property
    def sole_adapter(self) -> Adapter | None:
        """The adapter where no model is trained whole."""
        return None if self.has_critic else self.adapter
