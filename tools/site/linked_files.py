"""Copies files of the repository that the docs link to into the site, so that every link works without a code host."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
FOLDER = "files"
"""The folder of the site with the copies, in which they have their paths in the repository."""
LANGUAGES = {".py": "python", ".cc": "cpp", ".h": "cpp", ".cu": "cpp", ".yaml": "yaml", ".yml": "yaml", ".sh": "bash"}
"""Ending -> language of a file that becomes a page; other files are copied as they are."""
_LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")


class LinkedFiles:
    """The linked files, and the links to them."""

    def __init__(self) -> None:
        self._targets: dict[str, str] = {}
        """Path in the repository -> path in the site."""

    def collect(self, pages: Mapping[str, str]) -> dict[str, str]:
        """Returns path in the site -> content of all files outside docs/ that pages link to, directly or through
        another such page.

        Args:
            pages: path below docs/ -> Markdown.
        """
        self._targets = {}
        contents: dict[str, str] = {}
        waiting = dict(pages)
        while waiting:
            uri, text = waiting.popitem()
            for link, _ in _LINK.findall(text):
                path = _repository_path(uri, link)
                if path in self._targets or path.startswith("docs/") or not (REPOSITORY / path).exists():
                    continue
                target, content = _copy(path)
                self._targets[path] = target
                contents[target] = content
                if target.endswith(".md"):
                    waiting[target] = content
        return contents

    def redirected(self, uri: str, markdown: str) -> str:
        """Returns the Markdown of a page with links to the copies."""

        def redirect(match: re.Match[str]) -> str:
            path = _repository_path(uri, match[1])
            if path in self._targets:
                target = self._targets[path]
            elif path.startswith("docs/") and uri.startswith(f"{FOLDER}/"):
                target = path.removeprefix("docs/")
            else:
                return match[0]
            return os.path.relpath(target, os.path.dirname(uri) or ".") + (match[2] or "")

        return _LINK.sub(redirect, markdown)


def _repository_path(uri: str, link: str) -> str:
    """Returns the path in the repository to which a link of a page leads."""
    page = uri.removeprefix(f"{FOLDER}/") if uri.startswith(f"{FOLDER}/") else f"docs/{uri}"
    page = page.removesuffix("/index.md") + "/x" if page.endswith("/index.md") and uri != "index.md" else page
    return os.path.normpath(os.path.join(os.path.dirname(page), link))


def _copy(path: str) -> tuple[str, str]:
    """Returns the path in the site and the content there of a file or folder."""
    source = REPOSITORY / path
    hidden = "---\nsearch: {exclude: true}\n---\n\n"
    if source.is_dir():
        names = sorted(child.name for child in source.iterdir() if child.is_file() and child.name != "__init__.py")
        return f"{FOLDER}/{path}/index.md", f"{hidden}# {path}\n\n" + "".join(f"- [{name}]({name})\n" for name in names)
    text = source.read_text(encoding="utf-8")
    if source.suffix == ".md":
        return f"{FOLDER}/{path}", text
    if source.suffix in LANGUAGES:
        code = f'````{LANGUAGES[source.suffix]} linenums="1"\n{text}````\n'
        return f"{FOLDER}/{path}.md", f"{hidden}# {path}\n\n{code}"
    return f"{FOLDER}/{path}", text
