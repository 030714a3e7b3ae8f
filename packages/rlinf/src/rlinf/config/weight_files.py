"""Whether the safetensors files of a model folder are whole, by their headers: milliseconds for any size, and no torch.

The format (https://github.com/huggingface/safetensors, README): eight bytes with the header's length, the header in
JSON with the byte range of every tensor, then the bytes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rlinf.errors import UserError

INDEX = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""
HINT = "the download or the copy was cut short; fetch the file again"


def check_weight_files(folder: Path, key: str) -> None:
    """Checks every safetensors file that transformers would read from `folder`, which the config calls `key`.

    Raises: UserError for an index that names a file or a tensor that is not there, and for a torn file.
    """
    index = folder / INDEX
    if (folder / "model.safetensors").is_file():
        _header(folder / "model.safetensors", key)
        return
    if not index.is_file():
        return  # weights of another format, which transformers reads or refuses
    for name, tensors in _files(index, key).items():
        file = folder / name
        if not file.is_file():
            raise UserError(f"{key}={folder}: {INDEX} names {name}, which is not there", hint=HINT)
        lost = sorted(tensors - _header(file, key).keys())
        if lost:
            raise UserError(f"{key}={folder}: {name} lacks {lost[0]} and {len(lost) - 1} more tensors", hint=HINT)


def _files(index: Path, key: str) -> dict[str, set[str]]:
    """File -> names of the tensors that an index expects in it."""
    files: dict[str, set[str]] = {}
    try:
        for tensor, name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].items():
            files.setdefault(str(name), set()).add(tensor)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{key}: {index} is not an index of weights: {error!r}", hint=HINT) from error
    return files


def _header(file: Path, key: str) -> dict[str, Any]:
    """Tensor -> its entry, of a file that is as long as its header says."""
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
                raise ValueError(f"its header would have {length} bytes")
            header = json.loads(stream.read(length))
        tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
        expected = 8 + length + max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise UserError(f"{key}: {file} is no safetensors file: {error}", hint=HINT) from error
    if size != expected:
        raise UserError(f"{key}: {file} has {size:,} bytes; its header says {expected:,}", hint=HINT)
    return tensors
