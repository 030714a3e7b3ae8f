"""The protocol number goes up with the code that says what shared bytes mean, which is known by its digest.

White space, comments and docstrings do not count.
"""

import ast
import hashlib
import re
from pathlib import Path

import pytest

from rlinf_comm.protocol import PROTOCOL

PACKAGE = Path(__file__).parents[1]
NATIVE = PACKAGE.parents[1] / "csrc"
FILES = (
    NATIVE / "python" / "codec.h",
    NATIVE / "comm" / "channel_header.h",
    NATIVE / "comm" / "pool_memory.h",
    NATIVE / "comm" / "segment_server.cc",
    *(
        NATIVE / "include" / "rlinf" / "comm" / name
        for name in ("repairing_lock.h", "sync.h", "process_id.h", "digest.h")
    ),
    *(
        PACKAGE / "src" / "rlinf_comm" / "weights" / name
        for name in ("store/memory.py", "device/memory.py", "stream/wire.py")
    ),
)
RECORDED = {1: "afd6e72252a3af15", 2: "9fab599e6a922666", 3: "d06cdbe4f7a42bef"}
"""Protocol -> the digest of FILES."""


def essence(path: Path) -> str:
    """The code without white space, comments and docstrings."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        lines = text.splitlines()
        for node in ast.walk(ast.parse(text)):
            # A text that stands alone is a docstring, of a module, a class, a function or an attribute.
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                end = node.end_lineno or node.lineno
                lines[node.lineno - 1 : end] = [""] * (end - node.lineno + 1)
        text = re.sub(r"(?m)(^|  )#[^\n]*$", "", "\n".join(lines))
    else:
        text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)
    return "".join(text.split())


@pytest.mark.skipif(not NATIVE.is_dir(), reason="an sdist has the native sources elsewhere")
def test_the_number_stands_for_this_code():
    digest = hashlib.sha256("\n".join(map(essence, FILES)).encode()).hexdigest()[:16]
    assert RECORDED[PROTOCOL] == digest, (
        f"one of {', '.join(path.name for path in FILES)} has changed. If processes with the code of before would "
        "misread what this one writes, or the other way round, raise PROTOCOL in rlinf_comm/protocol.py; then put "
        f"{PROTOCOL}: {digest!r} into RECORDED, under the new number if it is new"
    )
