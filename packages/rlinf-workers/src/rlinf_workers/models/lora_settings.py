"""The settings of a low-rank adapter (LoRA): which layers of a model it changes, and how."""

from __future__ import annotations

from dataclasses import dataclass

from rlinf_comm import record


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class LoraSettings:
    """The adapter of a model."""

    rank: int
    alpha: float
    """Updates are scaled by alpha / rank."""
    targets: tuple[str, ...]
    """Names of linear layers, or suffixes of names; see `lora.find_targets`."""
    base_digest: str
    """Digest of the base's files. An adapter is only loaded onto the base that it was trained on."""
    backbone: tuple[str, ...] = ("",)
    """Modules with frozen weights; everything else is trained whole, in float32. "" is the whole model."""

    @property
    def scale(self) -> float:
        """The factor of B A."""
        return self.alpha / self.rank

    def is_inside(self, name: str) -> bool:
        """Whether a tensor belongs to the backbone."""
        return any(not part or name.startswith(f"{part}.") for part in self.backbone)

    def changes(self, name: str) -> bool:
        """Whether a linear layer is among the targets; matches names as peft does."""
        return any(name == target or name.endswith(f".{target}") for target in self.targets)
