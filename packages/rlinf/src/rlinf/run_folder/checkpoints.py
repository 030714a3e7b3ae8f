"""Checkpoints of a run: complete or not there.

`checkpoints/step-000123/` holds what the workers saved and `state.json`, which lists every file with its size, so that
a copy that lost something is noticed. A checkpoint is written under another name, brought to the disk and renamed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlinf.run_folder.rows import sync_folder

STATE = "state.json"
PARTIAL_SUFFIX = ".partial"
_NAME = re.compile(r"step-(\d{6,})")


def checkpoint_steps(folder: Path) -> list[tuple[int, Path]]:
    """The complete checkpoints in a folder, oldest first."""
    if not folder.is_dir():
        return []
    matches = [(match, path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return sorted((int(match[1]), path) for match, path in matches if is_complete(path))


def is_complete(checkpoint: Path) -> bool:
    """Whether state.json is whole and every file it lists is there with its size."""
    try:
        files = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))["files"]
        return all((checkpoint / name).stat().st_size == size for name, size in files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


@contextmanager
def writing_checkpoint(folder: Path, step: int, state: Mapping[str, Any]) -> Iterator[Path]:
    """Yields a folder to write into; it becomes the checkpoint when the block ends, and goes when the block raises."""
    name = f"step-{step:06d}"
    final, partial = folder / name, folder / f".{name}{PARTIAL_SUFFIX}"
    assert not is_complete(final), f"{final} is there already"
    for leftover in (final, partial):
        if leftover.exists():
            shutil.rmtree(leftover)
    partial.mkdir(parents=True)
    try:
        yield partial
        sizes = {str(path.relative_to(partial)): path.stat().st_size for path in _files(partial)}
        # NaN stays NaN here, unlike in the rows: what is read back must be what was written.
        (partial / STATE).write_text(json.dumps({**state, "files": sizes}, indent=1), encoding="utf-8")
        _sync(partial)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    partial.rename(final)
    sync_folder(folder)


def prune(folder: Path, *, keep: int) -> None:
    """Deletes all but the newest `keep` complete checkpoints. A checkpoint being deleted does not count as one."""
    for _, path in checkpoint_steps(folder)[:-keep]:
        doomed = path.with_name(f".{path.name}{PARTIAL_SUFFIX}")
        path.rename(doomed)
        shutil.rmtree(doomed)


def remove_torn(folder: Path) -> list[str]:
    """Deletes checkpoints that are not complete, and what a killed run was writing. Returns their names."""
    if not folder.is_dir():
        return []
    complete = {path for _, path in checkpoint_steps(folder)}
    torn = [
        path
        for path in sorted(folder.iterdir())
        if path.is_dir() and path not in complete and (_NAME.fullmatch(path.name) or path.suffix == PARTIAL_SUFFIX)
    ]
    for path in torn:
        shutil.rmtree(path)
    return [path.name for path in torn]


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _sync(folder: Path) -> None:
    for path in _files(folder):
        with path.open("rb") as file:
            os.fsync(file.fileno())
    for path in (*folder.rglob("*"), folder):
        if path.is_dir():
            sync_folder(path)
