"""Delivers a run's records to its log writers, without letting one of them stop or slow down training.

Each writer has a thread and a queue. A call that raises is kept and tried again with a growing delay, so that values
arrive late after an outage. A call is given up only if later ones got through, since the fault is its own then, or at
the end of the session. The run's folder has every record in any case.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlinf.config.loggers import LoggersConfig
from rlinf.errors import UserError
from rlinf.log_writers.base import EVALUATION, LoggedRun, LogWriter, SampleRows, sample_groups
from rlinf.log_writers.spec import LOG_WRITERS, Uploads

MAX_PENDING = 20_000
"""Calls that a queue holds; about as many steps. Beyond it the oldest are given up."""
MAX_TRIES = 3
"""Tries of a call before a later one that gets through shows that the fault is its own."""
MAX_FAILURES = 2
"""Failures in a row after which a writer is left alone for a while."""
MAX_DELAY_S = 60.0
"""Longest time between two attempts at a writer that fails."""
CLOSE_S = 60.0
"""Seconds that the end of a session waits for a writer that makes no progress."""


REFUSED_S = 5.0
"""The same where a writer did not begin, so that there is nothing to deliver."""


@dataclass(kw_only=True)
class _Call:
    """One call of a writer's method."""

    what: str
    """For messages: "metrics of step 3"."""
    make: Callable[[], None]
    num_tries: int = 0


class WriterThread:
    """Calls one writer from a thread of its own, in order.

    Args:
        name: as in the recipe, for messages.
        writer: it has begun, or `begin` is called first.
        warn: gets warnings; called in any thread.
    """

    def __init__(self, name: str, writer: LogWriter, warn: Callable[[str], None]) -> None:
        self._name, self._writer, self._warn = name, writer, warn
        self._pending: deque[_Call] = deque()
        self._changed = threading.Condition()
        self._is_closing, self._is_open = False, True
        self._failure: str | None = None
        self._num_lost, self._num_done, self._delay_s = 0, 0, 0.0
        self._has_warned = False
        self._thread = threading.Thread(target=self._work, name=f"log writer {name}", daemon=True)
        self._thread.start()

    def begin(self, run: LoggedRun) -> None:
        """Begins the writer, in its thread, and waits for it. Raises: what the writer raises."""
        self._is_open = False
        done: Future[None] = Future()

        def make() -> None:
            try:
                self._writer.begin(run)
                self._is_open = True
                done.set_result(None)
            except BaseException as error:  # noqa: BLE001 - raised in the main thread
                done.set_exception(error)

        self.call("the beginning", make)
        done.result()

    def call(self, what: str, make: Callable[[], None]) -> None:
        """Queues a call; returns at once."""
        with self._changed:
            self._pending.append(_Call(what=what, make=make))
            if len(self._pending) > MAX_PENDING:
                self._pending.popleft()
                self._num_lost += 1
            self._changed.notify_all()

    def begin_close(self, failure: str | None) -> None:
        """Lets the thread deliver what is left and close the writer; `failure` as in `LogWriter.close`."""
        with self._changed:
            self._is_closing, self._failure = True, failure
            self._changed.notify_all()

    def end_close(self, limit_s: float) -> None:
        """Waits until the writer is closed; gives up if nothing gets through for `limit_s` seconds."""
        num_done, since_s = -1, time.monotonic()
        while self._thread.is_alive() and time.monotonic() < since_s + limit_s:
            self._thread.join(0.05)
            if self._num_done != num_done:
                num_done, since_s = self._num_done, time.monotonic()
        if self._thread.is_alive():
            self._warn(f"run.loggers.{self._name}: not finished after {limit_s:g} s without progress; {KEPT}")
        elif self._num_lost:
            self._warn(f"run.loggers.{self._name}: {self._num_lost} records did not get through; {KEPT}")

    def _work(self) -> None:
        while self._wait():
            if not self._deliver():
                self._delay_s = min(MAX_DELAY_S, 2 * self._delay_s or 1.0)
                if self._is_closing:  # the last attempt has failed
                    break
        self._num_lost += len(self._pending)
        try:
            if self._is_open:
                self._writer.close(self._failure)
        except Exception as error:  # noqa: BLE001 - writers raise what they like
            self._report("closing it", error)

    def _wait(self) -> bool:
        """Waits for calls, and for the delay after a failure. Returns False if the writer is to be closed."""
        with self._changed:
            if self._delay_s:
                self._changed.wait_for(lambda: self._is_closing, self._delay_s)
            self._changed.wait_for(lambda: self._pending or self._is_closing)
            return bool(self._pending)

    def _deliver(self) -> bool:
        """Makes the calls in the queue. Returns False if the writer fails and should be left alone for a while."""
        failed: list[_Call] = []
        while len(failed) < MAX_FAILURES:
            with self._changed:
                if not self._pending:
                    break
                call = self._pending.popleft()
            try:
                call.make()
            except Exception as error:  # noqa: BLE001 - writers raise what they like
                call.num_tries += 1
                failed.append(call)
                self._report(call.what, error)
                continue
            self._num_done, self._delay_s = self._num_done + 1, 0.0
            hopeless = [one for one in failed if one.num_tries >= MAX_TRIES]
            self._num_lost += len(hopeless)
            failed = [one for one in failed if one not in hopeless]
        with self._changed:
            self._pending.extendleft(reversed(failed))
        return not failed

    def _report(self, what: str, error: Exception) -> None:
        if not self._has_warned:
            self._has_warned = True
            self._warn(
                f"run.loggers.{self._name}: {what}: {type(error).__name__}: {error}. Training goes on, and this writer "
                f"is tried again; {KEPT}"
            )


KEPT = "the run's folder has all metrics"


class LogWriters:
    """All log writers of a run.

    Args:
        writers: name -> writer; all have begun, or `begin` begins them.
        options: name -> its options; those of type `Uploads` say what the writer gets.
    """

    def __init__(self, writers: Mapping[str, LogWriter], options: Mapping[str, Any] | None = None) -> None:
        self._options = options or {}
        self._lock, self._warnings = threading.Lock(), list[str]()
        self._writers = {name: (writer, WriterThread(name, writer, self._warn)) for name, writer in writers.items()}

    @classmethod
    def begin(cls, config: LoggersConfig, run: LoggedRun) -> LogWriters:
        """Returns the log writers of a config, which have begun.

        Raises: UserError if one cannot begin; the others are closed.
        """
        specs = {name: LOG_WRITERS.spec(name) for name in config.chosen}
        writers = cls({name: specs[name].make(options) for name, options in config.chosen.items()}, config.chosen)
        for name, (_, thread) in writers._writers.items():
            try:
                thread.begin(run)
            except BaseException as error:
                writers.close(str(error), REFUSED_S)
                if isinstance(error, UserError) or not isinstance(error, Exception):
                    raise
                raise UserError(
                    f"run.loggers.{name}: it did not start: {type(error).__name__}: {error}",
                    hint=f"leave it out with --run.loggers.{name} null",
                ) from error
        return writers

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Delivers the metrics of a training step."""
        values = dict(values)
        self._call(f"metrics of step {step}", lambda writer: writer.write(step, values))

    def evaluation(self, step: int, values: Mapping[str, float], film: Path | None = None) -> None:
        """Delivers an evaluation after `step` training steps, and its film."""
        values = {EVALUATION + name: value for name, value in values.items()}
        self._call(f"evaluation after step {step}", lambda writer: writer.evaluation(step, values))
        if film is not None:
            wants = self._with(lambda uploads: uploads.videos)
            self._call(f"film after step {step}", lambda writer: writer.video(step, film), wants)

    def samples(self, step: int, rows: SampleRows) -> None:
        """Delivers the completions of a training step to the writers whose turn it is."""
        rows = [row for group in sample_groups(rows) for row in group]
        if rows:
            wants = self._with(lambda uploads: uploads.samples_every and step % uploads.samples_every == 0)
            self._call(f"samples of step {step}", lambda writer: writer.samples(step, rows), wants)

    def artifact(self, name: str, path: Path) -> None:
        """Delivers a file of the run."""
        wants = self._with(lambda uploads: uploads.artifacts)
        self._call(path.name, lambda writer: writer.artifact(name, path), wants)

    def rewind(self, step: int) -> None:
        """The run continues from its checkpoint of this step."""
        self._call(f"rewinding to step {step}", lambda writer: writer.rewind(step))

    def take_warnings(self) -> list[str]:
        """Returns the new warnings."""
        with self._lock:
            warnings, self._warnings = self._warnings, []
        return warnings

    def close(self, failure: str | None = None, limit_s: float | None = None) -> list[str]:
        """Delivers what is left and closes the writers; prints and returns the last warnings."""
        limit_s = CLOSE_S if limit_s is None else limit_s
        for _, thread in self._writers.values():
            thread.begin_close(failure)
        for _, thread in self._writers.values():
            thread.end_close(limit_s)
        warnings = self.take_warnings()
        for text in warnings:
            print(f"warning: {text}", file=sys.stderr)
        return warnings

    def _with(self, wants: Callable[[Uploads], Any]) -> set[str]:
        """Names of the writers that want something; all of those whose options do not say."""
        chosen = {name: self._options.get(name) for name in self._writers}
        return {name for name, options in chosen.items() if not isinstance(options, Uploads) or wants(options)}

    def _call(self, what: str, make: Callable[[LogWriter], None], names: set[str] | None = None) -> None:
        for name, (writer, thread) in self._writers.items():
            if names is None or name in names:
                thread.call(what, lambda writer=writer: make(writer))

    def _warn(self, text: str) -> None:
        with self._lock:
            self._warnings.append(text)
