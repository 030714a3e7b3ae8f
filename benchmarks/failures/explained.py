"""How soon a hang is explained rightly: `python -m benchmarks.failures.explained`.

Runs the tests of rlinf-workers that hang real processes (test_workers_hangs.py, test_workers_hangs_below.py). A sample
is the time from the beginning of the run that hangs until an explanation names the right root cause, stacks included;
what a test does to a process meanwhile, to kill it or to wait until it stands, counts too.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from benchmarks.harness import report

TESTS = Path(__file__).parents[2] / "packages" / "rlinf-workers" / "tests"
FILES = ("test_workers_hangs.py", "test_workers_hangs_below.py")


class Stopwatch:
    """A plugin of pytest that times the function which waits for the right explanation."""

    def __init__(self) -> None:
        self.samples_s: dict[str, list[float]] = {}
        self._test = ""

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self._test = item.name.removeprefix("test_")

    def timing(self, explained: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            explanation = explained(*arguments, **named)
            self.samples_s.setdefault(self._test, []).append(time.time() - explanation.snapshot.began_s)
            return explanation

        return timed


def main() -> None:
    sys.path.insert(0, str(TESTS))
    import workers_hangs  # pyright: ignore[reportMissingImports]

    stopwatch = Stopwatch()
    workers_hangs.explained = stopwatch.timing(workers_hangs.explained)
    status = pytest.main(["-q", "-m", "", *(str(TESTS / name) for name in FILES)], plugins=[stopwatch])
    assert status == 0, "a hang was not explained"
    slowest_s = max(max(samples) for samples in stopwatch.samples_s.values())
    report(
        "explained",
        settings={"files": FILES, "target_s": 10.0},
        samples_s=stopwatch.samples_s,
        comparisons=[],
        findings={"hangs": len(stopwatch.samples_s), "slowest_s": slowest_s},
    )


if __name__ == "__main__":
    main()
