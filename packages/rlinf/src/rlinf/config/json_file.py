"""Reads JSON files of unknown origin with limits, so that a malformed one gives a one-line error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MAX_BYTES = 64 << 20
"""Larger than the config, index or manifest of any model or run."""


def read_json(file: Path) -> Any:
    """Parses the file; a byte order mark is ignored.

    Raises: OSError; ValueError as `parse_json`.
    """
    _check_size(file.stat().st_size)
    return parse_json(file.read_bytes())


def parse_json(content: bytes) -> Any:
    """Parses JSON. Raises: ValueError for content that is not JSON, nested too deeply or too large."""
    _check_size(len(content))
    try:
        return json.loads(content.decode("utf-8-sig"))
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def _check_size(num_bytes: int) -> None:
    if num_bytes > MAX_BYTES:
        raise ValueError(f"it has {num_bytes:,} bytes, and such a file has at most {MAX_BYTES:,}")
