"""A second venv for tests, created in milliseconds: another interpreter, with the packages of this one."""

from __future__ import annotations

import sys
import venv
from pathlib import Path

import rlinf_workers


def second_venv(folder: Path, *, protocol: int | None = None) -> str:
    """Creates a venv in `folder` that finds the packages installed in the current one.

    Args:
        protocol: protocol number of its rlinf-workers, if it should differ.

    Returns: path of its interpreter.
    """
    venv.create(folder, with_pip=False, symlinks=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = folder / "lib" / version / "site-packages"
    installed = [entry for entry in sys.path if Path(entry).name == "site-packages"]
    lines = [f"import site; site.addsitedir({entry!r})" for entry in installed]
    if protocol is not None:
        lines.insert(0, str(_with_protocol(protocol, folder / "doctored")))
    (packages / "second.pth").write_text("\n".join(lines) + "\n")
    return str(folder / "bin" / "python")


def _with_protocol(protocol: int, folder: Path) -> Path:
    """A folder with an rlinf_workers that differs only in its protocol."""
    (folder / "rlinf_workers").mkdir(parents=True)
    for path in Path(rlinf_workers.__file__).parent.iterdir():
        if path.name not in ("protocol.py", "__pycache__"):
            (folder / "rlinf_workers" / path.name).symlink_to(path)
    (folder / "rlinf_workers" / "protocol.py").write_text(f"PROTOCOL = {protocol}\n")
    return folder
