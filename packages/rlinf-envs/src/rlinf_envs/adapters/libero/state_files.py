"""Reads the shipped start states of LIBERO, LIBERO-Plus and LIBERO-PRO: pickled arrays, of which only arrays are
unpickled.

torch's own restricted reader knows the second version of pickle; LIBERO-PRO's files have the fourth.
"""

from __future__ import annotations

import codecs
import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from rlinf_envs.errors import EnvError

_REBUILD: Any = np.empty(0).__reduce__()[0]
_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _REBUILD,
    ("numpy._core.multiarray", "_reconstruct"): _REBUILD,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): codecs.encode,
}
"""What an array of numbers is made of; nothing else is looked up, so a file cannot run code."""


class _ArrayReader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it holds {module}.{name}")
        return _ALLOWED[module, name]


def read_states(file: Path) -> np.ndarray:
    """Returns the array in a file that `torch.save` wrote. Raises: EnvError for a file with anything but an array."""
    try:
        with zipfile.ZipFile(file) as archive:
            (inner,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
            states = _ArrayReader(io.BytesIO(archive.read(inner))).load()
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, pickle.UnpicklingError) as error:
        raise EnvError(f"{file} is no file of start states: {error}") from error
    if not isinstance(states, np.ndarray) or states.dtype.kind != "f":
        raise EnvError(f"{file} is no file of start states: it holds {type(states).__name__}")
    return states
