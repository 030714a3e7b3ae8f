"""Checkpoints of a run, which are used only if they are complete.

`checkpoints/step-000123/` holds the workers' files, `state.json`, and `SHA256SUMS` over both. A checkpoint is written
under a temporary name, synced to disk and renamed. One that does not match its checksums is renamed to
`step-000123.bad`, never deleted and never read again. `checkpoints/best` links to the one with the best score.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlinf.errors import UserError
from rlinf.run_folder.checksums import STATE, SUMS, damage, write_checksums
from rlinf.run_folder.plain_files import not_plain, read_plain_json
from rlinf.run_folder.rows import sync

CHECKPOINTS = "checkpoints"
"""Folder with the checkpoints of a run."""
MODEL = "model"
"""Folder with the model in a checkpoint of a language model."""
POLICIES = "policies"
"""Folder with the further policies in a checkpoint; each has a folder with all that its trainer needs."""
BEST = "best"
BAD_SUFFIX = ".bad"
PARTIAL_SUFFIX = ".partial"
NONE: Mapping[str, str] = {}
_NAME = re.compile(r"step-(\d{6,})")


def checkpoint_steps(folder: Path) -> list[tuple[int, Path]]:
    """Returns the checkpoints in a folder, complete or not, oldest first."""
    if not folder.is_dir():
        return []
    matches = [(match, path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return sorted((int(match[1]), path) for match, path in matches)


def is_checkpoint(path: Path) -> bool:
    """Returns whether a folder is a checkpoint, by its name or its checksums."""
    return (path / SUMS).is_file() or _NAME.fullmatch(path.name) is not None


def policy_folder(policy: str | None) -> str:
    """The folder of a policy in a checkpoint: that of a further one, or the checkpoint itself for the first, None."""
    return "" if policy is None else f"{POLICIES}/{policy}"


def further_policies(checkpoint: Path) -> tuple[str, ...]:
    """The names of the further policies in a checkpoint."""
    folder = checkpoint / POLICIES
    return tuple(sorted(path.name for path in folder.iterdir())) if folder.is_dir() else ()


def checkpoint_of(model: Path) -> Path | None:
    """Returns the checkpoint that a model folder belongs to, as that of one of its policies; None: to none."""
    policy = model.parent
    checkpoint = policy.parent.parent if policy.parent.name == POLICIES else policy
    return checkpoint if model.name == MODEL and is_checkpoint(checkpoint) else None


def checkpoint_name(step: int) -> str:
    return f"step-{step:06d}"


@contextmanager
def writing_with_checksums(final: Path, state: Mapping[str, Any], digests: Mapping[str, str] = NONE) -> Iterator[Path]:
    """Yields a folder to write into; at the end of the block it gets state.json, checksums and its final name.

    Args:
        digests: file -> SHA-256, for files whose writers computed it; read at the end of the block.
    """
    assert not final.exists(), f"{final} is there already"
    with writing_whole(final) as partial:
        yield partial
        # NaN stays NaN here, unlike in the rows, so that values are read back unchanged.
        (partial / STATE).write_text(json.dumps(dict(state), indent=1), encoding="utf-8")
        write_checksums(partial, digests)


@contextmanager
def writing_whole(final: Path) -> Iterator[Path]:
    """Yields a folder to write into; at the end of the block it is synced to disk and renamed to `final`, which may be
    an empty folder. After an error it is removed."""
    partial = _partial(final)
    if partial.is_symlink():
        raise not_plain(partial, "is a symbolic link")
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    try:
        yield partial
        for path in (*partial.rglob("*"), partial):
            sync(path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    partial.rename(final)
    sync(final.parent)


def read_state(checkpoint: Path) -> dict[str, Any]:
    """Reads the state that `writing_with_checksums` wrote. Raises: UserError for an invalid file."""
    state = read_plain_json(checkpoint / STATE)
    if not isinstance(state, dict):
        raise UserError(f"{checkpoint / STATE} is not what a run writes; was it edited?")
    return state


def best_checkpoint(folder: Path) -> Path | None:
    """Returns the checkpoint with the best score, the newest of several; only those evaluated at their step count."""
    scored = [(merit, step, path) for step, path in checkpoint_steps(folder) if (merit := _merit(path)) is not None]
    return max(scored)[2] if scored else None


def _merit(checkpoint: Path) -> float | None:
    """Returns the score, negative where lower is better; or None, also if state.json is damaged, which is reported when
    the checkpoint is used."""
    try:
        state = read_state(checkpoint)
        score = state["own_score"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if not isinstance(score, float) or math.isnan(score):
        return None
    return -score if state.get("lower_is_better") else score


def point_to_best(folder: Path) -> bool:
    """Links `best` to the best checkpoint, or removes it if there is none. Returns False if the file system does not
    support symbolic links."""
    best = best_checkpoint(folder)
    if best is None:
        (folder / BEST).unlink(missing_ok=True)
        return True
    partial = _partial(folder / BEST)
    partial.unlink(missing_ok=True)
    try:
        partial.symlink_to(best.name)
    except OSError:
        return False
    partial.replace(folder / BEST)
    return True


def prune(folder: Path, *, keep: int) -> None:
    """Deletes all checkpoints but the newest `keep` and the best one. A partly deleted checkpoint does not count."""
    best = best_checkpoint(folder)
    for _, path in checkpoint_steps(folder)[:-keep]:
        if path != best:
            doomed = _partial(path)
            path.rename(doomed)
            shutil.rmtree(doomed)


def remove_partial(folder: Path) -> None:
    """Deletes what a killed run was writing or deleting at the time."""
    for path in folder.glob(f".*{PARTIAL_SUFFIX}"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def refuse_damaged_model(folder: Path, *, key: str) -> None:
    """Checks a model folder that belongs to a checkpoint; others are not checked.

    Args:
        key: config key of the folder.

    Raises: UserError if the checkpoint is damaged.
    """
    checkpoint = checkpoint_of(folder)
    if checkpoint is None:
        return
    problem = damage(checkpoint, under=f"{folder.relative_to(checkpoint)}/")
    if problem is not None:
        others = [path.name for _, path in checkpoint_steps(checkpoint.parent) if not path.samefile(checkpoint)]
        raise UserError(
            f"{key}={folder}: checkpoint {checkpoint.name} is damaged: {problem}",
            hint=f"use another one of the run ({', '.join(others) or 'it has none'}), or copy this one again",
        )


def set_aside_damaged(folder: Path) -> list[str]:
    """Sets damaged checkpoints aside, from the newest to the first complete one. Returns messages about them."""
    notes = []
    for _, path in reversed(checkpoint_steps(folder)):
        problem = damage(path)
        if problem is None:
            break
        now = _bad_name(path)
        path.rename(now)
        sync(folder)
        notes.append(f"checkpoint {path.name} is damaged ({problem}); it is set aside as {now.name}")
    return notes


def bad_checkpoints(folder: Path) -> list[str]:
    """Returns the names of checkpoints that were set aside."""
    return sorted(path.name for path in folder.glob(f"step-*{BAD_SUFFIX}*"))


def _bad_name(path: Path) -> Path:
    """Returns the first free name."""
    now, number = path.with_name(path.name + BAD_SUFFIX), 2
    while now.exists():
        now, number = path.with_name(f"{path.name}{BAD_SUFFIX}-{number}"), number + 1
    return now


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}{PARTIAL_SUFFIX}")
