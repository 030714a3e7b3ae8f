"""SHA256SUMS: what was written into a folder, so that damage is found before anything is read from it.

The format is that of `sha256sum`, which checks such a folder too. The seal's last line is that of state.json, so that a
seal which lost lines at its end is not taken for whole. Files that it does not name do not count, and what leads out of
the folder is damage: a seal may have come with its folder from somebody else.
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
    """Seals all files of a folder, of which state.json is one.

    Args:
        digests: of files that are not read again, because who wrote them digested what was written.
    """
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert STATE in names, f"{folder} has no {STATE}"
    names = [name for name in names if name not in (STATE, SUMS)] + [STATE]
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        all_digests = threads.map(lambda name: digests.get(name) or file_digest(folder / name), names)
        sums = dict(zip(names, all_digests, strict=True))
    (folder / SUMS).write_text(_lines(sums), encoding="utf-8")


def damage(folder: Path, under: str = "") -> str | None:
    """What is wrong with a sealed folder, for people; None: nothing.

    Args:
        under: read only files whose names begin so, and state.json; a model in a large checkpoint, say.

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
    """The files of a whole folder (see `damage`) whose names begin so, in the order of their names."""
    return [folder / name for name in sorted(_read_checksums(folder)) if name.startswith(under)]


def file_digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    digest, block = hashlib.sha256(), bytearray(BLOCK_BYTES)
    view = memoryview(block)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            digest.update(view[:count])
    return digest.hexdigest()


def _read_checksums(folder: Path) -> dict[str, str]:
    """Name -> digest, in the order of the lines. Raises: OSError, ValueError."""
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
    if path.exists() and not path.is_file():  # a pipe would keep us waiting
        return "is no plain file"
    try:
        return None if file_digest(path) == digest else "is not what was written"
    except PermissionError:
        raise
    except OSError as error:
        return error.strerror or str(error)
