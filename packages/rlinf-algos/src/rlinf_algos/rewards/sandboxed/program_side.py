"""Runs a graded program and lets the judge, in another sandbox, call it. A standalone script.

`calls`: standard input is {"function", "arguments": [[...], ...]}; standard output gets one line of JSON for each call,
until the program ends.
`serve`: the judge sends requests over the channel; see wire.py.
The program may do anything to this process: only data leaves it, which is judged elsewhere.
"""

import importlib
import json
import os
import sys
import traceback

TYPE_CHECKING = False  # importing typing takes longer than the rest
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

PROGRAM = "program.py"


def load():
    """Runs the program, discards its output, and returns its names."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    names = {"__name__": "__main__"}
    with open(PROGRAM, encoding="utf-8") as text:
        exec(compile(text.read(), PROGRAM, "exec"), names)
    return names


def find(names: "dict[str, Any]", function: str):
    """The function with that name, or the method of a class `Solution`."""
    if function not in names and "Solution" in names:
        return getattr(names["Solution"](), function)
    return names[function]


def calls():
    order = json.load(sys.stdin)
    results = os.fdopen(os.dup(1), "w", encoding="utf-8")
    names = load()
    for arguments in order["arguments"]:
        try:
            result = find(names, order["function"])(*arguments)
            line = json.dumps({"value": plain(result)})
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - sent to the other side
            traceback.print_exc(limit=-2)
            line = json.dumps({"raised": f"{type(error).__name__}: {error}"[:200]})
        print(line, file=results, flush=True)


def plain(value: "Any") -> "Any":
    """The value for JSON: numpy numbers become plain numbers, and arrays become lists."""
    if hasattr(value, "tolist") and type(value).__module__ == "numpy":
        return value.tolist()
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return value


def serve():
    sys.path.insert(0, os.getcwd())
    from wire import Gone, Wire

    sys.path.pop(0)

    class Callback:
        """A function of the tests."""

        def __init__(self, number: int):
            self.number = number

        def __call__(self, *arguments: "Any", **named: "Any"):
            return result_of(wire, wire.ask("call", self.number, wire.encode(arguments), wire.encode(named)))

    def unwrap(value: "Any"):
        return value.number if type(value) is Callback else None

    def answer(question: "list[Any]"):
        try:
            return serve_one(wire, names, *question)
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - sent to the other side
            return ["raised", type(error).__name__, str(error)[:500]]

    wire = Wire(3, 4, wrap=Callback, unwrap=unwrap, serve=answer, imported=imported)
    try:
        begin = wire.receive()  # the judge is ready
        names = load()
        wire.answer(begin)
        while True:
            wire.answer(wire.receive())
    except Gone:
        pass


def imported(module: str, name: str):
    """An object that the tests passed by name."""
    value = importlib.import_module(module)
    for part in filter(None, name.split(".")):
        value = getattr(value, part)
    return value


def serve_one(wire: "Any", names: "dict[str, Any]", what: str, *more: "Any"):
    """Answers one request of the judge."""
    if what == "names":
        public = {name: value for name, value in names.items() if not name.startswith("__")}
        kinds = {name: type(value).__name__ == "module" for name, value in public.items()}
        return ["value", wire.encode([[name, kinds[name], None if kinds[name] else public[name]] for name in public])]
    target, *operands = [wire.object(more[0]), *map(wire.decode, more[1:])]
    if what == "call":
        arguments, named = operands
        result = target(*arguments, **named)
        return ["value", wire.encode(result), wire.encode(arguments)]
    operations: dict[str, Callable[[], Any]] = {
        "get": lambda: getattr(target, *operands),
        "set": lambda: setattr(target, *operands),
        "item": lambda: target[operands[0]],
        "put": lambda: target.__setitem__(*operands),
        "iter": lambda: iter(target),
        "next": lambda: next(target),
        "len": lambda: len(target),
        "bool": lambda: bool(target),
        "text": lambda: str(target),
        "equal": lambda: bool(target == operands[0]),
    }
    return ["value", wire.encode(operations[what]())]


def result_of(wire: "Any", message: "list[Any]"):
    if message[0] == "raised":
        raise RuntimeError(f"{message[1]}: {message[2]}")
    return wire.decode(message[1])


if __name__ == "__main__":
    {"calls": calls, "serve": serve}[sys.argv[1]]()
