"""Reads problem files: a `Problem` as JSON or YAML. See docs/problem-file.md.

YAML requires PyYAML. Departs from its defaults: `1e-6` is a number (as in YAML 1.2), and a duplicate key in a mapping
is an error.
"""

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

from rlinf_sched import strict_json
from rlinf_sched.errors import ProblemError, SchedError
from rlinf_sched.problem import Problem
from rlinf_sched.problem_shorthand import expand

SUFFIXES = (".json", ".yaml", ".yml")
MAX_DEPTH = 20
"""Maximum nesting depth: more than any problem has, so only a self-referential YAML file exceeds it."""
MAX_VALUES = 1_000_000
"""Maximum number of values: more than any problem has. A few lines of YAML that refer to one another can expand to
billions."""

MAX_BYTES = 64 << 20
MAX_DIGITS = 100
"""Maximum characters of an integer; Python takes quadratic time for long ones and refuses to print them."""

_FLOAT = re.compile(
    r"[-+]?(?:(?:\d+\.\d*|\.\d+)(?:[eE][-+]?\d+)?|\d+[eE][-+]?\d+|\.(?:inf|Inf|INF))$|\.(?:nan|NaN|NAN)$"
)


def read_problem(path: str | Path) -> Problem:
    """The problem in a file; its name ends in .json, .yaml or .yml.

    Raises:
        SchedError: the file cannot be read, is neither JSON nor YAML, or describes no valid problem; the message begins
            with the file's name and names the key.
    """
    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise ProblemError(f"{path}: the name of a problem file ends in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}")
    try:
        if (num_bytes := path.stat().st_size) > MAX_BYTES:
            raise ProblemError(f"{path}: has {num_bytes:,} bytes; a problem file has at most {MAX_BYTES:,}")
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as e:
        raise ProblemError(f"{path}: not UTF-8 text: {e.reason} at byte {e.start}") from e
    except OSError as e:
        raise ProblemError(f"{path}: {e.strerror or e}") from e
    try:
        tree = strict_json.parse(text, root="problem", error=ProblemError) if path.suffix == ".json" else _yaml(text)
        return problem_of_tree(tree)
    except SchedError as e:
        raise type(e)(f"{path}: {e}") from e


def problem_of_tree(tree: Any) -> Problem:
    """The problem that nested dicts and lists describe, shorthands included; it has passed `Problem.validate`.

    Raises:
        SchedError: names the key, what was allowed and the nearest right name.
    """
    problem = Problem.from_tree(expand(tree))
    problem.validate()
    return problem


def _yaml(text: str) -> Any:
    try:
        import yaml
    except ImportError:
        raise ProblemError("reading YAML needs PyYAML; install it (pip install pyyaml) or write JSON") from None

    class Loader(yaml.SafeLoader):
        """Plain values only: no timestamps, YAML 1.2's floats."""

    Loader.yaml_implicit_resolvers = {
        letter: [(tag, pattern) for tag, pattern in resolvers if tag.rpartition(":")[2] not in ("float", "timestamp")]
        for letter, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))
    try:
        loader = Loader(text)
        node = loader.get_single_node()
        if node is None:
            raise ProblemError("the file is empty; a problem has the keys flow, profiles, cluster and num_items")
        _refuse_duplicates(yaml, node)
        return loader.construct_document(node)
    except yaml.MarkedYAMLError as e:
        line = f" at line {e.problem_mark.line + 1}" if e.problem_mark else ""
        text = ", ".join(part for part in (e.context, e.problem) if part)
        raise ProblemError(f"problem is not valid YAML: {text}{line}") from e
    except yaml.YAMLError as e:
        raise ProblemError(f"problem is not valid YAML: {str(e).splitlines()[0]}") from e
    except RecursionError:
        raise ProblemError("problem is not valid YAML: it is nested too deep") from None
    except SchedError:
        raise
    except (KeyError, AttributeError, TypeError) as e:  # of PyYAML, for `!!bool word` and the like
        raise ProblemError(f"problem is not valid YAML: {e!r}") from e
    except ValueError as e:  # a number that YAML's form allows and Python does not
        raise ProblemError(f"problem is not valid YAML: {e}") from e


def _refuse_duplicates(yaml: Any, root: Any) -> None:
    """Walks every node as often as it is referred to."""
    waiting, num_values = [(root, 0)], 0
    while waiting:
        node, depth = waiting.pop()
        num_values += 1
        if depth > MAX_DEPTH or num_values > MAX_VALUES:
            raise ProblemError(f"problem, line {node.start_mark.line + 1}: nested too deep; does it refer to itself?")
        is_int = isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:int"
        if is_int and (len(node.value) > MAX_DIGITS or ":" in node.value):
            raise ProblemError(f"problem, line {node.start_mark.line + 1}: {node.value!r:.60} is no whole number")
        if isinstance(node, yaml.SequenceNode):
            waiting += [(entry, depth + 1) for entry in node.value]
        if not isinstance(node, yaml.MappingNode):
            continue
        lines: dict[Hashable, int] = {}
        for name, value in node.value:
            line = name.start_mark.line + 1
            if not isinstance(name, yaml.ScalarNode):
                raise ProblemError(f"problem, line {line}: a key must be text")
            if name.value in lines and name.value != "<<":
                raise ProblemError(
                    f"problem, line {line}: the key {name.value!r} is already on line {lines[name.value]}; keep one"
                )
            lines[name.value] = line
            waiting.append((value, depth + 1))
