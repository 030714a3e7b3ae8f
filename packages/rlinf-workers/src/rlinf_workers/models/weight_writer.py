"""Writes tensors into safetensors files: one file, or several with an index, as Hugging Face folders have them.

    model.safetensors
    model-00001-of-00002.safetensors  model-00002-of-00002.safetensors  model.safetensors.index.json

A file is digested while it is written, which the safetensors library cannot do, so the format is written here: the
length of the header in 8 bytes, the header in JSON, the bytes of the tensors. The files are bitwise equal to the
library's. Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlinf_workers.models.weight_files import DTYPES

ORDER = ("I64", "F64", "F32", "I32", "BF16", "F16", "I16", "F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL")
"""Order of dtypes in a file, which aligns all tensors."""
NAMES = {getattr(torch, DTYPES[name]): name for name in ORDER}
ALIGNMENT_BYTES = 8
BLOCK_BYTES = 1 << 22
"""Small enough for the bytes to be still in the cache when they are written after digesting."""


def index_of(files: Mapping[str, Mapping[str, int]]) -> str:
    """The content of an index file.

    Args:
        files: name -> its tensors and their bytes.
    """
    weight_map = {tensor: name for name, tensors in files.items() for tensor in tensors}
    total_size = sum(sum(tensors.values()) for tensors in files.values())
    index = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
    return json.dumps(index, indent=2) + "\n"


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Writes host tensors and syncs the file to disk.

    Returns: the SHA-256 of the file, in hexadecimal.
    """
    ordered = sorted(tensors.items(), key=lambda item: (ORDER.index(NAMES[item[1].dtype]), item[0]))
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for block in (_header(ordered), *_blocks(ordered)):
            digest.update(block)
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def _header(tensors: Sequence[tuple[str, Tensor]]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    first = 0
    for name, tensor in tensors:
        offsets = [first, first + tensor.nbytes]
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        first = offsets[1]
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % ALIGNMENT_BYTES)
    return len(text).to_bytes(8, "little") + text


def _blocks(tensors: Sequence[tuple[str, Tensor]]) -> Iterator[memoryview]:
    for _, tensor in tensors:
        content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
        for first in range(0, len(content), BLOCK_BYTES):
            yield content[first : first + BLOCK_BYTES]
