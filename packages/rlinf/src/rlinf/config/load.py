"""From a recipe and overrides to a checked config."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from rlinf.config import messages
from rlinf.config.base import Section
from rlinf.config.catalog import read_recipe
from rlinf.config.evaluation import RESUMABLE as EVAL_RESUMABLE
from rlinf.config.evaluation import EvalConfig
from rlinf.config.overrides import Override, apply_overrides
from rlinf.config.schema import JOBS, Config
from rlinf.config.yaml_source import Tree, describe, dump, parse_file
from rlinf.errors import UserError

RESUMABLE = ("run", "mode", "plan", "cluster")
"""What may change when a run is resumed: its length, and where it runs, on which no number depends."""

S = TypeVar("S", bound=Section)

MAX_LISTED = 10
"""Mistakes in one message, so that it fits on a screen."""


def load_config(recipe: str, overrides: Sequence[Override] = ()) -> Config:
    """The config of a recipe with overrides.

    Args:
        recipe: a shipped recipe's name or the path of a YAML file.
        overrides: in their order; later ones win.

    Raises: UserError that lists everything that is wrong, each with file and line, or the override's flag.
    """
    return validated(apply_overrides(read_recipe(recipe), overrides))


def load_eval(file: Path | None, overrides: Sequence[Override]) -> EvalConfig:
    """The config of an evaluation: a YAML file's keys, if there is one, and overrides.

    Raises: as `load_config`.
    """
    tree = Tree(values={}) if file is None else _read_tree(file)
    return _validate_as(EvalConfig, apply_overrides(tree, overrides))


def load_eval_for_resume(folder: Path, overrides: Sequence[Override]) -> EvalConfig:
    """The config that an evaluation was started with; overrides may only change what moves no number.

    Raises: UserError for a folder without config.yaml, and for an override that would change the numbers.
    """
    stored = _stored(folder, "evaluation")
    before = _validate_as(EvalConfig, stored)
    after = _validate_as(EvalConfig, apply_overrides(stored, overrides))
    _refuse_changes(
        before,
        after,
        EVAL_RESUMABLE,
        title="a resumed evaluation goes on with the settings it was started with",
        hint=f"only {', '.join(EVAL_RESUMABLE)} may change; for anything else choose a new --output folder",
    )
    return after


def load_for_resume(folder: Path, overrides: Sequence[Override] = ()) -> Config:
    """The config that a run folder was started with; overrides may only change what is `RESUMABLE`.

    Raises: UserError for a folder without config.yaml, and for an override that would change the run's numbers.
    """
    stored = _stored(folder, "run")
    before = validated(stored)
    after = validated(apply_overrides(stored, overrides))
    _refuse_changes(
        before,
        after,
        RESUMABLE,
        title="a resumed run goes on with the config it was started with",
        hint="only the mode and keys of run, plan and cluster may change (run.num_steps, run.max_minutes, ...); "
        "for anything else start a new run",
    )
    return after


def to_yaml(config: Section) -> str:
    """The resolved config as YAML; every default written out."""
    return dump(config.model_dump(mode="json"))


def validated(tree: Tree) -> Config:
    """The config that a tree holds. Raises: UserError with every mistake; its cause is pydantic's error."""
    model = JOBS.get(job) if isinstance(job := tree.values.get("job"), str) else None
    if model is None:
        wrong = messages.missing(("job",), tree) if job is None else messages.unknown_value("job", tree, list(JOBS))
        raise UserError(wrong, hint=f"job says which training program runs: {' or '.join(JOBS)}")
    return _validate_as(model, tree)


def _validate_as(model: type[S], tree: Tree) -> S:
    try:
        # JSON mode: lists count as tuples and text as paths, and nothing else is converted.
        return model.model_validate_json(json.dumps(tree.values, default=str))
    except ValidationError as error:
        raise UserError(_listed("the config has {} mistakes", messages.explain(error, tree, model))) from error


def _read_tree(file: Path) -> Tree:
    try:
        return parse_file(file.read_text(encoding="utf-8"), str(file))
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: not UTF-8 text: {error.reason} at byte {error.start}") from error
    except OSError as error:
        raise UserError(f"{file}: {error.strerror or error}") from error


def _stored(folder: Path, what: str) -> Tree:
    """The config in a folder to resume."""
    file = folder / "config.yaml"
    if not file.is_file():
        missing = "the folder holds no config.yaml" if folder.is_dir() else "there is no such folder"
        raise UserError(
            f"--output={folder}: nothing to resume, {missing}", hint=f"give the folder of an earlier {what}"
        )
    return _read_tree(file)


def _refuse_changes(before: Section, after: Section, allowed: Sequence[str], *, title: str, hint: str) -> None:
    """`allowed` are keys of the root: they and what is below them may differ."""
    changed = _differences(before.model_dump(mode="json"), after.model_dump(mode="json"))
    refused = [
        f"--{key} would change {key} from {describe(old)} to {describe(new)}"
        for key, (old, new) in changed.items()
        if key.partition(".")[0] not in allowed
    ]
    if refused:
        raise UserError(_listed(title, refused), hint=hint)


def _listed(title: str, lines: Sequence[str]) -> str:
    if len(lines) == 1 and "{}" in title:
        return lines[0]
    shown = list(lines[:MAX_LISTED])
    if len(lines) > MAX_LISTED:
        shown.append(f"and {len(lines) - MAX_LISTED} more")
    return title.format(len(lines)) + ":\n  - " + "\n  - ".join(shown)


def _differences(old: Any, new: Any, key: str = "") -> dict[str, tuple[Any, Any]]:
    """Dotted key -> (old, new) of the values that are not equal."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return {} if old == new else {key: (old, new)}
    found: dict[str, tuple[Any, Any]] = {}
    for name in [*old, *(name for name in new if name not in old)]:
        found |= _differences(old.get(name), new.get(name), f"{key}.{name}" if key else name)
    return found
