"""What runs in SGLang's scheduler processes, around its own entry point.

SGLang logs why a process could not go on and sends its parent SIGQUIT. Here the last error is also left in a file, for
the worker to say, and a process dies with its parent from its first line on.
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
"""Environment variable with the folder that a worker shares with its engine's processes."""
MEETING_VARIABLE = "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"
"""SGLang's env var for the URL at which the ranks of an engine meet, as torch.distributed takes it."""
LONGEST_ERROR = 1200
"""Characters of an error that are shown; some list every model that SGLang knows."""
_PR_SET_PDEATHSIG = 1


def run_scheduler(*arguments: Any, **keywords: Any) -> None:
    """The target of a scheduler process; arguments are those of SGLang's `run_scheduler_process`."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1:  # the worker died before the line above
        os._exit(1)
    os.environ.update(ON_ONE_MACHINE)
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # `rlinf explain` asks one that hangs where it is
    errors = logging.FileHandler(Path(os.environ[FOLDER_VARIABLE]) / f"errors-{os.getpid()}", delay=True)
    errors.setLevel(logging.ERROR)
    logging.getLogger("sglang").addHandler(errors)
    from rlinf_workers.gloo_guard import guard_gloo

    guard_gloo()
    from sglang.srt.managers.scheduler import run_scheduler_process  # pyright: ignore[reportMissingImports]

    run_scheduler_process(*arguments, **keywords)


def last_error(folder: Path, pid: int | None = None) -> str | None:
    """The exception that ended a process of the engine, as it was logged last: its own lines, without the stack."""
    pattern = "errors-*" if pid is None else f"errors-{pid}"
    text = "\n".join(path.read_text(errors="replace") for path in sorted(folder.glob(pattern)))
    lines = text.strip().splitlines()
    start = next((i for i in range(len(lines) - 1, -1, -1) if _is_exception(lines[i])), None)
    message = "\n".join(lines[start:]) if start is not None else (lines[-1] if lines else None)
    return message and message[:LONGEST_ERROR]


def _is_exception(line: str) -> bool:
    """Whether a line of a traceback begins an exception's own text: `ValueError: ...`."""
    name = line.partition(":")[0]
    return bool(name) and name.replace(".", "").isidentifier() and name.endswith(("Error", "Exception", "Interrupt"))
