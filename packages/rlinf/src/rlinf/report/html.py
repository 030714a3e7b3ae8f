"""Pages and pieces of HTML, escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources


def document(title: str, body: Iterable[str], *, footer: str) -> str:
    """A whole page with the report's looks; it loads nothing from anywhere.

    Args:
        body: HTML.
        footer: text.
    """
    style, script = (
        resources.files("rlinf.report").joinpath(name).read_text(encoding="utf-8") for name in ("page.css", "page.js")
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style}</style></head>"
        f"<body><main>{''.join(body)}<footer>{escape(footer)}</footer></main>"
        f'<div id="tip" hidden></div><script>{script}</script></body></html>\n'
    )


def section(title: str, *body: str, note: str = "") -> str:
    """A titled box; nothing if its body is empty."""
    if not any(body):
        return ""
    text = f'<p class="sub">{escape(note)}</p>' if note else ""
    return f"<section><h2>{escape(title)}</h2>{text}{''.join(body)}</section>"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, numeric: Sequence[int] = ()) -> str:
    """A table of texts.

    Args:
        numeric: indices of the columns that are aligned to the right.
    """
    kind = [' class="n"' if i in numeric else "" for i in range(len(columns))]
    head = "".join(f"<th{kind[i]}>{escape(name)}</th>" for i, name in enumerate(columns))
    body = "".join(
        "<tr>" + "".join(f"<td{kind[i]}>{escape(cell)}</td>" for i, cell in enumerate(row)) + "</tr>" for row in rows
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def facts(pairs: Iterable[tuple[str, object]]) -> str:
    """Names and texts; what has no text is left out."""
    shown = [(name, str(text)) for name, text in pairs if text not in (None, "")]
    return "<dl>" + "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in shown) + "</dl>"


def folded(title: str, body: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{body}</details>" if body else ""


def color_key(entries: Iterable[tuple[str, str]], *, has_waits: bool) -> str:
    """What the colours mean: (label, CSS colour)."""
    items = [f'<span><i style="background:{color}"></i>{escape(label)}</span>' for label, color in entries]
    if has_waits:
        items.append('<span><i class="thin"></i>waiting, onload, offload</span>')
    return f'<div class="key">{"".join(items)}</div>'
