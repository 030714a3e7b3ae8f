"""Fingerprints of what a run or an evaluation reads, so that a resumed one notices that it is not what it was."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rlinf.config.inputs import TOKENIZER_FILES, WEIGHT_FILES
from rlinf.errors import UserError

BLOCK_BYTES, NUM_BLOCKS = 1 << 16, 64
"""Of a large file as many blocks go into its fingerprint, at equal distances from its first byte to its last. Training
changes every tensor, so that a file of weights need not be read as a whole."""
SMALL_FILES = {"config.json", "generation_config.json", "tokenizer_config.json", "chat_template.jinja"}
WEIGHT_SUFFIXES = (".safetensors", ".bin")


def model_fingerprint(folder: Path) -> str:
    """A digest of a model folder's config, tokenizer and weights; other files do not count."""

    def counts(file: Path) -> bool:
        return file.name in {*SMALL_FILES, *TOKENIZER_FILES, *WEIGHT_FILES} or file.suffix in WEIGHT_SUFFIXES

    return _digest(folder, sorted(entry for entry in folder.iterdir() if entry.is_file()), counts)


def path_fingerprint(path: Path) -> str:
    """A digest of a file, or of all files below a folder."""
    files = [path] if path.is_file() else sorted(entry for entry in path.rglob("*") if entry.is_file())
    return _digest(path, files, lambda file: True)


def changed_inputs(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Names of the inputs that are not what they were."""
    return [name for name in before if now.get(name) != before[name]]


def refuse_changed(names: list[str], what: str, path: Path, hint: str) -> None:
    """Raises: UserError where there are names, which begins with them.

    Args:
        what: "run" or "evaluation".
        path: its folder.
    """
    if names:
        have = "has" if len(names) == 1 else "have"
        raise UserError(
            f"{', '.join(names)} {have} changed since the {what} in {path} began, so that what follows would not go "
            "together with what was before",
            hint=hint,
        )


def _digest(top: Path, files: list[Path], counts: Callable[[Path], bool]) -> str:
    digest = hashlib.sha256()
    for file in filter(counts, files):
        digest.update(f"{file.relative_to(top)} {file.stat().st_size}\n".encode())
        for block in _blocks(file):
            digest.update(block)
    return digest.hexdigest()


def _blocks(file: Path) -> Iterator[bytes]:
    num_bytes = file.stat().st_size
    with file.open("rb") as opened:
        if num_bytes <= BLOCK_BYTES * NUM_BLOCKS or file.suffix not in WEIGHT_SUFFIXES:
            while block := opened.read(BLOCK_BYTES * NUM_BLOCKS):
                yield block
            return
        for i in range(NUM_BLOCKS):
            opened.seek((num_bytes - BLOCK_BYTES) * i // (NUM_BLOCKS - 1))
            yield opened.read(BLOCK_BYTES)
