"""Recognizes files whose content is not what their name says: pointers of Git LFS, archives, web pages, another
encoding. The message then states how to get the data, in place of the first byte that no parser understands."""

from __future__ import annotations

import json
import shlex
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE, BOM_UTF32_BE, BOM_UTF32_LE
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlinf.errors import UserError

LFS_POINTER = b"version https://git-lfs.github.com/spec/"
PACKED = {
    b"\x1f\x8b": ("gzip", "gzip -dc"),
    b"\x28\xb5\x2f\xfd": ("Zstandard", "zstd -dc"),
    b"\xfd7zXZ\x00": ("xz", "xz -dc"),
    b"BZh": ("bzip2", "bzip2 -dc"),
    b"PK\x03\x04": ("ZIP", "unzip -p"),
}
"""First bytes of an archive -> its format, and the command that writes what is in it."""
PARQUET, ARROW = (b"PAR1",), (b"ARROW1", b"\xff\xff\xff\xff")
"""First bytes of tables."""
WEB_PAGE = (b"<!doctype html", b"<html")
UNPACK = {".gz": "gunzip", ".zst": "unzstd", ".xz": "unxz", ".bz2": "bunzip2", ".zip": "unzip"}
"""Ending of an archive -> the command that unpacks it."""
MAX_LINE = 1 << 20
"""Bytes of a first line that are read in order to find out what it is."""


def encoding_of(head: bytes) -> str:
    """Returns the encoding by the byte order mark that Windows editors write."""
    return "utf-16" if head.startswith((BOM_UTF16_LE, BOM_UTF16_BE)) else "utf-8-sig"


def unpack_hint(path: Path) -> str | None:
    """Returns what to do with a file that has an archive's ending; None for others."""
    command = UNPACK.get(path.suffix)
    return f"unpack it: {command} {shlex.quote(path.name)}" if command else None


def check_content(path: Path) -> None:
    """Raises: UserError for content that is not of the format that the file's ending names, with what to do."""
    with path.open("rb") as file:
        head = file.read(1 << 10)
    name, suffix = shlex.quote(path.name), path.suffix.lower()
    if head.startswith(LFS_POINTER):
        raise UserError(
            f"{path}: holds a pointer of Git LFS, which stands for the data",
            hint=f"fetch them with `git lfs pull --include {name}` in its repository, or download the file itself",
        )
    for magic, (what, command) in PACKED.items():
        if head.startswith(magic):
            raise UserError(
                f"{path}: is a {what} archive", hint=f"unpack it: {command} {name} > NEW{suffix}, and name that file"
            )
    if head.lstrip()[:20].lower().startswith(WEB_PAGE):
        raise UserError(
            f"{path}: is a web page", hint="download the data themselves: many pages have a link called raw or download"
        )
    for magic, ending in ((PARQUET, ".parquet"), (ARROW, ".arrow")):
        if head.startswith(magic) and suffix not in (ending, ".arrow"):
            raise UserError(f"{path}: is a {ending[1:]} file", hint=f"rename it so that it ends in {ending}")
    if suffix not in (".parquet", ".arrow"):
        _check_text(path, head)


def _check_text(path: Path, head: bytes) -> None:
    name = shlex.quote(path.name)
    wide = head.startswith((BOM_UTF32_LE, BOM_UTF32_BE)) and "UTF-32"
    if not wide and encoding_of(head) != "utf-16" and b"\0" in head[:2]:
        wide = ("UTF-16BE" if head[0] == 0 else "UTF-16LE") if head[:2] != b"\0\0" else None
    if wide:
        raise UserError(
            f"{path}: is {wide} text", hint=f"save it as UTF-8: iconv -f {wide} -t UTF-8 {name} > NEW{path.suffix}"
        )
    text = head.decode(encoding_of(head), "ignore").lstrip()
    if path.suffix.lower() == ".csv":
        if text.startswith(("{", "[{")):
            raise UserError(f"{path}: holds JSON, no CSV", hint="rename it so that it ends in .jsonl, or .json")
    elif text.startswith("{"):
        _check_object(path, text)
    elif text.startswith("[") and path.suffix.lower() == ".jsonl" and _is_array(path):
        raise UserError(f"{path}: is one JSON array, and no object a line", hint="rename it so that it ends in .json")


def _check_object(path: Path, text: str) -> None:
    """Raises: UserError for an object that goes over several lines."""
    if text.partition("\n")[0].strip() != "{":
        return
    try:
        values = json.loads(path.read_bytes().removeprefix(BOM_UTF8))
    except ValueError:
        values = None
    inner = rows_within(values) if isinstance(values, dict) else None
    raise UserError(
        f"{path}: its objects go over several lines; a row is one line",
        hint=f"write them anew: {lines_command(path, inner)}",
    )


def rows_within(values: Mapping[str, Any]) -> str | None:
    """Returns the name of the value that is a list of objects, as files with one object for all rows have."""
    for name, value in values.items():
        are_rows = isinstance(value, list) and value and all(isinstance(one, dict) for one in value)
        if are_rows and not {"role", "from"} & set(value[0]):  # which turns of a chat have
            return name
    return None


def lines_command(path: Path, inner: str | None = None) -> str:
    """Returns the command that writes a JSON file with an object a line, or with those of a list inside its object."""
    return f"jq -c {shlex.quote('.' if inner is None else f'.{inner}[]')} {shlex.quote(path.name)} > NEW.jsonl"


def _is_array(path: Path) -> bool:
    """Whether a file that begins with a bracket is one array of objects, and not an array a line."""
    with path.open("rb") as file:
        line = file.readline(MAX_LINE).removeprefix(BOM_UTF8)
        is_only_line = not file.readline(MAX_LINE).strip()
    try:
        values = json.loads(line)
    except ValueError:
        return True
    return is_only_line and isinstance(values, list) and any(isinstance(one, dict) for one in values)
