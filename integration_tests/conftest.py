"""Jobs that several modules compare with."""

import fcntl
import os
from pathlib import Path

import pytest

from command_line import SHORT_SORT, train


@pytest.fixture(scope="session")
def sort_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the job SHORT_SORT, which runs once for all processes of pytest-xdist. Do not resume it."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    run, trained = folder / "sort-run", folder / "sort-run.trained"
    with open(folder / "sort-run.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not trained.exists():
            train("sort-grpo", run, SHORT_SORT)
            trained.touch()
    return run
