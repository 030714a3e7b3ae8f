"""A custom log writer: every metric as a line of a CSV file.

cd docs/examples
rlinf train sort-grpo --run.loggers '[tensorboard, {custom_log_writer:CsvWriter: {separator: ";"}}]'
"""

from collections.abc import Mapping

from rlinf.log_writers import LoggedRun, LogWriter


class CsvWriter(LogWriter):
    def __init__(self, separator: str = ",") -> None:
        self._separator = separator

    def begin(self, run: LoggedRun) -> None:
        self._file = (run.folder / "metrics.csv").open("a")  # a resumed run continues the file

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            print(step, name, value, sep=self._separator, file=self._file, flush=True)

    def close(self, failure: str | None) -> None:
        self._file.close()
