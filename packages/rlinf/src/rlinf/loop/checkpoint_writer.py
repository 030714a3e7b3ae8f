"""Checkpoints that are written while training goes on.

save()            every rank copies its part to host memory; training waits for that
a thread here     waits for the ranks' threads, seals the folder and renames it
check(), wait()   training learns of the end, or of the failure, of the one under way
"""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path

from rlinf.processes.executor import run_failed
from rlinf.run_folder import RunFolder
from rlinf.run_folder.checkpoints import CHECKPOINTS, checkpoint_name
from rlinf.run_folder.rows import naming
from rlinf_workers import WorkerGroup, WorkersError

LANE = -1
"""On which the ranks are asked whether they have written; no stage has it."""
LONG_WAIT_S = 1.0
"""Waiting longer for the checkpoint before is worth a note."""


class CheckpointWriter:
    """Writes the checkpoints of a run; at most one is under way. A context manager around the processes of the run:
    when it ends nothing writes any more, and what is not whole is gone.

    Args:
        note: tells a reader of the run.
    """

    def __init__(self, folder: RunFolder, note: Callable[[str], None]) -> None:
        self._folder, self._note = folder, note
        self._thread: threading.Thread | None = None
        self._name = ""
        self._written: Future[float] = Future()
        self._times: dict[str, float] = {}
        self._wait_s = 0.0

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.wait_until_written()

    def save(
        self,
        trainer: WorkerGroup,
        step: int,
        state: dict[str, object],
        write_more: Callable[[Path], None] = lambda _: None,
    ) -> None:
        """Begins a checkpoint; returns when every rank has its copy.

        Args:
            state: see `RunFolder.new_checkpoint`.
            write_more: writes what the job adds to the folder that it is given.

        Raises: as `check`, for the one before.
        """
        began_s = time.monotonic()
        self.wait()
        if time.monotonic() - began_s > LONG_WAIT_S:
            self._note("training waits for checkpoints: when one is due, the one before is still being written")
        digests: dict[str, str] = {}
        with ExitStack() as opened:
            path = opened.enter_context(self._folder.new_checkpoint(step, state, digests))
            trainer.call("begin_checkpoint", str(path))
            write_more(path)
            arguments = (opened.pop_all(), trainer.start_call("end_checkpoint", lane=LANE), digests, began_s)
        self._name, self._written = checkpoint_name(step), Future()
        self._wait_s = time.monotonic() - began_s
        self._thread = threading.Thread(target=self._finish, args=arguments, name="checkpoint")
        self._thread.start()

    def check(self) -> None:
        """Looks whether the checkpoint under way is whole.

        Raises: RunFailed, OSError where it could not be written; there is none under way then.
        """
        if self._written.done():
            self.wait()

    def wait(self) -> None:
        """Returns when no checkpoint is under way. Raises: as `check`."""
        if self._thread is None:
            return
        try:
            with naming(self._folder.path / CHECKPOINTS / self._name):
                seconds = self._written.result()
        except WorkersError as error:
            logs = self._folder.path / "logs"
            raise run_failed(error, logs, during=f"checkpoint {self._name} could not be written: ") from error
        finally:
            if self._written.done():
                self.wait_until_written()
        self._times = {"time/checkpoint_s": seconds, "time/checkpoint_wait_s": self._wait_s}

    def wait_until_written(self) -> None:
        """Returns when no checkpoint is under way, whatever became of it."""
        if self._thread is not None:
            self._thread.join()
        self._thread, self._written = None, Future()

    def take_times(self) -> dict[str, float]:
        """Metrics of the newest whole checkpoint: seconds until it was, and those that training waited; empty for one
        that was asked for before."""
        times, self._times = self._times, {}
        return times

    def _finish(
        self, opened: ExitStack, calls: Sequence[Future[dict[str, str]]], digests: dict[str, str], began_s: float
    ) -> None:
        try:
            with opened:
                concurrent.futures.wait(calls)  # also where one has failed: the others write into the folder
                for call in calls:
                    digests.update(call.result())
        except BaseException as error:  # noqa: BLE001 - it belongs to who asks
            self._written.set_exception(error)
        else:
            self._written.set_result(time.monotonic() - began_s)
