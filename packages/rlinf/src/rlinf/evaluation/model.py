"""The model of an evaluation: found, checked, and recognised when the evaluation is resumed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlinf.config.inputs import check_model_folder, is_adapter
from rlinf.errors import UserError
from rlinf.jobs.models import check_end_tokens, code_notes
from rlinf.run_folder.adapters import check_adapter
from rlinf.run_folder.checkpoints import CHECKPOINTS, MODEL, checkpoint_steps, is_checkpoint, refuse_damaged_model
from rlinf.run_folder.fingerprints import model_fingerprint
from rlinf.tasks.language import load_checkpoint_tokenizer, max_positions


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluatedModel:
    """A model folder that is whole."""

    folder: Path
    tokenizer: Any
    max_positions: int | None
    """Tokens of prompt and completion together that the model was made for; None where its config does not say."""
    notes: tuple[str, ...]
    """What a reader of the scores must know."""
    fingerprint: str
    """Changes with the weights, the tokenizer or the config."""


def load_model(path: Path) -> EvaluatedModel:
    """The model behind a path; its weights are only looked at.

    Args:
        path: a model folder, a checkpoint of a run, or a run's folder, of which the newest checkpoint is taken. An
            adapter among them stands for the model that it makes of its base.
    Raises: UserError.
    """
    folder = model_folder(path)
    if is_adapter(folder):
        check_adapter(folder, key="model")
    else:
        check_model_folder(folder, key="model")
    tokenizer = load_checkpoint_tokenizer(folder, key="model")
    return EvaluatedModel(
        folder=folder,
        tokenizer=tokenizer,
        max_positions=max_positions(folder),
        notes=(*code_notes(folder, "model"), *check_end_tokens(folder, tokenizer, "model")),
        fingerprint=model_fingerprint(folder),
    )


def model_folder(path: Path) -> Path:
    """The model folder that a path means. Raises: UserError for a run without a checkpoint and for a damaged one."""
    if (path / "config.json").is_file():
        folder = path
    elif is_checkpoint(path):
        folder = path / MODEL
    elif (path / CHECKPOINTS).is_dir():
        steps = checkpoint_steps(path / CHECKPOINTS)
        if not steps:
            raise UserError(f"model={path}: the run has no checkpoint yet", hint="let it run on, or --resume it")
        folder = steps[-1][1] / MODEL
    else:
        return path
    refuse_damaged_model(folder, key="model")
    return folder


def run_folder(model: Path) -> Path | None:
    """The run that wrote a model folder, `run/checkpoints/step-000100/model`; None for a model that is in no run."""
    checkpoints = model.resolve().parent.parent
    is_in_run = checkpoints.name == CHECKPOINTS and (checkpoints.parent / "config.yaml").is_file()
    return checkpoints.parent if is_in_run else None
