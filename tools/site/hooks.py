"""Events of MkDocs: adds the generated pages and the linked files of the repository, and renders formulas as MathML."""

from __future__ import annotations

import html
import re
from fnmatch import fnmatch
from typing import Any

from api_pages import api_pages
from command_page import command_page
from key_pages import key_pages
from latex2mathml.converter import convert  # pyright: ignore[reportMissingImports]
from linked_files import LinkedFiles
from mkdocs.structure.files import File, Files, InclusionLevel  # pyright: ignore[reportMissingImports]
from notebook_pages import linked_to_pages, notebook_pages
from recipe_pages import recipe_pages
from search_boosts import search_boost, without_empty_sections

_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[\[(](.*?)\\[\])]</\1>', re.DOTALL)
_LINKED = LinkedFiles()
REFERENCE = """
Reference: the [recipes](reference/recipes.md), the keys of a recipe for [language
models](reference/keys-reasoning.md) and for [robots](reference/keys-embodied.md), the
[commands](reference/commands.md), and the Python packages ([rlinf](reference/api/rlinf.md),
[algorithms](reference/api/rlinf_algos.md), [environments](reference/api/rlinf_envs.md),
[workers](reference/api/rlinf_workers.md), [planner](reference/api/rlinf_sched.md),
[communication](reference/api/rlinf_comm.md)).
"""
RECIPES = "The reference has [a page for each recipe](reference/recipes.md) with the keys that it sets."


def on_files(files: Files, *, config: Any) -> Files:
    """Adds the reference pages, the notebooks and the linked files, and replaces the patterns of the navigation by
    their pages."""
    generated = {**key_pages(), **command_page(), **recipe_pages(), **api_pages(), **notebook_pages()}
    for uri, text in generated.items():
        files.append(File.generated(config, uri, content=text))
    pages = {file.src_uri: file.content_string for file in files.documentation_pages()}
    for uri, content in _LINKED.collect(pages).items():
        files.append(File.generated(config, uri, content=content, inclusion=InclusionLevel.NOT_IN_NAV))
    listed = set(_pages_of(config.nav))
    unlisted = [uri for uri in pages if uri not in listed]
    config.nav = _expanded(config.nav, unlisted)
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Redirects links to files of the repository to their copies in the site. Two pages link to the reference, which a
    code host does not have. Sets the page's rank in the search."""
    page.meta["search"] = {"boost": search_boost(page.file.src_uri)}
    markdown = markdown.replace("<!-- reference -->", REFERENCE).replace("<!-- recipes -->", RECIPES)
    return _LINKED.redirected(page.file.src_uri, linked_to_pages(markdown))


def on_page_content(content: str, *, page: Any, config: Any, files: Files) -> str:
    """Converts formulas, which browsers draw without a script; lists only the sections of a reference page; keeps
    sections without text out of the search."""
    if page.file.src_uri.startswith("reference/") and "/api/" not in page.file.src_uri:
        for title in page.toc:
            for section in title.children:
                section.children = []
    return _FORMULA.sub(_mathml, without_empty_sections(content))


def _mathml(match: re.Match[str]) -> str:
    display = "block" if match[1] == "div" else "inline"
    return f'<{match[1]} class="formula">{convert(html.unescape(match[2]), display=display)}</{match[1]}>'


def _pages_of(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    entries = nav.values() if isinstance(nav, dict) else nav
    return [page for entry in entries for page in _pages_of(entry)]


def _expanded(nav: Any, unlisted: list[str]) -> Any:
    """Replaces each pattern by the matching pages of its folder, sorted."""
    if isinstance(nav, dict):
        return {title: _expanded(entries, unlisted) for title, entries in nav.items()}
    if isinstance(nav, str):
        return nav
    result = []
    for entry in nav:
        if isinstance(entry, str) and "*" in entry:
            depth = entry.count("/")
            pages = (uri for uri in unlisted if fnmatch(uri, entry) and uri.count("/") == depth)
            result += sorted(pages, key=lambda uri: uri.removesuffix(".md"))  # a package before its modules
            continue
        expanded = _expanded(entry, unlisted)
        if not isinstance(expanded, dict) or all(expanded.values()):  # a section without pages is left out
            result.append(expanded)
    return result
