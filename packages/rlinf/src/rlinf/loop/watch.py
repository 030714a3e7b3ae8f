"""Watches a run from a thread of the driver: records about once a second which process waits for what, and explains a
step that takes far too long.

    waits.json              the newest snapshot, for `rlinf explain`, which reads it also when the driver hangs
    seen-elsewhere.json     processes of other hosts, when `rlinf explain` asks for them
    explain-step-12.txt     who was the root cause when step 12 took far too long, lost a worker or passed its deadline
    logs/driver.log         the driver's stacks, when it gets SIGUSR1
"""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec

from rlinf.run_folder.folder import ASKED, SEEN, WAITS
from rlinf.run_folder.plain_files import create_plain, open_plain
from rlinf.run_folder.rows import append_text
from rlinf_workers import Executor
from rlinf_workers.explaining import RunExplanation, Snapshot, explanation_text, root_cause_line, snapshot_json

WRITE_EVERY_S = 1.0
TIMES_EXPECTED = 3.0
LEAST_S = 10.0
"""Shorter steps are not explained by themselves: on a busy machine one may take many times the usual."""


class RunWatch:
    """Use as a context manager inside that of the executor.

    Args:
        folder: the run's; `logs` is in it.
        expected_s: the expected duration of the current training step; None if it is unknown.
        message: prints a line for the user.
    """

    def __init__(
        self,
        executor: Executor,
        folder: Path,
        *,
        expected_s: Callable[[], float | None],
        message: Callable[[str], None],
    ) -> None:
        self._executor, self._folder, self._expected_s, self._message = executor, folder, expected_s, message
        self._driver_log = folder / "logs" / "driver.log"
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watch run", daemon=True)
        self._slow: tuple[float, float] = (0.0, 0.0)
        """Beginning of the last run that was not short, and what was expected of it."""
        self._explained_s = 0.0
        """Beginning of the run that was explained last."""
        self._failed = False

    def __enter__(self) -> RunWatch:
        self._driver_log.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        self._log = open(open_plain(self._driver_log, flags), "a", encoding="utf-8")
        faulthandler.register(signal.SIGUSR1, file=self._log, all_threads=True)
        self._executor.driver_log = str(self._driver_log)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()
        faulthandler.unregister(signal.SIGUSR1)
        self._log.close()
        if not self._driver_log.stat().st_size:  # nobody asked
            self._driver_log.unlink()
        for name in (WAITS, ASKED, SEEN):
            (self._folder / name).unlink(missing_ok=True)

    def explain_end(self, explanation: RunExplanation) -> None:
        """Writes why the run ends; if it cannot be written, prints a note and the run's own error still counts."""
        try:
            self._message(f"explained in {self._write_down(explanation)}")
        except OSError as error:
            self._message(f"note: the explanation could not be written: {error}")

    def _write_down(self, explanation: RunExplanation) -> Path:
        """Writes to the run's folder, appending to an earlier explanation of the same step; returns the file."""
        snapshot = explanation.snapshot
        what = "step" if snapshot.phase == "train" else "evaluation"
        path = self._folder / f"explain-{what}-{snapshot.step}.txt"
        between = "\n" if path.exists() else ""
        append_text(path, f"{between}{explanation_text(explanation)}\n")
        return path

    def _watch(self) -> None:
        while not self._ends.wait(WRITE_EVERY_S):
            try:
                self._look()
            except OSError as error:  # a full disk must not end the watch: the run itself will say what it cannot write
                if not self._failed:
                    self._message(f"note: nobody can explain this run from outside: {error}")
                self._failed = True

    def _look(self) -> None:
        snapshot = self._executor.snapshot()
        took_s = snapshot.taken_s - snapshot.began_s
        if snapshot.phase == "train" and took_s > LEAST_S:
            if self._slow[0] != snapshot.began_s:
                self._slow = (snapshot.began_s, self._expected_s() or 0.0)
            snapshot = replace(snapshot, expected_s=self._slow[1])
        self._write(WAITS, snapshot_json(snapshot))
        if (self._folder / ASKED).exists():  # by `rlinf explain`, which can only look at its own host
            (self._folder / ASKED).unlink()
            self._write(SEEN, msgspec.json.encode(self._executor.look_elsewhere(snapshot)))
        is_late = 0 < TIMES_EXPECTED * snapshot.expected_s < took_s
        if is_late and self._explained_s != snapshot.began_s:
            self._explain(snapshot)

    def _explain(self, snapshot: Snapshot) -> None:
        self._explained_s = snapshot.began_s
        explanation = self._executor.explain(snapshot)
        path = self._write_down(explanation)
        self._message(
            f"step {snapshot.step} has taken {snapshot.taken_s - snapshot.began_s:.0f} s, {snapshot.expected_s:.1f} s "
            f"were expected; root cause: {root_cause_line(explanation)} ({path.name})"
        )

    def _write(self, name: str, data: bytes) -> None:
        """Writes under another name first, so that readers find a complete file. Not synced: it is short-lived."""
        partial = self._folder / f".{name}.partial"
        with open(create_plain(partial), "wb") as file:
            file.write(data)
        partial.replace(self._folder / name)
