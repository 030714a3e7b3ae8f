"""The command line in processes that are forked from one which has done its imports: for many short runs.

Such a process becomes a driver like any other, with a fork server and workers of its own. This server, too, is forked,
where it is usually a new interpreter.
"""

import multiprocessing
import os
import sys
from collections.abc import Sequence
from multiprocessing import forkserver, util
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

MODULES = [
    "rlinf.training",
    "rlinf.jobs.reasoning.job",
    "rlinf_workers.engines.huggingface.engine",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.tokenization_utils_tokenizers",
]


def start(arguments: Sequence[str], log: Path, folder: Path) -> BaseProcess:
    """Starts `rlinf` with these arguments.

    Args:
        log: what it prints is appended.
        folder: modules in it can be imported.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(MODULES)
    process = context.Process(target=_run, args=(list(arguments), log, folder))
    process.start()
    return process


def _run(arguments: list[str], log: Path, folder: Path) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.modules["__main__"] = sys.modules[__name__]  # which workers import again
    sys.path.insert(0, str(folder))
    sys.argv = ["rlinf", *arguments]
    forkserver.util = _ForkingUtil()  # pyright: ignore[reportAttributeAccessIssue]
    from rlinf.cli.main import main

    sys.exit(main(arguments))


class _ForkingUtil:
    """`multiprocessing.util` as its fork server sees it: the server is forked instead of executed."""

    def __getattr__(self, name: str) -> Any:
        return getattr(util, name)

    def spawnv_passfds(self, _: str, line: Sequence[str], passed: Sequence[int]) -> int:
        """Returns the id of a process that runs the code in the last argument, with these descriptors alone."""
        if pid := os.fork():
            return pid
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            if descriptor > 2 and descriptor not in passed:
                try:
                    os.close(descriptor)
                except OSError:
                    continue  # that of the listing
        exec(line[-1])
        os._exit(0)
