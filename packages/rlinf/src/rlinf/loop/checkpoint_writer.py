"""Writes checkpoints while training continues.

save()            every rank copies its part to host memory; training waits for that
a thread here     waits for the ranks' threads, writes the checksums and renames the folder
check(), wait()   report to training that the current checkpoint is complete or has failed
"""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path

from rlinf.processes.executor import run_failed
from rlinf.run_folder import RunFolder
from rlinf.run_folder.checkpoints import CHECKPOINTS, checkpoint_name
from rlinf.run_folder.rows import naming
from rlinf_workers import WorkerGroup, WorkersError

LANE = -1
"""Lane of the calls that wait until the ranks have written; no stage uses it."""
LONG_WAIT_S = 1.0
"""A longer wait for the previous checkpoint causes a note."""


class CheckpointWriter:
    """Writes the checkpoints of a run; at most one at a time. A context manager around the processes of the run: when
    it exits, nothing is being written and incomplete checkpoints are removed.

    Args:
        note: takes a note for the reader of the run.
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
        trainers: Mapping[str, WorkerGroup],
        step: int,
        state: dict[str, object],
        write_more: Callable[[Path], None] = lambda _: None,
    ) -> None:
        """Begins a checkpoint; returns when every rank has its copy.

        Args:
            trainers: folder in the checkpoint -> the group that writes into it; empty: the checkpoint's own folder.
            state: see `RunFolder.new_checkpoint`.
            write_more: writes the job's additional files to the folder.

        Raises: as `check`, for the previous checkpoint.
        """
        began_s = time.monotonic()
        self.wait()
        if time.monotonic() - began_s > LONG_WAIT_S:
            self._note("training waits for checkpoints: when one is due, the one before is still being written")
        digests: dict[str, str] = {}
        with ExitStack() as opened:
            path = opened.enter_context(self._folder.new_checkpoint(step, state, digests))
            for folder, trainer in trainers.items():
                trainer.call("begin_checkpoint", str(path / folder))
            write_more(path)
            calls = [
                (folder, call)
                for folder, trainer in trainers.items()
                for call in trainer.start_call("end_checkpoint", lane=LANE)
            ]
            arguments = (opened.pop_all(), calls, digests, began_s)
        self._name, self._written = checkpoint_name(step), Future()
        self._wait_s = time.monotonic() - began_s
        self._thread = threading.Thread(target=self._finish, args=arguments, name="checkpoint")
        self._thread.start()

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is being written, for which its trainer is needed."""
        return self._thread is not None and not self._written.done()

    def check(self) -> None:
        """Checks whether the current checkpoint is complete.

        Raises: RunFailed, OSError if it could not be written; it is then no longer current.
        """
        if self._written.done():
            self.wait()

    def wait(self) -> None:
        """Returns when no checkpoint is being written. Raises: as `check`."""
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
        """Returns when no checkpoint is being written, even if it failed."""
        if self._thread is not None:
            self._thread.join()
        self._thread, self._written = None, Future()

    def take_times(self) -> dict[str, float]:
        """Metrics of the newest complete checkpoint: seconds until it was complete, and seconds that training waited;
        empty if they were taken before."""
        times, self._times = self._times, {}
        return times

    def _finish(
        self,
        opened: ExitStack,
        calls: Sequence[tuple[str, Future[dict[str, str]]]],
        digests: dict[str, str],
        began_s: float,
    ) -> None:
        try:
            with opened:
                # even if one has failed, since the others write into the folder
                concurrent.futures.wait([call for _, call in calls])
                for folder, call in calls:
                    digests.update({str(Path(folder, file)): digest for file, digest in call.result().items()})
        except BaseException as error:  # noqa: BLE001 - `check` raises it
            self._written.set_exception(error)
        else:
            self._written.set_result(time.monotonic() - began_s)
