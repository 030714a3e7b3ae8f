"""The checkpoint of a robot policy: found, looked at, and with what it acted in."""

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
    """A checkpoint that is whole, and where its policy is to act."""

    checkpoint: Path
    step: int
    """Training steps behind it."""
    config: TrainedConfig

    @property
    def model(self) -> Path:
        """The folder with its weights."""
        return self.checkpoint / MODEL


def find_policy(path: Path, which: str | None, overrides: Sequence[Override]) -> TrainedPolicy:
    """The policy that a command line means.

    Args:
        path: a run's folder or one of its checkpoints.
        which: as `find_checkpoint`.
        overrides: of keys of `TrainedConfig`.

    Raises: UserError where there is no such checkpoint, it is damaged or a language model's, or its run's config is not
        beside it.
    """
    checkpoint = find_checkpoint(path, which)
    return trained_policy(checkpoint, load_trained(checkpoint.parent.parent, overrides))


def trained_policy(checkpoint: Path, config: TrainedConfig) -> TrainedPolicy:
    """Raises: UserError for a checkpoint that is not there or damaged."""
    check_whole(checkpoint)
    return TrainedPolicy(checkpoint=checkpoint, step=int(read_state(checkpoint)["step"]), config=config)
