"""The reference's models in a run's folder: the policy before the first step, and models that follow the policy."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from rlinf.config.reasoning import ReferenceConfig
from rlinf.run_folder.checkpoints import CHECKPOINTS, checkpoint_name, checkpoint_steps, writing_whole

if TYPE_CHECKING:
    from rlinf.loop.session import Session

REFERENCE_FOLDER = "reference_model"
REFERENCES = "reference_models"
"""Folder of a run with the references that followed the policy, by the step after which they did."""


def save_first_reference(session: Session, group: str) -> None:
    """Saves a worker group's model as the reference before the first step."""
    session.group(group).call("save_model", str(session.folder / REFERENCE_FOLDER))


def restore_reference(session: Session, step: int) -> None:
    """Loads the reference of a step: its newest update up to that step, or the model saved before the first step.
    Without either, the reference keeps the model that it started with."""
    followed = [path for number, path in checkpoint_steps(session.folder / REFERENCES) if number <= step]
    folder = followed[-1] if followed else session.folder / REFERENCE_FOLDER
    if folder.is_dir():
        session.group("reference").call("load_model", str(folder))


def follow_policy(session: Session, settings: ReferenceConfig, step: int) -> None:
    """Mixes the policy into the reference every `reference.sync_every` steps."""
    folder = session.folder / REFERENCES
    if settings.sync_every is None or step % settings.sync_every:
        return
    policy, mixed = folder / "policy", folder / checkpoint_name(step)
    for path in (policy, mixed):  # of a run that went back to an earlier checkpoint
        shutil.rmtree(path, ignore_errors=True)
    session.group("actor").call("save_model", str(policy))
    with writing_whole(mixed) as partial:
        session.group("reference").call("write_mixed", str(policy), str(partial), settings.sync_weight)
    shutil.rmtree(policy)
    restore_reference(session, step)
    oldest = min((number for number, _ in checkpoint_steps(session.folder / CHECKPOINTS)), default=0)
    needed = [path for number, path in checkpoint_steps(folder) if number <= oldest]
    for path in needed[:-1]:
        shutil.rmtree(path)
