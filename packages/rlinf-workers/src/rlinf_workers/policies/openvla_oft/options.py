"""Options of OpenVLA-OFT in a recipe, checked before any process starts."""

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
    """Options of the policy; docs/policies/openvla-oft.md gives their sources."""

    cameras: str | None = None
    """Names of cameras in the checkpoint's order, separated by commas; None: all cameras of the environment."""
    chunk_size: int = 8
    """K, the number of actions in an answer."""
    head: str | None = None
    """`tokens`: 256 bins for each number, for reinforcement learning; `l1`: the numbers themselves. None: `l1` if the
    checkpoint has a file `action_head--*_checkpoint.pt`, whose tokens were not trained; else `tokens`."""
    proprio: bool | None = None
    """Whether the robot's state is an input; None: if the checkpoint has a projector for it."""
    film: bool | None = None
    """Whether the instruction modulates the vision features (FiLM); None: if the checkpoint has such towers."""
    end_token: bool = True
    """Whether the end token follows the empty positions; false: as in the checkpoints that RLinf fine-tuned."""
    values: str = "chunk"
    """One value for the `chunk`, or one for each `action` in it."""
    spread: float = 0.1
    """`l1`: mean absolute difference between sampled and predicted actions, in a range of -1..1."""

    @classmethod
    def of(cls, raw_options: Mapping[str, Any]) -> OftOptions:
        """The options, with those that depend on the folder filled in.

        Raises: PolicyError for an unknown option or an invalid value.
        """
        options = options_of(cls, raw_options)
        if options.head is not None:
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
        return replace(options, head=options._head(), proprio=proprio, film=film)

    def _head(self) -> str:
        """Raises: PolicyError for `tokens` with a checkpoint that was fine-tuned with the L1 head."""
        continuous = self.folder is not None and bool(list(Path(self.folder).glob("action_head--*checkpoint.pt")))
        if continuous and self.head == "tokens":
            raise PolicyError(
                f"options.head=tokens: {self.folder} has a file action_head--*_checkpoint.pt, so it was fine-tuned "
                "with the L1 head, and its tokens mean nothing; use head: l1, or a checkpoint with the discrete head"
            )
        return self.head or ("l1" if continuous else "tokens")

    def part_files(self) -> dict[str, Path]:
        """Module -> its file, for modules outside the merged weights.

        Raises: PolicyError if a file is missing.
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
        """Size of the state that is an input; 0: there is none.

        Raises: PolicyError if the environment provides none.
        """
        if not self.proprio:
            return 0
        if "state" not in fields:
            raise PolicyError(f"options.proprio reads a 'state', but the environment has {', '.join(sorted(fields))}")
        check_state(fields)
        return fields["state"].shape[0]


NEEDED_FOR = {"vision_backbone": "options.film", "proprio_projector": "options.proprio", "action_head": "head: l1"}
