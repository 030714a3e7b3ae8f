"""The entry point of SGLang's scheduler processes, around SGLang's own.

On failure, SGLang logs the reason and sends SIGQUIT to the parent. This entry point also writes the last error to a
file, so that the worker can report it, and makes the process die with its parent from the start.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from rlinf_workers.addresses import ON_ONE_MACHINE
from rlinf_workers.engines.server_processes import end_with_parent, keep_errors

FOLDER_VARIABLE = "RLINF_SGLANG_FOLDER"
"""Env var with the folder that a worker shares with its engine's processes."""
MEETING_VARIABLE = "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"
"""SGLang's env var for the rendezvous URL of an engine's ranks, as in torch.distributed."""


def run_scheduler(*arguments: Any, **keywords: Any) -> None:
    """The target of a scheduler process; takes the arguments of SGLang's `run_scheduler_process`."""
    end_with_parent()
    os.environ.update(ON_ONE_MACHINE)
    keep_errors(Path(os.environ[FOLDER_VARIABLE]), "sglang")
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
