"""The reference pages of the shipped recipes: what each sets, with the comments of its file, and how to run it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from rlinf.config.catalog import read_recipe, recipe_text, shipped_recipes
from rlinf.config.yaml_source import Tree, dump, parse_file


def recipe_pages() -> dict[str, str]:
    """Returns path below docs/ -> Markdown of the list of recipes and of the page of each."""
    recipes = shipped_recipes()
    rows = [f"| [{name}](recipes/{name}.md) | {text} |" for name, text in recipes.items()]
    index = "\n".join(["# Recipes", "", "| recipe | what it does |", "|---|---|", *rows, ""])
    return {"reference/recipes.md": index, **{f"reference/recipes/{name}.md": _page(name) for name in recipes}}


def _page(name: str) -> str:
    text = recipe_text(name)
    tree = read_recipe(name)
    job = tree.values["job"]
    base = parse_file(text, f"{name}.yaml").values.get("extends")
    parts = [f"# {name}", *_introduction(text)]
    parts.append("These are the keys that it sets." if base is None else f"It extends [{base}]({base}.md). Both set:")
    parts.append("```yaml\n" + "\n".join(_lines(tree, tree.values, ())) + "\n```")
    parts.append(
        f"All other keys have their defaults: see the [reference of keys](../keys-{job.replace('_', '-')}.md). "
        f"`rlinf config show {name}` prints every key with its value, and takes the overrides of `rlinf train`."
    )
    return "\n\n".join([*parts, ""])


def _introduction(text: str) -> Iterator[str]:
    """Yields the paragraphs of the comment at the head of a recipe; indented ones are commands."""
    head: list[str] = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        head.append(line.removeprefix("#").removeprefix(" "))
    for paragraph in "\n".join(head).split("\n\n"):
        if paragraph.startswith("  "):
            yield f"```bash\n{textwrap.dedent(paragraph)}\n```"
        else:
            yield paragraph.replace("<", "&lt;")


def _lines(tree: Tree, values: Mapping[str, Any], key: tuple[str, ...]) -> Iterator[str]:
    """Yields the lines of a section; a key that is one line of its file is that line, with the comment on it."""
    indent = "  " * len(key)
    for name, value in values.items():
        above, line = _source(tree.places.get((*key, name), ""))
        yield from (f"{indent}{comment}" for comment in above)
        if line.startswith(f"{name}:") and parse_file(line, "").values == {name: value}:
            yield indent + line
        elif isinstance(value, dict) and value:
            yield f"{indent}{name}:"
            yield from _lines(tree, value, (*key, name))
        else:
            yield textwrap.indent(dump({name: value}).rstrip("\n"), indent)


def _source(place: str) -> tuple[list[str], str]:
    """Returns the lines of comment above a place (`file:line`), and the line itself."""
    file, _, number = place.rpartition(":")
    if not file:
        return [], ""
    lines = [line.strip() for line in recipe_text(file.removesuffix(".yaml")).splitlines()]
    index = first = int(number) - 1
    while first and lines[first - 1].startswith("#"):
        first -= 1
    return (lines[first:index] if first else []), lines[index]  # the head of the file belongs to no key
