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
