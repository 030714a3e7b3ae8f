"""Finds the public names of the packages and their docstrings in the sources, without importing them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import tomllib  # pyright: ignore[reportMissingImports] - Python 3.11

REPOSITORY = Path(__file__).parents[2]
PACKAGES = ("rlinf", "rlinf_workers", "rlinf_comm", "rlinf_sched", "rlinf_algos", "rlinf_envs")
OF_RLINF = ("rlinf.jobs.base", "rlinf.jobs.spec")
"""Modules of rlinf that a custom job uses; the other packages state theirs in the root pyproject.toml."""
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True, kw_only=True, slots=True)
class PublicName:
    """One public name.

    Example: PublicName(module="rlinf_algos", name="gae", defined_in="rlinf_algos.advantages.gae", docstring="...")
    """

    module: str
    """The module from which users import it."""
    name: str
    defined_in: str
    """The module with its definition."""
    docstring: str | None
    """The docstring of a function or class; the string below an assignment."""


def public_modules() -> list[str]:
    """Returns the public modules of all packages, those of one package together."""
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    (stated,) = [contract["public_modules"] for contract in contracts if contract["type"] == "public_api"]
    modules = [*stated, *OF_RLINF]
    return [
        name
        for package in PACKAGES
        for name in [package, *sorted(module for module in modules if module.partition(".")[0] == package)]
    ]


def public_names(module: str) -> Iterator[PublicName]:
    """Yields the public names of a module: those of its stub, of its `__all__`, or what it defines without underscore.

    A package without any yields the names of its modules.
    """
    file = module_file(module)
    stub = file.with_suffix(".pyi")
    listed = _imported_names(ast.parse(stub.read_text(encoding="utf-8")), module) if stub.is_file() else {}
    tree = _parsed(file)
    if not listed:
        sources = _imported_names(tree, module)
        listed = {name: sources.get(name, (module, name)) for name in _all_of(tree) or _defined(tree)}
    for name, (source, original) in listed.items():
        if name != "__version__":
            defined_in, docstring = _definition(source, original)
            yield PublicName(module=module, name=name, defined_in=defined_in, docstring=docstring)
    if not listed and file.name == "__init__.py":
        for inner in sorted(file.parent.glob("[!_]*.py")):
            yield from public_names(f"{module}.{inner.stem}")


def module_file(module: str) -> Path:
    """Returns the file of a module; a compiled module has a stub alone."""
    package, *inner = module.split(".")
    path = REPOSITORY.joinpath("packages", package.replace("_", "-"), "src", package, *inner)
    files = (path / "__init__.py", path.with_suffix(".py"), path.with_suffix(".pyi"))
    return next(file for file in files if file.is_file())


def _parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def _imported_names(tree: ast.Module, module: str) -> dict[str, tuple[str, str]]:
    """Returns name -> (module, name there) of all `from ... import`."""
    is_package = module_file(module).name == "__init__.py"
    names = {}
    for node in tree.body:
        if not isinstance(node, ast.ImportFrom):
            continue
        parents = module.split(".")[: len(module.split(".")) - node.level + is_package] if node.level else []
        source = ".".join([*parents, *([node.module] if node.module else [])])
        if source.partition(".")[0] in PACKAGES:
            names |= {alias.asname or alias.name: (source, alias.name) for alias in node.names}
    return names


def _all_of(tree: ast.Module) -> list[str]:
    """Returns the entries of `__all__`, which may be extended with `+=`."""
    names: list[str] = []
    for node in tree.body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AugAssign) else []
        )
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            assert isinstance(node, ast.Assign | ast.AugAssign)
            if isinstance(node.value, ast.List | ast.Tuple):
                names += ast.literal_eval(node.value)
    return names


def _defined(tree: ast.Module) -> list[str]:
    """Returns the functions, classes and documented constants without a leading underscore."""
    documented = [node for node, following in pairwise([*tree.body, None]) if node and _text_of(following)]
    nodes = [node for node in tree.body if isinstance(node, DEFINITIONS) or node in documented]
    return [name for node in nodes for name in _targets(node) if not name.startswith("_")]


def _text_of(node: ast.stmt | None) -> str | None:
    """Returns the text of a statement that is nothing but a string."""
    value = node.value if isinstance(node, ast.Expr) else None
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else None


def _targets(node: ast.stmt) -> list[str]:
    """Returns the names that a statement defines."""
    if isinstance(node, DEFINITIONS):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]


def _definition(module: str, name: str) -> tuple[str, str | None]:
    """Returns the module that defines a name, and its docstring."""
    file = module_file(module)
    body = _parsed(file).body
    for node, following in pairwise([*body, None]):
        if node is None or name not in _targets(node):
            continue
        if not isinstance(node, DEFINITIONS):
            return module, _text_of(following)
        if not any(isinstance(one, ast.Name) and one.id == "overload" for one in node.decorator_list):
            return module, ast.get_docstring(node)
    stub = file.with_suffix(".pyi")
    for tree in [ast.parse(stub.read_text(encoding="utf-8"))] if stub.is_file() else []:
        if name in (sources := _imported_names(tree, module)):
            return _definition(*sources[name])
    if name in (sources := _imported_names(_parsed(file), module)):
        return _definition(*sources[name])
    raise LookupError(f"{module} has no {name}")
