"""Finds and checks the checkpoint of a robot policy, and loads its config."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlinf.config.load import load_trained
from rlinf.config.overrides import Override
from rlinf.config.playing import TrainedConfig
from rlinf.run_folder.checkpoints import MODEL, read_state
from rlinf.run_folder.export import check_whole, find_checkpoint


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedPolicy:
    """A complete checkpoint, and the config for using its policy."""

    checkpoint: Path
    step: int
    """Number of training steps done."""
    config: TrainedConfig

    @property
    def model(self) -> Path:
        """Folder with its weights."""
        return self.checkpoint / MODEL


def find_policy(path: Path, which: str | None, overrides: Sequence[Override]) -> TrainedPolicy:
    """Returns the policy that a command line names.

    Args:
        path: a run's folder or one of its checkpoints.
        which: as `find_checkpoint`.
        overrides: of keys of `TrainedConfig`.

    Raises: UserError if the checkpoint does not exist, is damaged or is a language model's, or its run's config is
        missing.
    """
    checkpoint = find_checkpoint(path, which)
    return trained_policy(checkpoint, load_trained(checkpoint.parent.parent, overrides))


def trained_policy(checkpoint: Path, config: TrainedConfig) -> TrainedPolicy:
    """Raises: UserError for a missing or damaged checkpoint."""
    check_whole(checkpoint)
    return TrainedPolicy(checkpoint=checkpoint, step=int(read_state(checkpoint)["step"]), config=config)
