"""What a recipe may say about OpenVLA-OFT, checked before any process starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlinf_envs import FieldSpec
from rlinf_workers.policies.base import PolicyError
from rlinf_workers.policies.openvla.base import SharedOptions
from rlinf_workers.policies.openvla_oft.files import part_file
from rlinf_workers.policies.options import check_choice, options_of
from rlinf_workers.policies.state_statistics import check_state

HEADS = ("tokens", "l1")


@dataclass(frozen=True, kw_only=True, slots=True)
class OftOptions(SharedOptions):
    """Options of the policy; docs/policies/openvla-oft.md says where they come from."""

    cameras: str | None = None
    """Names of cameras in the checkpoint's order, with commas in between; None: all that the environment shows."""
    chunk_size: int = 8
    """K, actions of an answer."""
    head: str = "tokens"
    """`tokens`: 256 bins a number, for reinforcement learning; `l1`: the numbers themselves."""
    proprio: bool | None = None
    """Whether the robot's state is read; None: where the checkpoint has a projector for it."""
    film: bool | None = None
    """Whether the instruction modulates what the towers see; None: where the checkpoint has such towers."""
    center_crop: bool = False
    """Look at the middle 90 % of pictures, as checkpoints do that were fine-tuned on random crops."""
    values: str = "chunk"
    """Values of the `chunk`, or of each `action` in it."""
    spread: float = 0.1
    """`l1`: how far actions that are drawn lie from the predicted ones on average, in a range of -1..1."""

    @classmethod
    def of(cls, raw_options: Mapping[str, Any]) -> OftOptions:
        """Filled in where the folder decides.

        Raises: PolicyError for an option that is not there or has no such value.
        """
        options = options_of(cls, raw_options)
        check_choice("head", options.head, HEADS)
        check_choice("values", options.values, ("chunk", "action"))
        if options.chunk_size < 1:
            raise PolicyError(f"options.chunk_size={options.chunk_size} has to be at least 1")
        if not 0 < options.spread < float("inf"):
            raise PolicyError(f"options.spread={options.spread} has to be above 0")
        proprio, film = options.proprio, options.film
        if proprio is None:
            proprio = options.folder is not None and part_file(options.folder, "proprio_projector") is not None
        if film is None:
            film = options.folder is not None and part_file(options.folder, "vision_backbone") is not None
        return replace(options, proprio=proprio, film=film)

    def part_files(self) -> dict[str, Path]:
        """The file of each part that the model has beside the merged weights, by the part.

        Raises: PolicyError for one that is not there.
        """
        if self.folder is None:
            return {}
        parts = {
            "vision_backbone": bool(self.film),
            "proprio_projector": bool(self.proprio),
            "action_head": self.head == "l1",
        }
        files: dict[str, Path] = {}
        for part in (part for part, is_needed in parts.items() if is_needed):
            path = part_file(self.folder, part)
            if path is None:
                there = sorted(path.name for path in Path(self.folder).glob("*.pt"))
                raise PolicyError(
                    f"{self.folder} has no file {part}--*_checkpoint.pt, which {NEEDED_FOR[part]} needs; it has "
                    f"{', '.join(there) or 'no such files'}"
                )
            files[part] = path
        return files

    def state_size(self, fields: Mapping[str, FieldSpec]) -> int:
        """Numbers of the state that is read; 0: none is.

        Raises: PolicyError where the environment shows none.
        """
        if not self.proprio:
            return 0
        if "state" not in fields:
            raise PolicyError(f"options.proprio reads a 'state', and the environment shows {', '.join(sorted(fields))}")
        check_state(fields)
        return fields["state"].shape[0]


NEEDED_FOR = {"vision_backbone": "options.film", "proprio_projector": "options.proprio", "action_head": "head: l1"}
