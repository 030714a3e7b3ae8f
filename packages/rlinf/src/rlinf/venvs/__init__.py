"""venvs for roles with conflicting packages: SGLang pins a torch that simulators and Megatron cannot use.

catalog.py       the venvs that can be created, and the requirement lists that ship with the package
folder.py        finds and describes the venvs of this machine
create.py        creates a venv
python_build.py  inspects and chooses Python interpreters
pip.py           runs pip, with its progress on the terminal
own_packages.py  installs rlinf's packages into a venv
stand_ins/       stand-ins for GPU-only packages
examine.py       checks a venv
probe.py         the part of the check that runs inside the venv

The config names one by role, `venvs: {rollout: sglang}`, and `python_of` returns its interpreter.
"""

from __future__ import annotations

from rlinf.venvs.folder import python_of

__all__ = ["python_of"]
