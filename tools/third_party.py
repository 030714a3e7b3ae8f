"""Prints what `rlinf[all]` requires of other projects, a line each: `python tools/third_party.py [EXTRA ...]`.

It reads only the pyproject.toml files of the packages, so an image can install these requirements in a layer that stays
valid while the sources change. Markers are evaluated for the interpreter that runs this, which needs Python 3.11.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Any

import tomllib  # pyright: ignore[reportMissingImports] - this tool wants Python 3.11
from packaging.requirements import Requirement

PACKAGES = Path(__file__).parents[1] / "packages"


def read_projects(folder: Path = PACKAGES) -> dict[str, dict[str, Any]]:
    """The table `project` of each package, by the package's name."""
    paths = sorted(folder.glob("*/pyproject.toml"))
    return {path.parent.name: tomllib.loads(path.read_text(encoding="utf-8"))["project"] for path in paths}


def third_party(projects: dict[str, dict[str, Any]], package: str, extras: Set[str]) -> set[str]:
    """The requirements of a package and its extras, those of its sister packages included, without markers."""
    lines: set[str] = set()
    pending, seen = [(package, frozenset(extras))], set()
    while pending:
        name, chosen = pending.pop()
        if (name, chosen) in seen:
            continue
        seen.add((name, chosen))
        for requirement in _applicable(projects[name], chosen):
            if requirement.name in projects:
                pending.append((requirement.name, frozenset(requirement.extras)))
            else:
                requirement.marker = None
                lines.add(str(requirement))
    return lines


def _applicable(project: dict[str, Any], extras: Set[str]) -> Iterator[Requirement]:
    """The requirements whose markers hold here. Raises: ValueError if the project has no such extra."""
    options = project.get("optional-dependencies", {})
    for extra in extras - set(options):
        raise ValueError(f"{project['name']} has no extra {extra!r}; it has {', '.join(sorted(options))}")
    for line in [*project["dependencies"], *(line for extra in sorted(extras) for line in options[extra])]:
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate():
            yield requirement


if __name__ == "__main__":
    print("\n".join(sorted(third_party(read_projects(), "rlinf", set(sys.argv[1:] or ["all"])))))
