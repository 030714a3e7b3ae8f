"""Describes the venv of a plug-in whose packages conflict with those of the product."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class VenvSpec:
    """A venv that `rlinf venv create NAME` creates.

    It is defined in the folder of its plug-in, beside the requirement lists.
    """

    name: str
    purpose: str
    """Short description for users."""
    folder: Path
    """Folder of its requirement lists: `requirements-cpu.txt`, `requirements-gpu.txt`."""
    modules: tuple[str, ...]
    """Modules that must be importable in it, besides rlinf's."""
    packages: tuple[str, ...]
    """Distributions whose versions are reported."""
    cpu_variables: Mapping[str, str] = field(default_factory=dict)
    """Env vars without which the modules do not import on a CPU."""
    cpu_stand_ins: tuple[str, ...] = ()
    """Names in `rlinf.venvs.stand_ins.VERSIONS`; only venvs for CPU slots get them."""
    import_folder: str = ""
    """Env var that names the folder where the modules write files when they are first imported; a check sets it to an
    empty folder."""
    import_answer: str = ""
    """Input for modules that prompt on the terminal when they are first imported."""

    def requirements(self, *, cpu: bool) -> Path:
        """Returns the path of its requirement list for CPU slots or GPUs; the file may be missing."""
        return self.folder / f"requirements-{'cpu' if cpu else 'gpu'}.txt"
