"""The virtual environment that a plug-in's packages need, where they cannot share the product's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class VenvSpec:
    """A virtual environment that `rlinf venv create NAME` makes.

    It stands in the folder of the plug-in that needs it, beside the lists of requirements that it is made from.
    """

    name: str
    purpose: str
    """For people, in a few words."""
    folder: Path
    """Where its lists are: `requirements-cpu.txt`, `requirements-gpu.txt`."""
    modules: tuple[str, ...]
    """Modules that must import in it, beside rlinf's own."""
    packages: tuple[str, ...]
    """Distributions whose versions are worth a line."""
    cpu_variables: Mapping[str, str] = field(default_factory=dict)
    """Env vars without which the modules do not import on a CPU."""
    cpu_stand_ins: tuple[str, ...] = ()
    """Names in `rlinf.venvs.stand_ins.VERSIONS`; only venvs for CPU slots get them."""
    import_folder: str = ""
    """Env var that names the folder where the modules write files when they are first imported; a check sets it to an
    empty folder."""
    import_answer: str = ""
    """What a check answers where the modules ask on the terminal when they are first imported."""

    def requirements(self, *, cpu: bool) -> Path:
        """Its list of requirements for CPU slots, or for GPUs; the file need not exist."""
        return self.folder / f"requirements-{'cpu' if cpu else 'gpu'}.txt"
