"""The bytes of one rank, by purpose."""

from dataclasses import dataclass

MEMORY_KINDS = (
    "weights",
    "masters",
    "gradients",
    "optimizer",
    "activations",
    "gathered weights",
    "KV cache",
    "optimizer's step",
    "weight sync",
)
"""The purposes of bytes, in the order of `RankMemory.parts`."""
NUM_MOMENTS = 2
"""Running averages that AdamW keeps for each trained weight."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMemory:
    """Bytes on the device of one rank, by purpose.

    The first four and the KV pool stay allocated between the rank's turns. The others are temporary: those of a pass
    add up, and the optimizer's step and the weight sync happen at other times.
    """

    weights: int
    """Weights in the compute dtype."""
    masters: int = 0
    """A copy of trained weights in a wider type, which the optimizer steps."""
    gradients: int = 0
    optimizer: int = 0
    """The optimizer's moments."""
    activations: int = 0
    """Memory of a pass, including logits and held-back gradients."""
    gathered: int = 0
    """Gathered weights of other ranks in a pass, and their gradients before they are reduce-scattered."""
    kv_cache: int = 0
    """Keys and values, independent of the number of items."""
    kv_pool: int = 0
    """Preallocated memory for keys and values, which stays allocated between turns."""
    activations_of_item: int = 0
    """Further activations for each item that is worked on at once."""
    kv_cache_of_item: int = 0
    """Keys and values for each item that is worked on at once."""
    step: int = 0
    """Temporary memory of the optimizer's step: the norm of the gradient, AdamW."""
    sync: int = 0
    """What a weight sync adds at its peak."""
    host_start: int = 0
    """Host bytes that the rank needs besides its state while it is created or loads a checkpoint."""
    host_copy: int = 0
    """Peak host bytes of the copy for a checkpoint; it stays while the files are written, during training."""

    @property
    def state(self) -> int:
        """Bytes that stay allocated between the rank's turns."""
        return self.weights + self.masters + self.gradients + self.optimizer + self.kv_pool

    def work(self, num_items: int = 1) -> int:
        """Further bytes at the peak of the rank's turn, on so many items at once."""
        return max(sum(self._of_pass(num_items).values()), self.step, self.sync)

    def peak(self, num_items: int = 1) -> int:
        """Bytes while the rank works on so many items at once."""
        return self.state + self.work(num_items)

    def _of_pass(self, num_items: int) -> dict[str, int]:
        return {
            "activations": self.activations + num_items * self.activations_of_item,
            "gathered weights": self.gathered,
            "KV cache": self.kv_cache + num_items * self.kv_cache_of_item,
        }

    def parts(self, num_items: int = 1) -> dict[str, int]:
        """Kind -> bytes; kinds that take nothing are left out. All but the last two add up to the peak, unless one of
        these is more than the pass."""
        parts = {
            "weights": self.weights,
            "masters": self.masters,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
            **self._of_pass(num_items),
            "KV cache": self._of_pass(num_items)["KV cache"] + self.kv_pool,
            "optimizer's step": self.step,
            "weight sync": self.sync,
        }
        return {name: size for name, size in parts.items() if size}

    def describe(self, num_items: int = 1) -> str:
        """The parts of the peak in words: `weights 28.40, gradients 28.40, optimizer 56.70, activations 3.10 GiB`."""
        parts = self.parts(num_items)
        for moment, size in (("optimizer's step", self.step), ("weight sync", self.sync)):
            if size < self.work(num_items):
                parts.pop(moment, None)
        if sum(self._of_pass(num_items).values()) < self.work(num_items):
            parts = {name: size for name, size in parts.items() if name not in self._of_pass(num_items)}
        return ", ".join(f"{name} {size / 2**30:.2f}" for name, size in parts.items()) + " GiB"
