"""TensorBoard: event files in the run's folder. The default."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlinf.config.base import Section
from rlinf.log_writers.base import EVALUATION, LoggedRun, LogWriter
from rlinf.log_writers.spec import LogWriterSpec

FOLDER = "tensorboard"
"""Folder of the event files in the run's folder."""


class TensorboardOptions(Section):
    """TensorBoard's event files, in the folder `tensorboard` of the run."""


class TensorboardWriter(LogWriter):
    """Metrics and evaluations as scalars."""

    def __init__(self, options: TensorboardOptions) -> None:
        self._folder = Path()
        self._purge_step: int | None = None
        self._evaluations: dict[int, Mapping[str, float]] = {}
        """Steps done -> that evaluation."""
        self._file: Any = None

    def begin(self, run: LoggedRun) -> None:
        from rlinf.run_folder.rows import read_rows  # the config imports this module

        self._folder, self._purge_step = run.folder / FOLDER, run.resumed_from_step
        for row in read_rows(run.folder / "evaluations.jsonl") if self._purge_step is not None else ():
            values = {EVALUATION + name: _number(value) for name, value in row["metrics"].items()}
            self._evaluations[row["step"]] = values

    def write(self, step: int, values: Mapping[str, float]) -> None:
        file = self._file or self._open()  # with the first value, so that a run that never starts has no such folder
        for name, value in values.items():
            file.add_scalar(name, float(value), step)

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        self.write(step, values)
        self._evaluations[step] = dict(values)

    def rewind(self, step: int) -> None:
        self.close(None)
        self._purge_step = step

    def close(self, failure: str | None) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> Any:
        from torch.utils.tensorboard import SummaryWriter  # seconds to import; only the driver needs it

        _wait_until_the_next_file_sorts_last(self._folder)
        step = self._purge_step
        self._file = SummaryWriter(str(self._folder), purge_step=step, flush_secs=10)
        if step is not None:  # TensorBoard hides everything from purge_step on, including the checkpoint's evaluation
            for name, value in self._evaluations.get(step, {}).items():
                self._file.add_scalar(name, value, step)
        return self._file


def _wait_until_the_next_file_sorts_last(folder: Path) -> None:
    """TensorBoard reads files in the order of their names. These begin with the second in which they were made; what
    follows, a process and a count, is compared as text: the tenth file of a second would be read before the ninth."""
    now = time.time()
    if any(folder.glob(f"events.out.tfevents.{int(now):010d}.*")):
        time.sleep(math.floor(now) + 1 - now)


def _number(value: float | None) -> float:
    return math.nan if value is None else value


SPEC = LogWriterSpec(
    name="tensorboard",
    title="TensorBoard",
    section=TensorboardOptions,
    implementation="rlinf.log_writers.tensorboard:TensorboardWriter",
)
