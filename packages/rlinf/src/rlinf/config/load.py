"""Loads configs: merges a recipe with overrides and validates the result."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from rlinf.config.base import Section
from rlinf.config.catalog import read_recipe, read_suite
from rlinf.config.common import JobConfig
from rlinf.config.comparison import SIDES, ComparisonConfig
from rlinf.config.evaluation import RESUMABLE as EVAL_RESUMABLE, EvalConfig
from rlinf.config.messages import explain
from rlinf.config.overrides import Override, apply_overrides
from rlinf.config.playing import FROM_RUN, ROLES, TrainedConfig
from rlinf.config.renamed import renamed_tree
from rlinf.config.robot_check import RobotCheckConfig
from rlinf.config.schema import Shipped
from rlinf.config.suites import RESUMABLE as SUITE_RESUMABLE, SuiteEvalConfig
from rlinf.config.yaml_source import Tree, describe, dump, read_file
from rlinf.errors import UserError
from rlinf.hub import public_name
from rlinf.jobs.spec import job_spec, named_job
from rlinf_envs import EXPERTS

RESUMABLE = ("run", "mode", "plan", "cluster", "venvs")
"""Keys that may change when a run is resumed, besides those in its job's spec: length, placement (which changes no
number) and venvs."""

MAX_LISTED = 10
"""Maximum number of errors in one message, so that it fits on a screen."""


def config_type(values: Mapping[str, Any], overrides: Sequence[Override] = ()) -> Any:
    """Returns the config model of the custom job named in `values`, or the union of the shipped ones.

    Args:
        values: the recipe's values.
        overrides: applied on top.

    Raises: UserError for a custom job that does not exist.
    """
    job = next((one.text for one in reversed(overrides) if one.key == ("job",)), values.get("job"))
    return named_job(job).config_model() if isinstance(job, str) and ":" in job else Shipped


def load_config(recipe: str, overrides: Sequence[Override] = ()) -> JobConfig:
    """Returns the config of a recipe with overrides.

    Args:
        recipe: a shipped recipe's name or the path of a YAML file.
        overrides: applied in order; later ones win.

    Raises: UserError that lists all errors, each with file and line or the override's flag.
    """
    tree = read_recipe(recipe)
    kind = config_type(tree.values, overrides)
    return _validated_as(kind, apply_overrides(tree, overrides, kind))


def load_eval(file: Path | None, overrides: Sequence[Override]) -> EvalConfig:
    """Returns the config of an evaluation from an optional YAML file and overrides.

    Raises: as `load_config`.
    """
    tree = Tree(values={}) if file is None else renamed_tree(read_file(file))
    return _validated_as(EvalConfig, apply_overrides(tree, overrides, EvalConfig))


def load_eval_for_resume(folder: Path, overrides: Sequence[Override]) -> EvalConfig:
    """`load_for_resume` for the folder of an evaluation."""
    return _resumed(EvalConfig, folder, overrides, "evaluation", EVAL_RESUMABLE)


def load_trained(folder: Path, overrides: Sequence[Override] = ()) -> TrainedConfig:
    """Returns the config for using the trained policy of a run, with overrides.

    Args:
        folder: the run's folder.

    Raises: UserError for a folder without config.yaml, for a run of a language model, and as `load_config`.
    """
    stored = renamed_tree(_config_file(folder))
    _check_acts(stored, str(folder))
    return _validated_as(TrainedConfig, apply_overrides(_acting(stored), overrides, TrainedConfig))


def load_acting(place: str, checkpoint: Path | None, overrides: Sequence[Override] = ()) -> TrainedConfig:
    """Returns the config for using the policy of a run's checkpoint, or of a recipe with a published checkpoint.

    Args:
        place: a recipe, if there is no checkpoint.
        checkpoint: path of a checkpoint in its run's folder.

    Raises: as `load_trained`; UserError for a recipe without `policy.options.folder`.
    """
    return _with_weights(place, checkpoint, apply_overrides(_policy_tree(place, checkpoint), overrides, TrainedConfig))


def load_robot_check(
    place: str, checkpoint: Path | None, demonstrations: Mapping[str, Any], overrides: Sequence[Override]
) -> RobotCheckConfig:
    """Returns the config for checking the conventions of a robot policy.

    Args:
        place: a recipe, if there is no checkpoint.
        checkpoint: path of a checkpoint in its run's folder.
        demonstrations: values of the section `demonstrations` that the command line has options for; without any, those
            of the recipe's or the run's `sft_warm_up`, else the environment's experts.

    Raises: as `load_trained`; UserError if no demonstrations are named.
    """
    whole = _whole_tree(place, checkpoint)
    acting = _acting(whole)
    values = dict(demonstrations) or _of_warm_up(whole.values.get("sft_warm_up")) or {"source": EXPERTS}
    tree = Tree(values={**acting.values, "demonstrations": values}, places=acting.places, notes=acting.notes)
    return _validated_as(RobotCheckConfig, apply_overrides(tree, overrides, RobotCheckConfig))


def _of_warm_up(section: Any) -> dict[str, Any]:
    names = ("source", "path", "rename")
    return {name: section[name] for name in names if name in section} if isinstance(section, dict) else {}


def load_suite_eval(place: str, checkpoint: Path | None, suite: str, overrides: Sequence[Override]) -> SuiteEvalConfig:
    """Returns the config of a suite evaluation.

    Args:
        place, checkpoint: as `load_acting`.
        suite: a shipped suite's name or the path of a YAML file.

    Raises: as `load_acting`.
    """
    acting, suite_tree = _policy_tree(place, checkpoint), read_suite(suite)
    places = dict(acting.places) | {("suite", *key): at for key, at in suite_tree.places.items()}
    values = {**acting.values, "checkpoint": _text(checkpoint), "suite": suite_tree.values}
    tree = Tree(values=values, places=places, notes=(*acting.notes, *suite_tree.notes))
    return _with_weights(place, checkpoint, apply_overrides(tree, overrides, SuiteEvalConfig), SuiteEvalConfig)


def load_suite_eval_for_resume(folder: Path, overrides: Sequence[Override]) -> SuiteEvalConfig:
    """`load_for_resume` for the folder of a suite evaluation."""
    return _resumed(SuiteEvalConfig, folder, overrides, "evaluation", SUITE_RESUMABLE)


def load_comparison(
    policies: Sequence[tuple[str, Path | None]],
    overrides: Sequence[Override],
    preset: Callable[[TrainedConfig], Sequence[Override]] = lambda config: (),
) -> ComparisonConfig:
    """Returns the config of a comparison.

    Args:
        policies: place and checkpoint of A and of B, as `load_acting`.
        overrides: `compare.KEY` hold for the comparison, `a.KEY` and `b.KEY` for one policy, all others for both.
        preset: overrides for the config of a policy, to which the others are added.

    Raises: as `load_acting`.
    """
    common = [one for one in overrides if one.key[0] not in ("compare", *SIDES)]
    tree = Tree(values={})
    for side, (place, checkpoint) in zip(SIDES, policies, strict=True):
        own = [replace(one, section=side, key=one.key[1:]) for one in overrides if one.key[0] == side and one.key[1:]]
        acting = _policy_tree(place, checkpoint)
        config = _with_weights(place, checkpoint, apply_overrides(acting, [*common, *own], TrainedConfig))
        added = list(preset(config))
        of_compare = [one for one in added if one.key[0] == "compare"]
        of_policy = [one for one in added if one.key[0] != "compare"]
        acting = apply_overrides(acting, [*of_policy, *common, *own], TrainedConfig)
        _with_weights(place, checkpoint, acting)
        values = {**tree.values, side: {**acting.values, "checkpoint": _text(checkpoint)}}
        places = dict(tree.places) | {(side, *key): at for key, at in acting.places.items()}
        notes = (*tree.notes, *(note for note in acting.notes if note not in tree.notes))
        tree = apply_overrides(Tree(values=values, places=places, notes=notes), of_compare, ComparisonConfig)
    own = [one for one in overrides if one.key[0] == "compare" or one.key in [(side,) for side in SIDES]]
    return _validated_as(ComparisonConfig, apply_overrides(tree, own, ComparisonConfig))


def load_comparison_for_resume(folder: Path) -> ComparisonConfig:
    """Returns the config of a comparison that a folder was started with."""
    return _validated_as(ComparisonConfig, _stored(folder, "comparison"))


def _policy_tree(place: str, checkpoint: Path | None) -> Tree:
    """Reads the keys that `TrainedConfig` has, of a run's config or of a recipe. Raises: UserError."""
    return _acting(_whole_tree(place, checkpoint))


def _whole_tree(place: str, checkpoint: Path | None) -> Tree:
    run = None if checkpoint is None else checkpoint.parent.parent
    whole = read_recipe(place) if run is None else renamed_tree(_config_file(run))
    _check_acts(whole, str(run or place))
    return whole


def _with_weights(place: str, checkpoint: Path | None, tree: Tree, kind: type[TrainedConfig] = TrainedConfig) -> Any:
    """Returns the config of a policy that has weights. Raises: UserError."""
    config = _validated_as(kind, tree)
    is_published = config.policy.options.get("folder") is not None and not config.policy.spec.off_policy  # as for DSRL
    if checkpoint is None and not is_published:
        raise UserError(
            f"{place}: the policy has random weights",
            hint="give the folder of a run, or a published checkpoint with --policy.options.folder",
        )
    return config


def _text(checkpoint: Path | None) -> str | None:
    return None if checkpoint is None else str(checkpoint)


def _config_file(folder: Path) -> Tree:
    file = folder / "config.yaml"
    if not file.is_file():
        raise UserError(
            f"{file} is not there, which says what the policy acted in", hint="copy the whole folder of the run"
        )
    return read_file(file)


def _check_acts(stored: Tree, place: str) -> None:
    job = stored.values.get("job")
    if not (isinstance(job, str) and named_job(job).acts):
        raise UserError(
            f"{place} is a run of job={job}; only a robot's policy acts in an environment",
            hint=f"a language model answers problems: rlinf eval NAME=FILE --model {place}",
        )


def _acting(stored: Tree) -> Tree:
    """The keys of a config that `TrainedConfig` has."""
    values = {key: stored.values[key] for key in FROM_RUN if key in stored.values}
    values["venvs"] = {role: python for role, python in values.get("venvs", {}).items() if role in ROLES}
    return Tree(values=values, places=stored.places, notes=stored.notes)


def load_for_resume(folder: Path, overrides: Sequence[Override] = ()) -> JobConfig:
    """Returns the config that a run folder was started with; overrides may only change `RESUMABLE` keys.

    Raises: UserError for a folder without config.yaml, and for an override that would change the run's numbers.
    """
    stored = _stored(folder, "run")
    kind = config_type(stored.values, overrides)
    before = _validated_as(kind, stored)
    return _overridden(before, stored, overrides, "run", (*RESUMABLE, *job_spec(before).resumable))


def to_yaml(config: Section) -> str:
    """Returns the resolved config as YAML, including all defaults. Models from the Hub are ORG/NAME@COMMIT, so that a
    run can be resumed on a machine with another cache."""
    return dump(_with_public_names(config.model_dump(mode="json")))


def _with_public_names(node: Any) -> Any:
    if isinstance(node, dict):
        return {name: _with_public_names(value) for name, value in node.items()}
    if isinstance(node, list):
        return [_with_public_names(value) for value in node]
    return (public_name(Path(node)) or node) if isinstance(node, str) and "/snapshots/" in node else node


def validated(tree: Tree) -> JobConfig:
    """Validates a tree. Raises: UserError with all errors; its cause is pydantic's error."""
    return _validated_as(config_type(tree.values), tree)


def _validated_as(kind: Any, tree: Tree) -> Any:
    """Validates a tree as `kind`, a section or a discriminated union of sections."""
    try:
        # JSON mode converts lists to tuples and text to paths, and nothing else.
        config = TypeAdapter(kind).validate_json(json.dumps(tree.values, default=str))
    except ValidationError as error:
        raise UserError(_listed("the config has {} mistakes", explain(error, tree, kind))) from error
    return config.with_notes(tree.notes)


def _resumed(kind: Any, folder: Path, overrides: Sequence[Override], what: str, allowed: Sequence[str]) -> Any:
    """Returns the config in a folder; only the keys `allowed`, and keys below them, may be overridden."""
    stored = _stored(folder, what)
    return _overridden(_validated_as(kind, stored), stored, overrides, what, allowed)


def _stored(folder: Path, what: str) -> Tree:
    """Reads a folder's config.yaml. Raises: UserError if there is none."""
    file = folder / "config.yaml"
    if not file.is_file():
        missing = "the folder holds no config.yaml" if folder.is_dir() else "there is no such folder"
        raise UserError(
            f"--output={folder}: nothing to resume, {missing}", hint=f"give the folder of an earlier {what}"
        )
    return renamed_tree(read_file(file))


def _overridden(before: Section, stored: Tree, overrides: Sequence[Override], what: str, allowed: Sequence[str]) -> Any:
    """Returns the stored config with overrides. Raises: UserError for an override that is not allowed."""
    kind = type(before)
    after = _validated_as(kind, apply_overrides(stored, overrides, kind))
    changed = differences(before.model_dump(mode="json"), after.model_dump(mode="json"))
    refused = [
        f"--{key} would change {key} from {describe(old)} to {describe(new)}"
        for key, (old, new) in changed.items()
        if not f"{key}.".startswith(tuple(f"{root}." for root in allowed))
    ]
    if refused:
        there = [key for key in allowed if key.partition(".")[0] in type(before).model_fields]
        raise UserError(
            _listed(f"a resumed {what} goes on with the config it was started with", refused),
            hint=f"only {', '.join(there)} and keys below them may change; for anything else start a new {what} in "
            "another folder",
        )
    return after


def _listed(title: str, lines: Sequence[str]) -> str:
    if len(lines) == 1 and "{}" in title:
        return lines[0]
    bullets = list(lines[:MAX_LISTED])
    if len(lines) > MAX_LISTED:
        bullets.append(f"and {len(lines) - MAX_LISTED} more")
    return title.format(len(lines)) + ":\n  - " + "\n  - ".join(bullets)


def differences(old: Any, new: Any, key: str = "") -> dict[str, tuple[Any, Any]]:
    """Returns dotted key -> (old, new) for the values that differ."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return {} if old == new else {key: (old, new)}
    changed: dict[str, tuple[Any, Any]] = {}
    for name in [*old, *(name for name in new if name not in old)]:
        changed |= differences(old.get(name), new.get(name), f"{key}.{name}" if key else name)
    return changed
