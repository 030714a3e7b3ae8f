r"""Turns LaTeX arrays into what they stand for: a matrix, or the lines of a system as a list.

Example: `[\begin{array}{cc}1&2\end{array}]`, `[[1,2],[3,4]]` and `[1,2;3,4]` are a pmatrix, and
`\begin{cases}x=1\\y=2\end{cases}` is `x=1,y=2`. The cases of a function stay as they are.
"""

import re
from collections.abc import Iterable

_ROW_GAP = re.compile(r"\\\\\s*\[\s*-?[0-9.]+\s*(?:pt|em|ex|mm|cm)\s*\]")
_ARRAY = re.compile(
    r"(?P<open>\\\{|[\[(]|)\s*\\begin\s*\{(?P<kind>array|cases|d?cases|aligned|align\*?|alignedat|gathered|gather\*?|split)\}"
    r"\s*(?:\[[a-z]\])?\s*(?P<columns>\{[lcr|@{}\s]*\})?(?P<body>(?:(?!\\begin\s*\{).)*?)\\end\s*\{(?P=kind)\}"
    r"\s*(?P<close>\\\}|[\])]|)",
    flags=re.DOTALL,
)
_BRACKETED = re.compile(r"[\[(]\s*(\\begin\{pmatrix\}(?:(?!\\begin).)*\\end\{pmatrix\})\s*[\])]", flags=re.DOTALL)
_ROWS = re.compile(r"\[\s*\[[^\[\]]*\](?:\s*,\s*\[[^\[\]]*\])*\s*\]")
_LINES = re.compile(r"\[([^\[\];]+,[^\[\];]+(?:;[^\[\];,]+,[^\[\];]+)+)\]")
_SPACED_LINES = re.compile(r"\[ ?((?:-?[0-9][0-9./]* ?){1,9}(?:; ?(?:-?[0-9][0-9./]* ?){1,9})+)\]")
_RELATION = re.compile(r"[=<>]|\\(?:le|ge|ne|approx|in)(?![a-z])")


def without_arrays(text: str) -> str:
    """The text with each array replaced by a pmatrix or a list, and without `\\left` and `\\right`."""
    text = _ROW_GAP.sub(r"\\\\", text)
    text = _BRACKETED.sub(r"\1", _ARRAY.sub(_array, text)) if "\\begin" in text else text
    text = _SPACED_LINES.sub(lambda rows: f"[{re.sub(r'(?<=[0-9]) +(?=[-0-9])', ',', rows[1])}]", text)
    return _LINES.sub(lambda lines: pmatrix(lines[1].replace(",", "&").split(";")), _ROWS.sub(_nested, text))


def pmatrix(rows: Iterable[str]) -> str:
    """The matrix with these rows, whose cells are separated by `&`."""
    return r"\begin{pmatrix}" + r"\\".join(rows) + r"\end{pmatrix}"


def _array(match: re.Match[str]) -> str:
    rows = [row.strip() for row in match["body"].split("\\\\") if row.strip()]
    if all(_RELATION.search(row.replace("&", "").split(",")[0]) for row in rows) and "(" not in match["open"]:
        is_function = match["kind"].endswith("cases") and any("&" in row.partition("=")[0] for row in rows)
        is_function = is_function and not all(_RELATION.search(row.partition("&")[0]) for row in rows)
        if not is_function:
            return " " + ", ".join(row.replace("&", "").strip(" ,;.") for row in rows)
    if match["kind"] != "array":
        return match[0] if match["kind"].endswith("cases") else ", ".join(row.replace("&", "") for row in rows)
    return pmatrix(rows)


def _nested(match: re.Match[str]) -> str:
    rows = re.findall(r"\[([^\[\]]*)\]", match[0][1:-1])
    return pmatrix(row.replace(",", "&") for row in rows) if len(rows) > 1 or "," in rows[0] else match[0]
