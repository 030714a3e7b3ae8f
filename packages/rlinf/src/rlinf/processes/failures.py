"""What the terminal says when a worker raised or was lost."""

from __future__ import annotations

from pathlib import Path

from rlinf.errors import RunFailed
from rlinf_workers import RemoteError, WorkersError


def run_failed(error: WorkersError, log_folder: Path | None, *, during: str = "") -> RunFailed:
    """The end of a run in a few lines: what was raised, where, and how to see the traceback.

    Args:
        log_folder: holds `ROLE/RANK.log`; None where the logs go with the command.
        during: what was going on, "step 3: " for example.
    """
    if not isinstance(error, RemoteError):
        return RunFailed(f"{during}{error}")
    place = f"raised in {error.raised_in}\n" if error.raised_in else ""
    log = f", and so does {log_folder / error.worker}.log" if log_folder else ""
    return RunFailed(f"{during}{error}\n{place}hint: --traceback shows the way there{log}")
