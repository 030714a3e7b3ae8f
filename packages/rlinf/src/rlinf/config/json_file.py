"""JSON files that others wrote: read with bounds, so that an odd one is an error on one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MAX_BYTES = 64 << 20
"""More than the config, the index or the manifest of any model or run has."""


def read_json(file: Path) -> Any:
    """What the file holds; a byte order mark is left out.

    Raises: OSError; ValueError as `parse_json`.
    """
    _check_size(file.stat().st_size)
    return parse_json(file.read_bytes())


def parse_json(content: bytes) -> Any:
    """Raises: ValueError for what is no JSON, nested too deep or too large."""
    _check_size(len(content))
    try:
        return json.loads(content.decode("utf-8-sig"))
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def _check_size(num_bytes: int) -> None:
    if num_bytes > MAX_BYTES:
        raise ValueError(f"it has {num_bytes:,} bytes, and such a file has at most {MAX_BYTES:,}")
