"""The entry point of SGLang's scheduler processes, around SGLang's own.

On failure, SGLang logs the reason and sends SIGQUIT to the parent. This entry point also writes the last error to a
file, so that the worker can report it, and makes the process die with its parent from the start.
"""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

from rlinf_workers.addresses import ON_ONE_MACHINE

FOLDER_VARIABLE = "RLINF_SGLANG_FOLDER"
"""Env var with the folder that a worker shares with its engine's processes."""
MEETING_VARIABLE = "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"
"""SGLang's env var for the rendezvous URL of an engine's ranks, as in torch.distributed."""
LONGEST_ERROR = 1200
"""Characters of an error that are shown; some errors list every model that SGLang supports."""
_PR_SET_PDEATHSIG = 1


def run_scheduler(*arguments: Any, **keywords: Any) -> None:
    """The target of a scheduler process; takes the arguments of SGLang's `run_scheduler_process`."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1:  # the worker died before the previous line
        os._exit(1)
    os.environ.update(ON_ONE_MACHINE)
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # lets `rlinf explain` read the stacks of a hanging process
    errors = logging.FileHandler(Path(os.environ[FOLDER_VARIABLE]) / f"errors-{os.getpid()}", delay=True)
    errors.setLevel(logging.ERROR)
    logging.getLogger("sglang").addHandler(errors)
    from rlinf_workers.gloo_guard import guard_gloo

    guard_gloo()
    from sglang.srt.managers.scheduler import run_scheduler_process  # pyright: ignore[reportMissingImports]

    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        _pin_nothing()

    run_scheduler_process(*arguments, **keywords)


def _pin_nothing() -> None:
    """Recorded experts are kept in pinned host memory, which needs CUDA (read in 0.5.23)."""
    from sglang.srt.mem_cache.pool_host import common  # pyright: ignore[reportMissingImports]

    def allocate(dims: Any, *, dtype: Any, device: Any, allocator: Any, **_: Any) -> Any:
        return allocator.allocate(dims, dtype=dtype, device=device)

    common.ALLOC_MEMORY_FUNCS["cpu"] = allocate


def last_error(folder: Path, pid: int | None = None) -> str | None:
    """The exception that ended a process of the engine, as logged last: its own lines, without the stack."""
    pattern = "errors-*" if pid is None else f"errors-{pid}"
    text = "\n".join(path.read_text(errors="replace") for path in sorted(folder.glob(pattern)))
    lines = text.strip().splitlines()
    start = next((i for i in range(len(lines) - 1, -1, -1) if _is_exception(lines[i])), None)
    message = "\n".join(lines[start:]) if start is not None else (lines[-1] if lines else None)
    return message and message[:LONGEST_ERROR]


def _is_exception(line: str) -> bool:
    """Whether a line of a traceback begins the exception's own text: `ValueError: ...`."""
    name = line.partition(":")[0]
    return bool(name) and name.replace(".", "").isidentifier() and name.endswith(("Error", "Exception", "Interrupt"))
