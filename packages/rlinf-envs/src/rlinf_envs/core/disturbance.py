"""What becomes of pictures and instructions that are to be other than in training, drawn by the episode's seed.

The kinds are those of arXiv:2505.19789 ("What Can RL Bring to VLA Generalization?"): textures and noise laid over the
picture and drawn anew for each one, and other words for the same instruction. Theirs mix a photograph of a material
into the picture; here the texture is drawn, as nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rlinf_envs.core.protocol import PICTURE, FieldSpec
from rlinf_envs.errors import EnvError

CELLS = 8
"""Patches of colour on a side of a texture."""
INSTRUCTION = "instruction"


@dataclass(frozen=True, kw_only=True, slots=True)
class Disturbance:
    """What becomes of pictures and instructions. Plain values only.

    Example: Disturbance(noise=0.3, wordings=("please {instruction}",))
    """

    brightness: float = 0.0
    """-1 makes pictures black, 0 leaves them, 1 doubles them; what is above 255 is 255."""
    texture: float = 0.0
    """0..1: the share of patches of random colours, eight on a side, that are mixed into each picture, drawn anew for
    each."""
    noise: float = 0.0
    """0..1: as `texture`, of pixels of random colours."""
    shift: int = 0
    """Pixels by which the pictures of an episode are moved, at most, along each side; the edge fills what is left
    over."""
    wordings: tuple[str, ...] = ()
    """Other words, with {instruction} where its own stand; an episode has one of them. None: its own."""
    paraphrases: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Instruction -> the sentences of which an episode has one in its place; before any wording."""

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
        """What of an observation it would change and does not find, in words; None: nothing."""
        if self.changes_pictures and not any(name.startswith(PICTURE) for name in fields):
            return "pictures"
        return "an instruction" if self.changes_words and INSTRUCTION not in fields else None

    def picture(self, picture: np.ndarray, seed: int, time: int, camera: int) -> np.ndarray:
        """[H, W, C] uint8 as it is shown.

        Args:
            seed: of the episode.
            time: actions done in it.
            camera: its place among the environment's.
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
        """The instruction of an episode as it is given."""
        choices = self._choices(instruction)
        return choices[np.random.default_rng([seed]).integers(len(choices))]

    def fields(self, fields: Mapping[str, FieldSpec]) -> dict[str, FieldSpec]:
        """The fields as they are shown: an instruction that is known says all that it may be given as, the longest
        first, so that what a policy has no room for is told by the worst of them."""
        specs = dict(fields)
        if INSTRUCTION in fields and self.changes_words:
            texts = {choice for text in fields[INSTRUCTION].texts for choice in self._choices(text)}
            in_order = sorted(texts, key=lambda text: (-len(text.encode()), text))
            specs[INSTRUCTION] = replace(fields[INSTRUCTION], texts=tuple(in_order))
        return specs

    def _choices(self, instruction: str) -> tuple[str, ...]:
        """All that an instruction may be given as."""
        for sentence, others in self.paraphrases:
            if sentence == instruction:
                return others
        return tuple(wording.replace("{instruction}", instruction) for wording in self.wordings) or (instruction,)
