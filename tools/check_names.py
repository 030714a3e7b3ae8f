"""Says where a name breaks the house rules: `python tools/check_names.py [FOLDER ...]`. Exits with 1 where one does.

A local is called what it holds, never found, told, asked, said, given, made, kept, known, shown or wanted. And no two
public classes of the packages share a name, so that a name in a message or in a search leads to one place.
"""

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

VAGUE = frozenset(["found", "told", "asked", "said", "given", "made", "kept", "known", "shown", "wanted"])
FOLDERS = ("packages", "benchmarks", "integration_tests", "engine_tests", "tools", "docs")


def vague_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and name of each variable, parameter and function with a vague name. Attributes are not looked at."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        elif isinstance(node, ast.arg):
            name = node.arg
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ExceptHandler | ast.MatchAs | ast.MatchStar):
            name = node.name
        else:
            continue
        if name in VAGUE:
            yield node.lineno, name


def main(folders: list[str]) -> int:
    mistakes: list[str] = []
    classes: dict[str, list[str]] = defaultdict(list)
    for path in sorted(path for folder in folders for path in Path(folder).rglob("*.py") if "build" not in path.parts):
        tree = ast.parse(path.read_text(), str(path))
        mistakes += [f"{path}:{line}: {name!r} does not say what it holds" for line, name in vague_names(tree)]
        if "src" in path.parts:
            public = [node for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
            for node in public:
                classes[node.name].append(f"{path}:{node.lineno}")
    mistakes += [f"{name} is a class in {' and '.join(places)}" for name, places in classes.items() if len(places) > 1]
    print("\n".join(mistakes) or "names: no vague ones, and no class name twice")
    return 1 if mistakes else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or list(FOLDERS)))
