"""Random disturbances of images and instructions for out-of-distribution evaluation, drawn with the episode's seed.

The kinds are those of arXiv:2505.19789 ("What Can RL Bring to VLA Generalization?"): textures and noise mixed into each
image, and rephrased instructions. The paper uses photographs of materials as textures; here textures are generated, so
that nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rlinf_envs.core.protocol import PICTURE, FieldSpec
from rlinf_envs.errors import EnvError

CELLS = 8
"""Colour patches along each side of a texture."""
INSTRUCTION = "instruction"


@dataclass(frozen=True, kw_only=True, slots=True)
class Disturbance:
    """A disturbance of images and instructions. Plain values only.

    Example: Disturbance(noise=0.3, wordings=("please {instruction}",))
    """

    brightness: float = 0.0
    """-1 makes images black, 0 leaves them, 1 doubles their values; results are clipped to 255."""
    texture: float = 0.0
    """0..1: share of patches of random colours, eight along each side, mixed into each image; drawn anew for each
    image."""
    noise: float = 0.0
    """0..1: as `texture`, with pixels of random colours."""
    shift: int = 0
    """Maximum shift of an episode's images along each axis, in pixels; edge pixels fill the gap."""
    wordings: tuple[str, ...] = ()
    """Alternative wordings, with {instruction} where the original goes; each episode uses one. Empty: no change."""
    paraphrases: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Instruction -> sentences of which each episode uses one in its place; applied before wordings."""

    def __post_init__(self) -> None:
        for name, low in (("brightness", -1.0), ("texture", 0.0), ("noise", 0.0)):
            if not low <= getattr(self, name) <= 1:
                raise EnvError(f"disturb.{name}={getattr(self, name)}; it must be in {low:g}..1")
        if self.shift < 0:
            raise EnvError(f"disturb.shift={self.shift}; it must be at least 0")
        for wording in self.wordings:
            if "{instruction}" not in wording:
                raise EnvError(f"disturb.wordings: {wording!r} lacks {{instruction}}, where the instruction goes")
        if empty := [sentence for sentence, others in self.paraphrases if not others]:
            raise EnvError(f"disturb.paraphrases: {empty[0]!r} has no other words")

    @property
    def changes_pictures(self) -> bool:
        return any((self.brightness, self.texture, self.noise, self.shift))

    @property
    def changes_words(self) -> bool:
        return bool(self.wordings or self.paraphrases)

    def lacking(self, fields: Mapping[str, Any] | Sequence[str]) -> str | None:
        """Describes the fields that it would change but that are missing in `fields`; None: none are missing."""
        if self.changes_pictures and not any(name.startswith(PICTURE) for name in fields):
            return "pictures"
        return "an instruction" if self.changes_words and INSTRUCTION not in fields else None

    def picture(self, picture: np.ndarray, seed: int, time: int, camera: int) -> np.ndarray:
        """Returns the disturbed image [H, W, C] uint8.

        Args:
            seed: the episode's seed.
            time: actions executed in the episode.
            camera: index of the camera.
        """
        height, width, channels = picture.shape
        changed = picture
        if self.shift:
            down, right = np.random.default_rng([seed, camera]).integers(-self.shift, self.shift + 1, 2)
            rows = np.clip(np.arange(height) - down, 0, height - 1)
            changed = changed[rows][:, np.clip(np.arange(width) - right, 0, width - 1)]
        mixed = changed * (1.0 + self.brightness)
        draws = np.random.default_rng([seed, camera, time])
        if self.texture:
            cells = draws.integers(0, 256, (CELLS, CELLS, channels))
            rows, columns = (np.arange(side) * CELLS // side for side in (height, width))
            mixed = (1 - self.texture) * mixed + self.texture * cells[rows][:, columns]
        if self.noise:
            mixed = (1 - self.noise) * mixed + self.noise * draws.integers(0, 256, picture.shape)
        return np.clip(mixed, 0, 255).astype(np.uint8)

    def words(self, instruction: str, seed: int) -> str:
        """Returns the disturbed instruction of an episode."""
        choices = self._choices(instruction)
        return choices[np.random.default_rng([seed]).integers(len(choices))]

    def fields(self, fields: Mapping[str, FieldSpec]) -> dict[str, FieldSpec]:
        """Returns the disturbed field specs: a known instruction lists all its variants, longest first, so that a
        length check of a policy sees the worst case."""
        specs = dict(fields)
        if INSTRUCTION in fields and self.changes_words:
            texts = {choice for text in fields[INSTRUCTION].texts for choice in self._choices(text)}
            in_order = sorted(texts, key=lambda text: (-len(text.encode()), text))
            specs[INSTRUCTION] = replace(fields[INSTRUCTION], texts=tuple(in_order))
        return specs

    def _choices(self, instruction: str) -> tuple[str, ...]:
        """Returns all variants of an instruction."""
        for sentence, others in self.paraphrases:
            if sentence == instruction:
                return others
        return tuple(wording.replace("{instruction}", instruction) for wording in self.wordings) or (instruction,)
