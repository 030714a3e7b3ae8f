"""Prevents the judge from running what the program wrote. Copied into the judge's sandbox; imports nothing of ours.

Tests may pass functions to the program, and may evaluate text that it returns. Importable objects (`exec`, `os.system`,
`str.upper`) are sent by name, and the program gets those of its own process; only functions and classes that the tests
define run here when the program calls them. Text with calls or attributes is evaluated only if it is part of the tests,
or as long as the program has sent no text; objects are unpickled only if they are data.
"""

import ast
import builtins
import functools
import os
import sys
import types

TYPE_CHECKING = False  # importing typing takes longer than the rest
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import Any

CONTAINERS = (list, dict, set, bytearray, str, bytes, tuple, frozenset)
NEEDS_TRUST = (ast.stmt, ast.Call, ast.Attribute, ast.Lambda, ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom)
EVALUATING = ("timeit", "threading", "concurrent.futures.thread", "sympy.parsing.sympy_parser")
"""Modules that evaluate text, or call `eval`, for others. Other modules evaluate only text of their own."""
DATA = {
    "builtins": {"set", "frozenset", "bytearray", "complex", "range", "slice"},
    "collections": {"OrderedDict", "Counter", "defaultdict", "deque"},
    "datetime": {"date", "datetime", "time", "timedelta", "timezone"},
    "decimal": {"Decimal"},
    "fractions": {"Fraction"},
    "numpy": {"ndarray", "dtype"},
    "numpy.core.multiarray": {"_reconstruct", "scalar"},
    "numpy._core.multiarray": {"_reconstruct", "scalar"},
}
"""The names that an unpickled text may contain: module -> names."""


class TextOfTheProgram(Exception):
    """Raised if the tests would run what the program wrote."""


def name_of(value: "Any"):
    """Module and name of an importable object; None for anything else."""
    if isinstance(value, types.ModuleType):
        return value.__name__, ""
    if not callable(value):
        return None
    owner = getattr(value, "__objclass__", None) or getattr(value, "__self__", None)
    modules = (getattr(value, "__module__", None), getattr(owner, "__module__", None), type(value).__module__)
    for module in modules:
        if not isinstance(module, str) or module == "__main__" or module not in sys.modules:
            continue
        for name in (getattr(value, "__qualname__", None), getattr(value, "__name__", None)):
            if isinstance(name, str) and member(sys.modules[module], name) == value:
                return module, name
    return None


def member(module: "Any", name: str):
    """The member of the module with that qualified name; None if there is none."""
    for part in name.split("."):
        module = getattr(module, part, None)
    return module


def runs_here(value: "Any", tests: str) -> bool:
    """Whether the program may call this object of the judge, because the tests, the file `tests`, define it."""
    if isinstance(value, types.FunctionType):
        return value.__code__.co_filename == tests
    if isinstance(value, types.MethodType):
        return runs_here(value.__func__, tests)
    if isinstance(value, functools.partial):
        return runs_here(value.func, tests)
    if isinstance(value, functools._lru_cache_wrapper):  # pyright: ignore[reportPrivateUsage]
        return runs_here(value.__wrapped__, tests)
    if isinstance(value, types.BuiltinMethodType):
        return type(value.__self__) in CONTAINERS
    if isinstance(value, type):
        return value.__module__ == "__main__"
    calls = [vars(kind)["__call__"] for kind in type(value).__mro__ if "__call__" in vars(kind)]
    return bool(calls) and isinstance(calls[0], types.FunctionType) and runs_here(calls[0], tests)


def guard(tests: ast.Module, has_text: "Callable[[], bool]"):
    """Makes `eval`, `exec`, `compile` and unpickling refuse what the program may have written.

    Args:
        tests: the syntax tree of the tests.
        has_text: whether the program has sent text.
    """
    constants = {node.value for node in ast.walk(tests) if isinstance(node, ast.Constant)}
    for function in (eval, exec, compile):
        setattr(builtins, function.__name__, guarded(function, constants, has_text))

    def hook(event: str, arguments: "Any"):
        if event == "pickle.find_class" and has_text() and arguments[1] not in DATA.get(arguments[0], ()):
            raise TextOfTheProgram(f"the tests may not unpickle {'.'.join(arguments)} that the program wrote")

    sys.addaudithook(hook)


def guarded(function: "Any", constants: "set[Any]", has_text: "Callable[[], bool]"):
    """The built-in function with the check, for tests with these constants."""

    @functools.wraps(function)
    def checked(source: "Any", *arguments: "Any", **named: "Any"):
        caller = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
        has_namespace = function is not compile and bool(arguments or named)
        if has_text() and needs_check(caller) and not is_constant(source, constants):
            check(source, may_name=has_namespace)
        if function is not compile and not has_namespace:
            arguments = (caller.f_globals, caller.f_locals)
        return function(source, *arguments, **named)

    return checked


def needs_check(caller: "FrameType"):
    """Whether the caller is the tests, text that they evaluate, or a module that evaluates text for them."""
    return not os.path.isabs(caller.f_code.co_filename) or caller.f_globals.get("__name__") in EVALUATING


def is_constant(source: object, constants: "set[Any]"):
    return isinstance(source, types.CodeType) or (isinstance(source, str | bytes) and source in constants)


def check(source: "Any", may_name: bool):
    """Raises TextOfTheProgram if the text does more than compute a value from values, or from the names in a namespace
    that the tests pass to it."""
    text = bytes(source).decode("utf-8", "replace") if isinstance(source, bytes | bytearray) else source
    tree = ast.parse(text.strip(" \t\n")) if isinstance(text, str) else text
    statements = tree.body if isinstance(tree, ast.Module) else [tree]
    parts = [one.value if isinstance(one, ast.Expr) else one for one in statements]
    refused = NEEDS_TRUST if may_name else (*NEEDS_TRUST, ast.Name)
    if any(isinstance(node, refused) for part in parts for node in ast.walk(part)):
        raise TextOfTheProgram("the tests may evaluate text from the program only if it has no calls and attributes")
