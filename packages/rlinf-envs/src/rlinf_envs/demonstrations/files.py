"""Opens files of demonstrations."""

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
    """Returns the successful episodes of files or folders, read lazily.

    Args:
        source: the layout of the files.
        rename: name in the files -> field of a demonstration, where it differs from the reader's default.
        environment: the environment they are used for; None: the reader's defaults.
        kind: its kind, which may define further layouts; None: the layouts of all shipped kinds.

    Raises: EnvError for an unknown layout, a missing path or other content, no successful episode, and a missing
        package.
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
