"""The model of an evaluation: finds, checks and fingerprints it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlinf.config.inputs import check_model_folder, is_adapter
from rlinf.errors import UserError
from rlinf.jobs.models import check_end_tokens, code_notes
from rlinf.run_folder.adapters import check_adapter
from rlinf.run_folder.checkpoints import (
    CHECKPOINTS,
    MODEL,
    checkpoint_of,
    checkpoint_steps,
    is_checkpoint,
    refuse_damaged_model,
)
from rlinf.run_folder.fingerprints import model_fingerprint
from rlinf.tasks.language import load_checkpoint_tokenizer, max_positions


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluatedModel:
    """A complete model folder."""

    folder: Path
    tokenizer: Any
    max_positions: int | None
    """Maximum sequence length of the model (prompt and completion); None if its config does not define one."""
    notes: tuple[str, ...]
    """Notes for the user about the scores."""
    fingerprint: str
    """Digest of weights, tokenizer and config."""


def load_model(path: Path) -> EvaluatedModel:
    """Finds and checks the model of a path, without loading its weights.

    Args:
        path: a model folder, a checkpoint of a run, or a run's folder, whose newest checkpoint is used. An adapter
            stands for its base model merged with it.
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
    """Returns the model folder of a path. Raises: UserError for a run without a checkpoint and for a damaged one."""
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
    """Returns the run that wrote a model folder, `run/checkpoints/step-000100/model`; None for other models."""
    checkpoint = checkpoint_of(model.resolve())
    if checkpoint is None or checkpoint.parent.name != CHECKPOINTS:
        return None
    run = checkpoint.parent.parent
    return run if (run / "config.yaml").is_file() else None
