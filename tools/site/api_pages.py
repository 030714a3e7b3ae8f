"""The reference pages of the Python packages: a page for each public module, filled in by mkdocstrings."""

from __future__ import annotations

import ast

from public_names import module_file, public_modules, public_names


def api_pages() -> dict[str, str]:
    """Returns path below docs/ -> Markdown of the page of every public module."""
    return {f"reference/api/{module}.md": _page(module) for module in public_modules()}


def _page(module: str) -> str:
    about = ast.get_docstring(ast.parse(module_file(module).read_text(encoding="utf-8"))) or ""
    directives = [f"::: {name.defined_in}.{name.name}" for name in public_names(module)]
    behind_guides = "---\nsearch: {boost: 0.5}\n---"  # a key or a guide is what most queries look for
    return "\n\n".join([behind_guides, f"# {module}", about, *directives, ""])
