"""The venvs that can be made, and the requirement lists that ship with the package.

A list names every distribution with its version and the digests of its files, and its head the Pythons that it is for.
torch's builds for CPUs have no digest: its index and a distribution's own build differ. Lists for CPU slots were
installed and tried with it; where a list was not, its head says so. tools/requirement_lists.py makes them.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rlinf.errors import UserError
from rlinf_envs import KINDS as ENVIRONMENT_KINDS
from rlinf_envs import VenvSpec, kind_spec
from rlinf_workers.plugins import ENGINES, TRAINERS

PYTHON_LINE = "# python: "
UNTRIED_LINE = "# untried: "


KINDS = {
    venv.name: venv
    for venv in (
        *(spec.venv for spec in ENGINES.specs()),
        *(spec.venv for spec in TRAINERS.specs()),
        *(kind_spec(kind).venv for kind in ENVIRONMENT_KINDS),
    )
    if venv is not None
}
"""Name -> what can be made."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RequirementList:
    """A shipped list."""

    path: Path
    pythons: tuple[str, ...]
    """The minors of Python that it is for, `3.11` for example; the first is preferred."""
    untried: str
    """What was done with it instead of installing it; empty for a list that was installed and tried."""
    versions: Mapping[str, str]
    """Every distribution and its version."""
    digests: Mapping[str, tuple[str, ...]]
    """SHA-256 of the files that pip may install of a distribution; none for a build of torch for CPUs."""
    sha256: str
    """Hex digest of the file."""


def kind_named(name: str) -> VenvSpec:
    """Raises: UserError where there is none of that name."""
    if name not in KINDS:
        raise UserError(f"there is no venv called {name!r}", hint=f"rlinf venv create {'|'.join(sorted(KINDS))}")
    return KINDS[name]


def variant(name: str, *, cpu: bool) -> str:
    """What a user types to get it: `sglang --cpu`."""
    return f"{name} --cpu" if cpu else name


def requirement_list(name: str, *, cpu: bool) -> RequirementList:
    """The shipped list of a venv. Raises: UserError where there is none."""
    path = kind_named(name).requirements(cpu=cpu)
    if not path.is_file():
        names = ", ".join(
            variant(venv.name, cpu=for_cpu)
            for venv in sorted(KINDS.values(), key=lambda venv: venv.name)
            for for_cpu in (True, False)
            if venv.requirements(cpu=for_cpu).is_file()
        )
        raise UserError(
            f"no requirement list ships for {variant(name, cpu=cpu)}; there are lists for {names}",
            hint="make a virtual environment by hand, install rlinf in it, and name its interpreter in the config: "
            "venvs: {rollout: /path/of/bin/python}",
        )
    return read_list(path)


def read_list(path: Path) -> RequirementList:
    """A list from its file, whose lines are comments or `NAME==VERSION --hash=sha256:DIGEST ...`."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    pins = [re.split("==| --hash=sha256:", line) for line in lines if line and not line.startswith("#")]
    digest = hashlib.sha256(text.encode()).hexdigest()
    pythons = tuple(_header(lines, PYTHON_LINE).split(", "))
    return RequirementList(
        path=path,
        pythons=pythons,
        untried=_header(lines, UNTRIED_LINE),
        versions={name: version for name, version, *_ in pins},
        digests={name: tuple(digests) for name, _, *digests in pins if digests},
        sha256=digest,
    )


def _header(lines: list[str], start: str) -> str:
    """What follows `start` in the head of a list; empty where no line starts so."""
    return next((line.removeprefix(start) for line in lines if line.startswith(start)), "")
