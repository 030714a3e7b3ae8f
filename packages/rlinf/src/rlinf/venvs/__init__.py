"""venvs for roles with conflicting packages: SGLang pins a torch that simulators and Megatron cannot use.

catalog.py       which venvs can be made, and the requirement lists that ship with the package
folder.py        where they lie on this machine, and what is in each
create.py        makes one
python_build.py  which Python an interpreter is, and which one is taken
pip.py           runs pip, with its progress on the terminal
own_packages.py  puts rlinf's own packages into one
stand_ins/       modules that take the place of packages which exist for GPUs alone
examine.py       what works in one
probe.py         the part of that which runs inside it

The config names one by role, `venvs: {rollout: sglang}`, and `python_of` says which interpreter that is.
"""

from __future__ import annotations

from rlinf.venvs.folder import python_of

__all__ = ["python_of"]
