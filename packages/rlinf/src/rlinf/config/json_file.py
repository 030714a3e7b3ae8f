"""JSON files that others wrote: read with bounds, so that an odd one is an error on one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MAX_BYTES = 64 << 20
"""More than the config, the index or the manifest of any model or run has."""


def read_json(file: Path) -> Any:
    """What the file holds; a byte order mark is left out.

    Raises: OSError; ValueError for what is no JSON, nested too deep or too large.
    """
    if (num_bytes := file.stat().st_size) > MAX_BYTES:
        raise ValueError(f"it has {num_bytes:,} bytes, and such a file has at most {MAX_BYTES:,}")
    try:
        return json.loads(file.read_bytes().decode("utf-8-sig"))
    except RecursionError:
        raise ValueError("it is nested too deep") from None
