"""Jobs that several modules compare with."""

import fcntl
import os
from pathlib import Path
from typing import Any

import pytest

from command_line import LONG_SORT, SHORT_SORT, train_here


@pytest.fixture(scope="session")
def sort_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the job SHORT_SORT. Do not resume it."""
    return _run_once(tmp_path_factory, "sort-run", SHORT_SORT)


@pytest.fixture(scope="session")
def long_sort_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the job LONG_SORT, collocated from the first step to the last. Do not resume it."""
    return _run_once(tmp_path_factory, "long-sort-run", LONG_SORT | {"mode": "collocated"})


def _run_once(tmp_path_factory: pytest.TempPathFactory, name: str, overrides: dict[str, Any]) -> Path:
    """Sorts once for all processes of pytest-xdist."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    run, trained = folder / name, folder / f"{name}.trained"
    with open(folder / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not trained.exists():
            train_here("sort-grpo", run, overrides)
            trained.touch()
    return run
