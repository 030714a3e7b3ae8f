"""The environments that can be made, and the requirement lists that ship with the package.

A list names every distribution with its version. One ships only after it was installed and tried, with the Python that
its head names.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rlinf.errors import UserError

LISTS = Path(__file__).parent / "lists"
PYTHON_LINE = "# python: "


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """One that can be made."""

    name: str
    purpose: str
    """For people, in a few words."""
    modules: tuple[str, ...]
    """Modules that must import in it, beside rlinf's own."""
    packages: tuple[str, ...]
    """Distributions whose versions are worth a line."""
    cpu_variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables without which the modules do not import on a CPU."""
    cpu_stand_ins: tuple[str, ...] = ()
    """Names in stand_ins.STAND_INS; only environments for CPU slots get them."""


KINDS = {
    kind.name: kind
    for kind in (
        Kind(
            name="sglang",
            purpose="rollout.engine: sglang",
            modules=("sglang.srt.entrypoints.engine",),
            packages=("torch", "transformers", "sglang"),
            cpu_variables={"SGLANG_USE_CPU_ENGINE": "1"},
            cpu_stand_ins=("sglang-kernel", "torchvision"),
        ),
        Kind(
            name="megatron",
            purpose="actor.backend: megatron",
            modules=("megatron.core",),
            packages=("torch", "transformers", "megatron-core"),
        ),
        Kind(
            name="maniskill",
            purpose="simulators of ManiSkill 3",
            modules=("mani_skill",),
            packages=("torch", "mani-skill", "sapien"),
        ),
    )
}


@dataclass(frozen=True, kw_only=True, slots=True)
class RequirementList:
    """A shipped list."""

    path: Path
    python: str
    """The minor of Python that it was tried with, `3.11` for example."""
    versions: Mapping[str, str]
    """Every distribution and its version."""
    sha256: str
    """Hex digest of the file."""


def kind_named(name: str) -> Kind:
    """Raises: UserError where there is none of that name."""
    if name not in KINDS:
        raise UserError(f"there is no environment called {name!r}", hint=f"rlinf env create {'|'.join(sorted(KINDS))}")
    return KINDS[name]


def variant(name: str, *, cpu: bool) -> str:
    """What a user types to get it: `sglang --cpu`."""
    return f"{name} --cpu" if cpu else name


def requirement_list(name: str, *, cpu: bool) -> RequirementList:
    """The shipped list of an environment. Raises: UserError where there is none."""
    path = LISTS / f"{name}-{'cpu' if cpu else 'gpu'}.txt"
    if not path.is_file():
        shipped = sorted(path.stem.rpartition("-") for path in LISTS.glob("*.txt"))
        names = ", ".join(variant(name, cpu=device == "cpu") for name, _, device in shipped)
        raise UserError(
            f"no requirement list ships for {variant(name, cpu=cpu)}; those that were installed and tried: {names}",
            hint="make a virtual environment by hand, install rlinf in it, and name its interpreter in the config: "
            "environments: {rollout: /path/of/bin/python}",
        )
    return read_list(path)


def read_list(path: Path) -> RequirementList:
    """A list from its file, whose lines are comments or `NAME==VERSION`."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    python = next(line.removeprefix(PYTHON_LINE) for line in lines if line.startswith(PYTHON_LINE))
    pins = (line.split("==") for line in lines if line and not line.startswith("#"))
    digest = hashlib.sha256(text.encode()).hexdigest()
    return RequirementList(path=path, python=python, versions=dict(pins), sha256=digest)
