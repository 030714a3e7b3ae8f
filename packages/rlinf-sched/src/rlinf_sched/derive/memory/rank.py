"""The bytes of one rank, by what they are for."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMemory:
    """Bytes on the device of one rank, by what they are for.

    The first four stay between the rank's turns. The others come and go while it works, and add up at its peak.
    """

    weights: int
    """What is computed with."""
    masters: int = 0
    """A copy of trained weights in a wider type, which the optimizer steps."""
    gradients: int = 0
    optimizer: int = 0
    """The optimizer's moments."""
    activations: int = 0
    """What a pass keeps and works with, logits and held-back gradients included."""
    gathered: int = 0
    """Weights of other ranks that a pass has gathered, and their gradients before they are shared out."""
    kv_cache: int = 0
    """Keys and values, whatever the number of items."""
    activations_of_item: int = 0
    """Further activations for each item that is worked on at once."""
    kv_cache_of_item: int = 0
    """Keys and values for each item that is worked on at once."""
    host_start: int = 0
    """Bytes of host memory that the rank needs beside its state while it is made or loads a checkpoint."""

    @property
    def state(self) -> int:
        """Bytes that stay between the rank's turns."""
        return self.weights + self.masters + self.gradients + self.optimizer

    @property
    def work(self) -> int:
        """Further bytes at the peak of the rank's turn, whatever the number of items."""
        return self.activations + self.gathered + self.kv_cache

    @property
    def work_of_item(self) -> int:
        """Further bytes for each item that is worked on at once."""
        return self.activations_of_item + self.kv_cache_of_item

    def peak(self, num_items: int = 1) -> int:
        """Bytes while the rank works on so many items at once."""
        return self.state + self.work + num_items * self.work_of_item

    def parts(self, num_items: int = 1) -> dict[str, int]:
        """Kind -> bytes at the peak; kinds that take nothing are left out."""
        parts = {
            "weights": self.weights,
            "masters": self.masters,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
            "activations": self.activations + num_items * self.activations_of_item,
            "gathered weights": self.gathered,
            "KV cache": self.kv_cache + num_items * self.kv_cache_of_item,
        }
        return {name: size for name, size in parts.items() if size}

    def describe(self, num_items: int = 1) -> str:
        """The parts in words: `weights 28.40, gradients 28.40, optimizer 56.70, activations 3.10 GiB`."""
        return ", ".join(f"{name} {size / 2**30:.2f}" for name, size in self.parts(num_items).items()) + " GiB"
