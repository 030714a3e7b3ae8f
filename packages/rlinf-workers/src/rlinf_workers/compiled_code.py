"""Where torch caches the programs that it compiles.

The default is `torchinductor_USER` in the folder for temporary files, whoever created it: another user could create it
first, and its content is executed. So the cache is a folder below the user's own cache folder.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def keep_compiled_code_private() -> None:
    """Sets torch's env var for this process and those that it starts, unless the user has."""
    if VARIABLE not in os.environ:
        os.environ[VARIABLE] = str(_own_folder())


def _own_folder() -> Path:
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlinf" / "torchinductor"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid == os.geteuid() and os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError):  # a home that cannot be written, or none
        pass
    return Path(tempfile.mkdtemp(prefix="rlinf-compiled-"))
