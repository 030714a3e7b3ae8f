"""Builds HTML pages and elements; text is escaped."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib import resources
from typing import Any

from rlinf_sched import index_ranges


def document(title: str, body: Iterable[str], *, footer: str) -> str:
    """Returns a complete page in the report's style, without external resources.

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


class Raw(str):
    """HTML in the place of text; not escaped."""


def header(title: str, line: str, *, badge: str, look: str = "", below: str = "") -> str:
    """Returns the page's title with a badge, and a line below it.

    Args:
        look: `good`, `bad` or nothing.
        below: HTML.
    """
    mark = f'<span class="badge {look}">{escape(badge)}</span>'
    return f'<header><h1>{escape(title)}{mark}</h1><div class="sub">{escape(line)}</div>{below}</header>'


def boxes(cells: Iterable[tuple[str, str]], *, main: str = "") -> str:
    """Returns numbers in large type, each below its label; the number labelled `main` is the largest."""
    parts = [
        f'<div class="fact{" main" if label == main else ""}"><div class="label">{escape(label)}</div>'
        f'<div class="value">{_escaped(value)}</div></div>'
        for label, value in cells
    ]
    return f'<div class="facts">{"".join(parts)}</div>'


def notes(title: str, texts: Iterable[object]) -> str:
    """Returns a box with important notes; empty without texts."""
    items = "".join(f"<li>{escape(str(text))}</li>" for text in texts)
    return f'<section class="notes"><h2>{escape(title)}</h2><ul>{items}</ul></section>' if items else ""


def section(title: str, *body: str, note: str = "") -> str:
    """Returns a titled box; empty if its body is."""
    if not any(body):
        return ""
    text = f'<p class="sub">{escape(note)}</p>' if note else ""
    return f"<section><h2>{escape(title)}</h2>{text}{''.join(body)}</section>"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, numeric: Sequence[int] = ()) -> str:
    """Returns a table; empty without rows.

    Args:
        numeric: indices of the columns that are aligned to the right.
    """
    if not rows:
        return ""
    kind = [' class="n"' if i in numeric else "" for i in range(len(columns))]
    head = "".join(f"<th{kind[i]}>{escape(name)}</th>" for i, name in enumerate(columns))
    body = "".join(
        "<tr>" + "".join(f"<td{kind[i]}>{_escaped(cell)}</td>" for i, cell in enumerate(row)) + "</tr>" for row in rows
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def video(film: bytes, label: str) -> str:
    """Embeds an MP4 film in the page."""
    data = base64.b64encode(film).decode()
    return (
        f'<video controls autoplay muted loop playsinline aria-label="{escape(label)}" '
        f'src="data:video/mp4;base64,{data}"></video>'
    )


def shaded(share: float, text: str) -> Raw:
    """Returns a cell with a background that is greener for larger shares."""
    return Raw(f'<span class="shaded" style="--share:{share:.1%}">{escape(text)}</span>')


def share_bar(share: float, color: str) -> Raw:
    """Returns a cell with a bar that fills this share of the column."""
    return Raw(f'<div class="share"><div style="width:{share:.2%};background:{color}"></div></div>')


def plan_table(plan: Mapping[str, Any], flow: Mapping[str, Any]) -> str:
    """Returns a table of the stages' placement and the weight sync edges; plan and flow as in plan.json and
    flow.json."""
    in_flow = {stage["name"]: stage for stage in flow.get("stages", [])}
    rows = [
        (
            stage["stage"],
            ", ".join(in_flow.get(stage["stage"], {}).get("reads", [])),
            ", ".join(in_flow.get(stage["stage"], {}).get("writes", [])),
            index_ranges(stage["devices"]) or "host",
            f"{stage['num_ranks']:,}",
            f"{stage['granularity']:,}" if stage["granularity"] else "whole batch",
            "yes" if stage["offload"] else "no",
            str(stage["turn"] + 1),
        )
        for stage in plan.get("stages", [])
    ]
    columns = ("stage", "reads", "writes", "devices", "ranks", "items a hand-over", "offloads", "turn")
    edges = [f"{edge['source']} \N{RIGHTWARDS ARROW} {edge['target']}" for edge in flow.get("weight_edges", [])]
    weights = f'<p class="sub after">Weights: {escape(", ".join(edges))}.</p>' if rows and edges else ""
    return table(columns, rows) + weights


def facts(pairs: Iterable[tuple[str, object]]) -> str:
    """Returns a list of names and texts; entries without text are left out."""
    entries = [(name, str(text)) for name, text in pairs if text not in (None, "")]
    return "<dl>" + "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in entries) + "</dl>"


def folded(title: str, body: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{body}</details>" if body else ""


def color_key(entries: Iterable[tuple[str, str]], *, has_waits: bool = False, has_step_waits: bool = False) -> str:
    """Returns the legend of the colours: (label, CSS colour)."""
    items = [f'<span><i style="background:{color}"></i>{escape(label)}</span>' for label, color in entries]
    if has_waits:
        items.append('<span><i class="thin"></i>waiting, onload, offload</span>')
    if has_step_waits:
        items.append('<span><i class="idle"></i>waiting for the other side</span>')
    return f'<div class="key">{"".join(items)}</div>'


def _escaped(text: str) -> str:
    return text if isinstance(text, Raw) else escape(text)
