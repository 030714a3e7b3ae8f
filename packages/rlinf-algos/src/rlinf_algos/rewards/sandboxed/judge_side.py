"""Runs the tests of a graded program, which runs in another sandbox. A standalone script.

The tests see the program's names. Functions and objects are proxies that call the program's process; results are plain
data, created and compared here. A proxy equals no plain data, is not ordered, and checks membership by comparing its
elements here, so no `__eq__` of the program decides a comparison with a value of the tests. A list, dict or set that a
call changes is changed here, too. A module under its own name is imported here, not taken from the program. What the
program wrote is not run here (guard.py).
Writes {"passed": true}, {"passed": false, "detail": ...} or {"gone": true} to standard output.
"""

import ast
import builtins
import ctypes
import importlib
import json
import linecache
import os
import sys
import traceback

TYPE_CHECKING = False  # importing typing takes longer than the rest
if TYPE_CHECKING:
    from typing import Any

PR_SET_DUMPABLE = 4
SHORT_NAMES = {"np": "numpy", "pd": "pandas", "plt": "matplotlib.pyplot"}
LIBRARY = (
    "math", "cmath", "collections", "functools", "itertools", "operator", "statistics", "fractions", "decimal",
    "typing", "heapq", "bisect", "copy", "string", "datetime", "dataclasses", "re", "json", "random",
)  # fmt: skip
TESTS = "tests.py"


class ProgramError(Exception):
    """An exception of the program that is not built into Python."""


def main():
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    verdict = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    tests = sys.stdin.read()
    sys.path.insert(0, os.getcwd())
    from wire import Gone

    try:
        passed = run(tests)
    except Gone:
        passed = {"gone": True}
    os.write(verdict, json.dumps(passed).encode())


def run(tests: str):
    from guard import guard

    wire, list_names = make_wire()
    names = {"__name__": "__main__"}
    linecache.cache[TESTS] = (len(tests), None, [line + "\n" for line in tests.splitlines()], TESTS)
    try:
        tree = ast.parse(tests)
        program = names_for(tree, list_names())
        wire.has_text = any(isinstance(value, str | bytes | list | tuple | set | dict) for value in program.values())
        names |= program
        code = compile(tests, TESTS, "exec")
        guard(tree, lambda: wire.has_text)
        exec(code, names)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - any exception of the tests is their verdict
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == TESTS]
        where = f" in `{(frames[-1].line or '')[:100]}`" if frames else ""
        return {"passed": False, "detail": f"{type(error).__name__}: {error}"[:300] + where}
    return {"gone": True} if wire.is_gone else {"passed": True}


def names_for(tests: ast.Module, listing: "list[Any]"):
    """The names that the tests see, from the program or in place of its names.

    A well-known name (`abs`, `isclose`, `Counter`) is the judge's, since a program could replace it by one that finds
    everything equal; unless it is the only one of the program's names that the tests use, since then they test it.
    """
    used = {node.id for node in ast.walk(tests) if isinstance(node, ast.Name)}
    program = {name: value for name, is_module, value in listing if name in used and not is_module}
    names = {name: imported(name) for name, is_module, _ in listing if is_module and name in used}
    originals = well_known(set(program))
    is_tested_alone = len(program) == 1
    return names | {name: value if is_tested_alone else originals.get(name, value) for name, value in program.items()}


def well_known(names: set[str]):
    """Name -> object, for the names that are built in or belong to a common module of the standard library."""
    objects = {name: getattr(builtins, name) for name in names if hasattr(builtins, name)}
    for module in map(importlib.import_module, LIBRARY):
        objects |= {name: getattr(module, name) for name in names - set(objects) if name in vars(module)}
    return objects


def imported(name: str):
    """A module that the program imported under its own name or a common short one; None for others."""
    module: str = SHORT_NAMES.get(name, name)
    if module == name and name not in sys.stdlib_module_names:
        return None
    try:
        return importlib.import_module(module)
    except ImportError:
        return None


def make_wire():
    """The connection to the program, and a function that requests the program's names."""
    from guard import name_of, runs_here
    from wire import Wire

    def ask(*question: "Any"):
        return result_of(wire, wire.ask(*question))

    class Remote:
        """Proxy of an object of the program."""

        __slots__ = ("_number",)

        def __init__(self, number: int):
            object.__setattr__(self, "_number", number)

        def __call__(self, *arguments: "Any", **named: "Any"):
            message = wire.ask("call", self._number, wire.encode(arguments), wire.encode(named))
            result = result_of(wire, message)
            for before, after in zip(arguments, wire.decode(message[2]), strict=False):
                write_back(before, after)
            return result

        def __getattr__(self, name: str):
            if name.startswith("__"):
                raise AttributeError(name)
            return ask("get", self._number, name)

        def __setattr__(self, name: str, value: "Any"):
            ask("set", self._number, name, wire.encode(value))

        def __getitem__(self, key: object):
            return ask("item", self._number, wire.encode(key))

        def __setitem__(self, key: object, value: "Any"):
            ask("put", self._number, wire.encode(key), wire.encode(value))

        def __iter__(self):
            return ask("iter", self._number)

        def __next__(self):
            return result_of(wire, wire.ask("next", self._number), may_stop=True)

        def __contains__(self, member: object):
            return any(item == member for item in iter(self))

        def __len__(self):
            return ask("len", self._number)

        def __bool__(self):
            return ask("bool", self._number) is True

        def __str__(self):
            return ask("text", self._number)

        def __eq__(self, other: object) -> bool:
            if type(other) is not Remote:
                return False
            return self._number == other._number or ask("equal", self._number, wire.encode(other)) is True

        def __hash__(self) -> int:
            return self._number

    def serve(question: "list[Any]") -> "list[Any]":
        """Answers a call of a function that was passed to the program."""
        try:
            what, number, arguments, named = question
            if what != "call":
                raise ValueError(f"the program may not ask {what!r}")
            function = wire.object(number)
            if not runs_here(function, TESTS):
                raise TypeError(f"the program may not call {type(function).__name__!r} objects of the tests")
            result = function(*wire.decode(arguments), **wire.decode(named))  # pyright: ignore[reportCallIssue]
            return ["value", wire.encode(result)]
        except Exception as error:  # noqa: BLE001 - sent to the other side
            return ["raised", type(error).__name__, str(error)[:500]]

    def unwrap(value: "Any"):
        return value._number if type(value) is Remote else None  # pyright: ignore[reportPrivateUsage]

    wire = Wire(3, 4, wrap=Remote, unwrap=unwrap, serve=serve, name_of=name_of)
    return wire, lambda: ask("names")


def result_of(wire: "Any", message: "list[Any]", may_stop: bool = False):
    """Raises: the exception that the program's process reported. As in generators, StopIteration becomes RuntimeError
    unless `may_stop`: it would end the tests' `for` or `all(map(...))` over calls before anything is compared."""
    if message[0] == "value":
        return wire.decode(message[1])
    wire.has_text = True
    kind = getattr(builtins, str(message[1]), None)
    if kind in (StopIteration, StopAsyncIteration) and not may_stop:
        raise RuntimeError(f"the program raised {message[1]}: {message[2]}")
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, UnicodeError):
        raise kind(message[2])
    raise ProgramError(f"{message[1]}: {message[2]}")


def write_back(before: "Any", after: "Any"):
    """Applies the changes that the call made to an argument."""
    if type(before) is not type(after) or before == after:
        return
    if isinstance(before, list):
        before[:] = after
    elif isinstance(before, dict | set):
        before.clear()
        before.update(after)


if __name__ == "__main__":
    main()
