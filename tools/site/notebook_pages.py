"""The notebooks of docs/notebooks as pages: their text and code, without outputs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
_LINK = re.compile(r"(?<=\]\()([^)\s:]+)\.ipynb(?=[#)])")


def notebook_pages() -> dict[str, str]:
    """Returns path below docs/ -> Markdown of the page of each notebook."""
    folder = REPOSITORY / "docs" / "notebooks"
    return {f"notebooks/{path.stem}.md": _page(path) for path in sorted(folder.glob("*.ipynb"))}


def linked_to_pages(markdown: str) -> str:
    """Returns Markdown whose links to notebooks lead to their pages."""
    return _LINK.sub(r"\1.md", markdown)


def _page(path: Path) -> str:
    title, *cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    note = f'A test executes every cell of this notebook. <a href="{path.name}" download>Download it</a> to run it.'
    return "\n\n".join([linked_to_pages("".join(title["source"])), note, *map(_cell, cells), ""])


def _cell(cell: dict[str, Any]) -> str:
    text = "".join(cell["source"])
    return linked_to_pages(text) if cell["cell_type"] == "markdown" else f"```python\n{text}\n```"
