"""Finds recipes by name or path and merges the recipes they extend."""

from __future__ import annotations

import difflib
import importlib.resources
from pathlib import Path

from rlinf.config.loggers import with_sections
from rlinf.config.renamed import renamed_tree
from rlinf.config.yaml_source import Tree, merge, parse_file, read_file
from rlinf.errors import UserError

SUFFIXES = (".yaml", ".yml")


def shipped_recipes() -> dict[str, str]:
    """Returns name -> first comment line of the shipped recipes."""
    recipes = {}
    for entry in importlib.resources.files("rlinf.recipes").iterdir():
        if entry.name.endswith(".yaml"):
            first = entry.read_text(encoding="utf-8").splitlines()[0]
            recipes[entry.name.removesuffix(".yaml")] = first.removeprefix("#").strip()
    return dict(sorted(recipes.items()))


def recipe_text(name: str) -> str:
    """Returns the file of a shipped recipe."""
    return importlib.resources.files("rlinf.recipes").joinpath(f"{name}.yaml").read_text(encoding="utf-8")


def read_recipe(name: str) -> Tree:
    """Reads a recipe and all recipes it extends, merged, without the key `extends`.

    Args:
        name: a shipped recipe's name, or the path of a YAML file relative to the current folder.

    Raises: UserError for an unknown name, a file that is not YAML, and recipes that extend each other in a cycle.
    """
    return _read(name, Path(), "", ())


def shipped_suites() -> list[str]:
    """Returns the names of the shipped suites."""
    names = (entry.name for entry in importlib.resources.files("rlinf.suites").iterdir())
    return sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml"))


def read_suite(name: str) -> Tree:
    """Reads a shipped suite by name, or a suite from a YAML file. Raises: UserError for an unknown name."""
    if name in (shipped := shipped_suites()):
        text = importlib.resources.files("rlinf.suites").joinpath(f"{name}.yaml").read_text(encoding="utf-8")
        return parse_file(text, f"{name}.yaml")
    hint = f"shipped suites: {', '.join(shipped)}"
    if Path(name).suffix in SUFFIXES:
        return read_file(Path(name), named_by="--suite ", hint=hint)
    close = difflib.get_close_matches(name, shipped, n=1, cutoff=0.5)
    guess = f"; did you mean {close[0]}?" if close else ""
    raise UserError(f"--suite {name}: neither a shipped suite nor a YAML file{guess}", hint=hint)


def _read(name: str, folder: Path, named_by: str, above: tuple[str, ...]) -> Tree:
    """Paths are relative to `folder`; `above` lists the recipes that extend this one."""
    shipped = shipped_recipes()
    if name in shipped:
        identity, own_folder = name, Path()
        tree = parse_file(recipe_text(name), f"{name}.yaml")
    else:
        path = folder / name
        if path.suffix not in SUFFIXES:
            raise _unknown(name, path, named_by, list(shipped))
        identity, own_folder = str(path.resolve()), path.parent
        tree = read_file(path, named_by=named_by, hint=f"shipped recipes: {', '.join(shipped)}")
    if identity in above:
        raise UserError(f"{named_by}recipes extend one another in a circle: {' -> '.join([*above, identity])}")
    tree = renamed_tree(tree)
    if "extends" not in tree.values:
        return tree
    base = tree.values.pop("extends")
    place = tree.places.pop(("extends",))
    if not isinstance(base, str):
        raise UserError(f"{place}: extends={base!r} must be the name or the path of one recipe")
    return merge(with_sections(_read(base, own_folder, f"{place}: ", (*above, identity))), tree)


def _unknown(name: str, path: Path, named_by: str, shipped: list[str]) -> UserError:
    if path.is_file():
        return UserError(f"{named_by}{path}: a recipe's file ends in .yaml or .yml")
    close = difflib.get_close_matches(name, shipped, n=1, cutoff=0.5)
    guess = f"; did you mean {close[0]}?" if close else ""
    return UserError(
        f"{named_by}{name!r} is neither a shipped recipe nor a YAML file{guess}",
        hint=f"shipped recipes: {', '.join(shipped)}",
    )
