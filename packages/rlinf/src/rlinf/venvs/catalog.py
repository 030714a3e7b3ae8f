"""The venvs that can be created, and the requirement lists that ship with the package.

A list has every distribution with its version and the digests of its files; its header names the supported Pythons.
torch's CPU builds have no digest, because the builds of its index and of distributions differ. Lists were installed and
tested unless their header states otherwise. tools/requirement_lists.py generates them.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rlinf.errors import UserError
from rlinf_envs import KINDS as ENVIRONMENT_KINDS, VenvSpec, kind_spec
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
"""Name -> venv that can be created."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RequirementList:
    """A shipped requirement list."""

    path: Path
    pythons: tuple[str, ...]
    """Supported minor versions of Python, for example `3.11`; the first is preferred."""
    untried: str
    """How it was checked if it was not installed; empty for a list that was installed and tested."""
    versions: Mapping[str, str]
    """Distribution -> version."""
    digests: Mapping[str, tuple[str, ...]]
    """Distribution -> SHA-256 of the files that pip may install; empty for CPU builds of torch."""
    sha256: str
    """Hex digest of the file."""


def kind_named(name: str) -> VenvSpec:
    """Returns the venv with a name. Raises: UserError if there is none."""
    if name not in KINDS:
        raise UserError(f"there is no venv called {name!r}", hint=f"rlinf venv create {'|'.join(sorted(KINDS))}")
    return KINDS[name]


def variant(name: str, *, cpu: bool) -> str:
    """Returns its command-line form: `sglang --cpu`."""
    return f"{name} --cpu" if cpu else name


def requirement_list(name: str, *, cpu: bool) -> RequirementList:
    """Returns the shipped list of a venv. Raises: UserError if there is none."""
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
    """Reads a list, whose lines are comments or `NAME==VERSION --hash=sha256:DIGEST ...`."""
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
    """Returns the text after `start` in the header of a list; empty if no line starts with it."""
    return next((line.removeprefix(start) for line in lines if line.startswith(start)), "")
