"""Runs one cell of Python after another for a `PythonSession`, as a notebook does. A standalone script.

Each request on descriptor 3 is a line of JSON, [number, code]; each reply on 4 is [number, "done" or "raised", name of
the exception]. What the cells print goes to standard output, as do the value of a last expression and tracebacks. The
cells may do anything to this process: what it replies is only data for the other side.
"""

import ast
import json
import linecache
import os
import random
import sys
import traceback
import types

if hasattr(sys, "set_int_max_str_digits"):
    sys.set_int_max_str_digits(0)


def run_cell(number: int, code: str, names: "dict[str, object]"):
    """Runs a cell; returns "done" or "raised", and the name of the exception."""
    name = f"<cell {number}>"
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    try:
        parsed = ast.parse(code, name)
        last = parsed.body.pop() if parsed.body and isinstance(parsed.body[-1], ast.Expr) else None
        exec(compile(parsed, name, "exec", dont_inherit=True), names)
        if last is not None:
            exec(compile(ast.Interactive([last]), name, "single", dont_inherit=True), names)
    except SystemExit as error:
        if error.code in (None, 0):
            return "done", ""
        print(f"SystemExit: {error.code}", file=sys.stderr)
        return "raised", "SystemExit"
    except BaseException as error:  # noqa: BLE001 - shown to the author of the cell
        show(error)
        return "raised", type(error).__name__
    return "done", ""


def show(error: BaseException):
    """Prints a traceback without the frames of this script."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in (__file__, ast.__file__):
        frames = frames.tb_next
    flush()
    try:
        traceback.print_exception(type(error), error, frames)
    except MemoryError:
        os.write(2, b"MemoryError\n")


def flush():
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:  # noqa: BLE001 - a cell may have put anything in its place
            pass


def main():
    requests = os.fdopen(os.dup(3), "r", encoding="utf-8", errors="surrogatepass")
    os.dup2(1, 2)
    sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
    random.seed(int(sys.argv[1]))
    del sys.argv[1:]
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    process = os.getpid()
    os.write(4, b'[0, "done", ""]\n')
    for line in requests:
        number, code = json.loads(line)
        ending, name = run_cell(number, code, module.__dict__)
        flush()
        if os.getpid() != process:  # a child that a cell forked; the parent replies
            os._exit(0)
        os.write(4, json.dumps([number, ending, name[:100]]).encode() + b"\n")


if __name__ == "__main__":
    main()
