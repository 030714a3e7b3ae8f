"""The sizes of a step for the ranks that hold models."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rlinf_sched.derive.lengths import Lengths
from rlinf_sched.derive.memory.adapters import FLOAT_BYTES, Adapter
from rlinf_sched.derive.shapes import ModelShape
from rlinf_sched.errors import ProfileError

FP8_BLOCK_PARAMETERS = 128 * 128
"""Weights that share a scale."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobShape:
    """The sizes of a recipe's step. `lengths.prompt_tokens` is the longest prompt."""

    lengths: Lengths
    num_groups: int
    dtype_bytes: int = FLOAT_BYTES
    """Bytes of each number in weights, gradients, moments and activations."""
    served_bytes: int | None = None
    """Bytes of each number in the weights that generate and in their cache; None: dtype_bytes."""
    serves_fp8: bool = False
    """The linear layers that generate have their weights in FP8, with a float32 scale for each 128 x 128."""
    num_shards: int = 1
    """Shards of a batch, distributed over the ranks of the trainer."""
    trainer_options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the training backend, which computes its own memory."""
    sequence_ranks: int = 1
    """Ranks of the trainer that compute a packed micro-batch together, each an equal part of its tokens."""
    micro_batch_groups: int = 1
    """Groups of one forward and backward pass, padded to one length."""
    max_tokens_per_micro_batch: int | None = None
    """Tokens of one forward and backward pass, packed without padding; None: `micro_batch_groups` decides."""
    num_updates: int = 1
    """Optimizer steps of a batch."""
    adapter: Adapter | None = None
    """The trained adapter of the policy; None: the policy is trained whole."""
    syncs_adapter: bool = False
    """The engine serves the adapter beside its base, and a sync moves the adapter alone; otherwise it is merged."""
    has_critic: bool = False
    """A second model of the same shape in the trainer's processes."""
    sft_warm_up_sequences: int = 0
    """Whole sequences of one forward and backward pass of an SFT warm-up, whose moments stay allocated; 0: no
    warm-up."""
    on_gpu: bool = True
    """Where the ranks are; torch works in larger pieces there."""
    max_sequences: int = 512
    """Maximum number of concurrent sequences of a rank, in engines limited by their number."""
    engine_options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the engine, which computes its own memory."""
    tensor_parallel: int = 1
    """Devices over which an engine shards the model."""
    device_bytes: int = 0
    """Memory of the engine's device; read by engines that take a share of it."""
    host_bytes: int = 0
    """Memory of the machine whose CPU slots the devices are; read by engines that share it, together with
    device_bytes."""
    engine_sequences: int | None = None
    """Completions that an engine has at once, for an engine that allocates its cache when it starts; None: those of all
    groups."""
    under_way: int | None = None
    """Maximum number of sequences in flight on a rank without another limit; None: those of all groups."""

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

    def served_weights_bytes(self, model: ModelShape) -> int:
        """Bytes of all weights that generate, with an adapter that is served beside them."""
        size = self.served.dtype_bytes
        if self.adapter is not None and self.syncs_adapter:
            return size * (model.num_parameters + self.adapter.num_parameters(model))
        if not self.serves_fp8:
            return size * model.num_parameters
        linear = model.num_linear_parameters
        return size * (model.num_parameters - linear) + linear + FLOAT_BYTES * -(-linear // FP8_BLOCK_PARAMETERS)

    def synced_weights_bytes(self, model: ModelShape) -> int:
        """Bytes that a weight sync moves for each version; where it is the adapter, the base is moved once."""
        if self.adapter is not None and self.syncs_adapter:
            return self.served.dtype_bytes * self.adapter.num_parameters(model)
        return self.served_weights_bytes(model)

    @property
    def sole_adapter(self) -> Adapter | None:
        """The adapter where no model is trained whole."""
        return None if self.has_critic else self.adapter
