"""Finds and checks the robot policy that a command line names, and loads its config."""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlinf.config.catalog import SUFFIXES, shipped_recipes
from rlinf.config.load import load_acting
from rlinf.config.overrides import Override
from rlinf.config.playing import TrainedConfig
from rlinf.errors import UserError
from rlinf.hub import public_name
from rlinf.run_folder.checkpoints import MODEL, is_checkpoint, read_state
from rlinf.run_folder.checksums import SUMS, file_digest
from rlinf.run_folder.export import check_whole, find_checkpoint
from rlinf.run_folder.fingerprints import path_fingerprint
from rlinf_workers.policies import FOLDER_OPTIONS


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedPolicy:
    """A trained policy, and the config for using it."""

    checkpoint: Path | None
    """A complete checkpoint of a run; None: the policy has the published weights of `policy.options.folder`."""
    step: int
    """Number of training steps done in its run."""
    config: TrainedConfig

    @property
    def model(self) -> Path | None:
        """Folder with the weights of its checkpoint."""
        return None if self.checkpoint is None else self.checkpoint / MODEL

    @property
    def folder(self) -> Path:
        """Its checkpoint, or the folder of the published one."""
        return self.checkpoint or Path(str(self.config.policy.options["folder"]))

    @property
    def title(self) -> str:
        """Name of its config, and of its checkpoint."""
        return f"{self.config.name}, {public_name(self.folder) or self.folder.name}"

    def digest(self) -> str:
        """Returns the digest of the checkpoint's checksums, or the fingerprint of the published files."""
        if self.checkpoint is not None:
            return file_digest(self.checkpoint / SUMS)
        options = self.config.policy.options
        folders = [Path(str(options[name])) for name in FOLDER_OPTIONS if options.get(name) is not None]
        return "-".join(path_fingerprint(folder) for folder in folders)


def named_checkpoint(place: str, which: str | None) -> Path | None:
    """Returns the checkpoint that a command line names; None: it names a recipe.

    Args:
        place: a run's folder, one of its checkpoints, a shipped recipe, or the path of a YAML file.
        which: as `find_checkpoint`.

    Raises: UserError, also for the folder of a published checkpoint.
    """
    path, recipes = Path(place), shipped_recipes()
    is_misspelt = os.sep not in place and bool(difflib.get_close_matches(place, recipes, n=1, cutoff=0.5))
    is_missing = not path.exists() and (path.suffix in SUFFIXES or is_misspelt)
    if not (place in recipes or path.is_file() or is_missing):
        _refuse_published(path)
        return find_checkpoint(path, which)
    if which is not None:
        raise UserError(f"--checkpoint {which}: {place} is a recipe", hint="give the folder of a run")
    return None


def find_policy(place: str, which: str | None, overrides: Sequence[Override]) -> TrainedPolicy:
    """Returns the policy that a command line names.

    Args:
        place, which: as `named_checkpoint`. A recipe needs a published checkpoint in `policy.options.folder`.
        overrides: of keys of `TrainedConfig`.

    Raises: UserError if the checkpoint does not exist, is damaged or is a language model's, or its run's config is
        missing.
    """
    checkpoint = named_checkpoint(place, which)
    return trained_policy(checkpoint, load_acting(place, checkpoint, overrides))


def trained_policy(checkpoint: Path | None, config: TrainedConfig) -> TrainedPolicy:
    """Raises: UserError for a missing or damaged checkpoint."""
    if checkpoint is None:
        return TrainedPolicy(checkpoint=None, step=0, config=config)
    check_whole(checkpoint)
    return TrainedPolicy(checkpoint=checkpoint, step=int(read_state(checkpoint)["step"]), config=config)


def _refuse_published(path: Path) -> None:
    """Raises: UserError for the folder of a published checkpoint in place of a run's."""
    is_of_run = is_checkpoint(path) or is_checkpoint(path.parent) or (path / "manifest.json").is_file()
    if is_of_run or not ((path / "config.json").is_file() or any(path.glob("*.safetensors"))):
        return
    raise UserError(
        f"{path} is the folder of a published checkpoint, which does not say in which environment it acts",
        hint=f"give a recipe with its policy: libero-oft-grpo --policy.options.folder {path}, for example",
    )
