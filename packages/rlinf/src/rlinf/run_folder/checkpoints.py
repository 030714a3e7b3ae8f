"""Checkpoints of a run: whole, or not used.

`checkpoints/step-000123/` holds what the workers saved, `state.json`, and `SHA256SUMS` over both. A checkpoint is
written under another name, brought to the disk and renamed. One that does not match its sums is set aside as
`step-000123.bad`, never deleted and never read from again. `checkpoints/best` points to the one with the best score.
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
"""Folder of a run with its checkpoints."""
MODEL = "model"
"""Folder of the model in a checkpoint of a language model."""
BEST = "best"
BAD_SUFFIX = ".bad"
PARTIAL_SUFFIX = ".partial"
NONE: Mapping[str, str] = {}
_NAME = re.compile(r"step-(\d{6,})")


def checkpoint_steps(folder: Path) -> list[tuple[int, Path]]:
    """The checkpoints in a folder, oldest first, whole or not."""
    if not folder.is_dir():
        return []
    matches = [(match, path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return sorted((int(match[1]), path) for match, path in matches)


def is_checkpoint(path: Path) -> bool:
    """Whether a folder is one by its name or its seal."""
    return (path / SUMS).is_file() or _NAME.fullmatch(path.name) is not None


def checkpoint_name(step: int) -> str:
    return f"step-{step:06d}"


@contextmanager
def writing_with_checksums(final: Path, state: Mapping[str, Any], digests: Mapping[str, str] = NONE) -> Iterator[Path]:
    """Yields a folder to write into; when the block ends it is there under its name, sealed, with state.json.

    Args:
        digests: file -> SHA-256, of those whose writers know it; looked at when the block ends.
    """
    assert not final.exists(), f"{final} is there already"
    with writing_whole(final) as partial:
        yield partial
        # NaN stays NaN here, unlike in the rows: what is read back must be what was written.
        (partial / STATE).write_text(json.dumps(dict(state), indent=1), encoding="utf-8")
        write_checksums(partial, digests)


@contextmanager
def writing_whole(final: Path) -> Iterator[Path]:
    """Yields a folder to write into; when the block ends it is brought to the disk and is there under its name, which
    may be that of an empty folder. After an error nothing is there."""
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
    """What `writing_with_checksums` was given. Raises: UserError for a file that is no such thing."""
    state = read_plain_json(checkpoint / STATE)
    if not isinstance(state, dict):
        raise UserError(f"{checkpoint / STATE} is not what a run writes; was it edited?")
    return state


def best_checkpoint(folder: Path) -> Path | None:
    """The checkpoint with the best score, the newest of several; one counts if it was evaluated at its step."""
    scored = [(score, step, path) for step, path in checkpoint_steps(folder) if (score := _own_score(path)) is not None]
    return max(scored)[2] if scored else None


def _own_score(checkpoint: Path) -> float | None:
    """None also where state.json is damaged, which whoever uses the checkpoint is told."""
    try:
        score = read_state(checkpoint)["own_score"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return score if isinstance(score, float) and not math.isnan(score) else None


def point_to_best(folder: Path) -> bool:
    """Lets `best` point to the best checkpoint, or go where there is none; False: the file system has no symbolic
    links."""
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
    """Deletes all but the newest `keep` checkpoints and the best one. A checkpoint being deleted does not count as
    one."""
    best = best_checkpoint(folder)
    for _, path in checkpoint_steps(folder)[:-keep]:
        if path != best:
            doomed = _partial(path)
            path.rename(doomed)
            shutil.rmtree(doomed)


def remove_partial(folder: Path) -> None:
    """Deletes what a killed run was writing or deleting."""
    for path in folder.glob(f".*{PARTIAL_SUFFIX}"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def refuse_damaged_model(folder: Path, *, key: str) -> None:
    """Does nothing for a model folder that is not in a checkpoint.

    Args:
        key: what the config calls the folder.

    Raises: UserError for one in a damaged checkpoint.
    """
    checkpoint = folder.parent
    if folder.name != MODEL or not is_checkpoint(checkpoint):
        return
    problem = damage(checkpoint, under=f"{MODEL}/")
    if problem is not None:
        others = [path.name for _, path in checkpoint_steps(checkpoint.parent) if not path.samefile(checkpoint)]
        raise UserError(
            f"{key}={folder}: checkpoint {checkpoint.name} is damaged: {problem}",
            hint=f"use another one of the run ({', '.join(others) or 'it has none'}), or copy this one again",
        )


def set_aside_damaged(folder: Path) -> list[str]:
    """Sets damaged checkpoints aside, from the newest to the first that is whole. Returns what it did, for people."""
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
    """Names of those that were set aside."""
    return sorted(path.name for path in folder.glob(f"step-*{BAD_SUFFIX}*"))


def _bad_name(path: Path) -> Path:
    """The first name that is free."""
    now, number = path.with_name(path.name + BAD_SUFFIX), 2
    while now.exists():
        now, number = path.with_name(f"{path.name}{BAD_SUFFIX}-{number}"), number + 1
    return now


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}{PARTIAL_SUFFIX}")
