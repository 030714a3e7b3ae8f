"""Files of demonstrations: which layouts are read, and the one way in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from rlinf_envs.demonstrations.base import DemonstrationFiles, RunEnvironment
from rlinf_envs.errors import EnvError


def open_demonstrations(
    source: str,
    path: str | Path,
    *,
    rename: Mapping[str, str] | None = None,
    environment: RunEnvironment | None = None,
) -> DemonstrationFiles:
    """The successful episodes of files or folders, each read when it is asked for.

    Args:
        source: a layout, one of `SOURCES`.
        rename: name in the files -> field of a demonstration, for what the reader would call otherwise.
        environment: that they are for; None: its own defaults.

    Raises: EnvError for an unknown layout, a path that is not there or holds something else, no successful episode,
        and a package that is missing.
    """
    if source not in SOURCES:
        raise EnvError(f"there are no demonstrations of source {source!r}; there are {', '.join(SOURCES)}")
    if not Path(path).exists():
        raise EnvError(f"{path} does not exist")
    found = SOURCES[source](Path(path), rename or {}, environment or RunEnvironment())
    if not len(found):
        raise EnvError(f"{path} has no successful episode")
    return found


def _lerobot(path: Path, rename: Mapping[str, str], _: RunEnvironment) -> DemonstrationFiles:
    from rlinf_envs.demonstrations.lerobot import LeRobotDemonstrations

    return LeRobotDemonstrations(path, rename)


def _libero(path: Path, rename: Mapping[str, str], _: RunEnvironment) -> DemonstrationFiles:
    from rlinf_envs.demonstrations.libero_files import LiberoDemonstrations

    return LiberoDemonstrations(path, rename)


def _maniskill(path: Path, rename: Mapping[str, str], environment: RunEnvironment) -> DemonstrationFiles:
    from rlinf_envs.demonstrations.maniskill import ManiSkillDemonstrations

    return ManiSkillDemonstrations(path, rename, environment)


SOURCES: Mapping[str, Callable[[Path, Mapping[str, str], RunEnvironment], DemonstrationFiles]] = {
    "lerobot": _lerobot,
    "libero": _libero,
    "maniskill": _maniskill,
}
"""Layout -> its reader; imported when it is used, so that one's packages are not needed for another."""
