"""Checks a folder of our wheels as a release would go out: `python tools/check_wheels.py FOLDER`.

Each package is there once, with its licence; native wheels have a manylinux tag; the version of the meta-package is
above the foreign project of that name on the public index; what it requires of its sisters is what lies beside it.
"""

from __future__ import annotations

import sys
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import Version

NATIVE = ("rlinf-comm", "rlinf-sched")
PACKAGES = (*NATIVE, "rlinf-algos", "rlinf-envs", "rlinf-workers", "rlinf")
FOREIGN_RLINF = Version("2000")
"""The public index has another project called `rlinf`, at 0.3.0. A calendar version stays above it for good."""
LICENSE = Path(__file__).parents[1] / "LICENSE"
PYTHONS = ">=3.10,<3.14"
"""Python versions with which the project was tried; the same in every package."""


def check(folder: Path) -> list[str]:
    """What is wrong with the wheels of a folder, a sentence each."""
    wheels = {path: str(canonicalize_name(path.name.split("-")[0])) for path in sorted(folder.glob("*.whl"))}
    paths = {name: path for path, name in wheels.items()}
    problems = [f"{path.name} is not one of our packages" for path, name in wheels.items() if name not in PACKAGES]
    for name in PACKAGES:
        count = list(wheels.values()).count(name)
        if count != 1:
            problems.append(f"{name} has {count} wheels instead of one")
    versions = {name: parse_wheel_filename(path.name)[1] for name, path in paths.items()}
    for name, path in paths.items():
        problems += [f"{path.name} {problem}" for problem in _check_wheel(name, path, versions)]
    return problems


def _check_wheel(name: str, path: Path, versions: dict[str, Version]) -> list[str]:
    problems = []
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
        licences = [entry for entry in names if entry.endswith(".dist-info/licenses/LICENSE")]
        if [wheel.read(entry) for entry in licences] != [LICENSE.read_bytes()]:
            problems.append("does not carry the repository's LICENSE")
        [metadata_path] = [entry for entry in names if entry.endswith(".dist-info/METADATA")]
        metadata = Parser().parsestr(wheel.read(metadata_path).decode())
    platforms = {tag.platform for tag in parse_wheel_filename(path.name)[3]}
    if name in NATIVE and not all(platform.startswith("manylinux") for platform in platforms):
        problems.append(f"is tagged {', '.join(sorted(platforms))} and not manylinux")
    if name not in NATIVE and platforms != {"any"}:
        problems.append(f"is tagged {', '.join(sorted(platforms))}, and there is nothing native in it")
    if name == "rlinf" and versions[name] < FOREIGN_RLINF:
        problems.append(f"has version {versions[name]}, which can lose to the foreign rlinf of the public index")
    return problems + _check_metadata(metadata, versions)


def _check_metadata(metadata: Message, versions: dict[str, Version]) -> list[str]:
    problems = []
    if metadata["License-Expression"] != "Apache-2.0":
        problems.append(f"says License-Expression: {metadata['License-Expression']}")
    if set((metadata["Requires-Python"] or "").split(",")) != set(PYTHONS.split(",")):
        problems.append(f"says Requires-Python: {metadata['Requires-Python']} and not {PYTHONS}")
    for line in metadata.get_all("Requires-Dist", []):
        requirement = Requirement(line)
        version = versions.get(canonicalize_name(requirement.name))
        if version is not None and version not in requirement.specifier:
            problems.append(f"requires {requirement}, and {version} lies beside it")
    return problems


def main() -> int:
    folder = Path(sys.argv[1])
    problems = check(folder)
    for problem in problems:
        print(f"check_wheels: {problem}", file=sys.stderr)
    if not problems:
        print(f"{folder}: {len(PACKAGES)} wheels, each with its licence and honest tags")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
