"""SHA256SUMS: checksums of the files of a folder, so that damage is detected before it is used.

The format is that of `sha256sum`, which can check such a folder too. The last line is that of state.json, so that a
truncated file is detected. Files that are not listed are ignored. Paths that lead out of the folder count as damage,
because the folder may come from an untrusted source.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rlinf.run_folder.plain_files import read_plain

STATE = "state.json"
SUMS = "SHA256SUMS"
NUM_THREADS = 4
BLOCK_BYTES = 1 << 20
_LINE = re.compile(r"^([0-9a-f]{64})  (\S.*)$", re.MULTILINE)


def write_checksums(folder: Path, digests: Mapping[str, str]) -> None:
    """Writes the checksums of all files of a folder, including state.json.

    Args:
        digests: digests computed while writing, for files that are not read again.
    """
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert STATE in names, f"{folder} has no {STATE}"
    names = [name for name in names if name not in (STATE, SUMS)] + [STATE]
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        all_digests = threads.map(lambda name: digests.get(name) or file_digest(folder / name), names)
        sums = dict(zip(names, all_digests, strict=True))
    (folder / SUMS).write_text(_lines(sums), encoding="utf-8")


def damage(folder: Path, under: str = "") -> str | None:
    """Describes the damage of a folder with checksums; None: it is intact.

    Args:
        under: check only files with this prefix, and state.json; for example the model in a large checkpoint.

    Raises: PermissionError.
    """
    try:
        sums = _read_checksums(folder)
    except PermissionError:
        raise
    except (OSError, ValueError) as error:
        return f"{SUMS}: {getattr(error, 'strerror', None) or error}"
    names = [name for name in sums if name.startswith(under) or name == STATE]
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        damages = threads.map(lambda name: _damage_of(folder, name, sums[name]), names)
        problems = [f"{name}: {problem}" for name, problem in zip(names, damages, strict=True) if problem]
    return "; ".join(problems) or None


def checked_files(folder: Path, under: str) -> list[Path]:
    """Returns the files of an intact folder (see `damage`) with this prefix, sorted by name."""
    return [folder / name for name in sorted(_read_checksums(folder)) if name.startswith(under)]


def file_digest(path: Path) -> str:
    """Returns the SHA-256 of a file in hexadecimal."""
    digest, block = hashlib.sha256(), bytearray(BLOCK_BYTES)
    view = memoryview(block)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            digest.update(view[:count])
    return digest.hexdigest()


def _read_checksums(folder: Path) -> dict[str, str]:
    """Reads name -> digest, in file order. Raises: OSError, ValueError."""
    text = read_plain(folder / SUMS).decode("utf-8")
    sums = {name: digest for digest, name in _LINE.findall(text)}
    if _lines(sums) != text or list(sums)[-1:] != [STATE]:
        raise ValueError("is not what was written")
    return sums


def _lines(sums: Mapping[str, str]) -> str:
    return "".join(f"{digest}  {name}\n" for name, digest in sums.items())


def _damage_of(folder: Path, name: str, digest: str) -> str | None:
    path = folder / name
    if path.resolve() != folder.resolve() / name:
        return "is a link, or outside the folder"
    if path.exists() and not path.is_file():  # reading a pipe would block
        return "is no plain file"
    try:
        return None if file_digest(path) == digest else "is not what was written"
    except PermissionError:
        raise
    except OSError as error:
        return error.strerror or str(error)
