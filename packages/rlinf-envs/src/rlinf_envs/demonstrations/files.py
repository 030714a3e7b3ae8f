"""Files of demonstrations: the one way in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rlinf_envs.core.kind_spec import KindSpec, loaded
from rlinf_envs.demonstrations.base import DemonstrationFiles, RunEnvironment
from rlinf_envs.demonstrations.sources import readers
from rlinf_envs.errors import EnvError


def open_demonstrations(
    source: str,
    path: str | Path,
    *,
    rename: Mapping[str, str] | None = None,
    environment: RunEnvironment | None = None,
    kind: KindSpec | None = None,
) -> DemonstrationFiles:
    """The successful episodes of files or folders, each read when it is asked for.

    Args:
        source: a layout.
        rename: name in the files -> field of a demonstration, for what the reader would call otherwise.
        environment: that they are for; None: its own defaults.
        kind: its kind, which may have layouts of its own; None: those of all shipped kinds are read.

    Raises: EnvError for an unknown layout, a path that is not there or holds something else, no successful episode,
        and a package that is missing.
    """
    layouts = readers(kind)
    if source not in layouts:
        raise EnvError(f"there are no demonstrations of source {source!r}; there are {', '.join(layouts)}")
    if not Path(path).exists():
        raise EnvError(f"{path} does not exist")
    files = loaded(layouts[source])(Path(path), rename or {}, environment or RunEnvironment())
    if not len(files):
        raise EnvError(f"{path} has no successful episode")
    return files
