# ruff: noqa: N999 - the module is private, and named so
"""Types of the native module (csrc/sched). Private to this package."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

class Standstill(RuntimeError): ...

def simulate(
    arrays: Mapping[str, np.ndarray],
    *,
    names: Sequence[str],
    num_items: int,
    num_steps: int,
    max_staleness: int,
    num_devices: int,
) -> dict[str, Any]: ...
