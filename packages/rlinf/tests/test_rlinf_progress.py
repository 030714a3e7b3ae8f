"""Lines of a run on a terminal and elsewhere."""

import io
import itertools
import re
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from rlinf.console import live_line
from rlinf.console.activities import running, starting
from rlinf.console.progress import Progress
from rlinf_workers.launchers import StageProgress

STEP = ({"reward/mean": 0.714, "actor/loss": 3.0}, 1.94, {"rollout": 0.6, "actor": 1.1, "sync": 0.012})
"""Metrics, seconds of the step, seconds of the stages."""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def screen(text: str) -> list[str]:
    """What a terminal shows after the text, for the two control sequences that the live line uses."""
    lines = [""]
    for part in re.split(r"(\n|\r|\x1b\[1A|\x1b\[2K)", text):
        if part == "\n":
            lines.append("")
        elif part == "\x1b[1A":
            lines.pop()
        elif part == "\x1b[2K":
            lines[-1] = ""
        elif part != "\r":
            lines[-1] += part
    return lines


def test_one_line_a_step() -> None:
    stream = io.StringIO()
    clock = itertools.chain([0.0, 2.0]).__next__
    progress = Progress(total=100, stream=stream, clock=clock)
    progress.evaluation(10, {"accuracy": 0.84, "success_once": 0.9})
    progress.step(10, *STEP)
    progress.step(11, *STEP)
    assert stream.getvalue().splitlines() == [
        "evaluation after step 10: accuracy 0.84, success once 0.90",
        "step 11/100  reward 0.71  accuracy 0.84 (step 10)  1.9 s  rollout 0.60 s, actor 1.1 s, sync 0.01 s  eta 2:53",
        "step 12/100  reward 0.71  accuracy 0.84 (step 10)  1.9 s  rollout 0.60 s, actor 1.1 s, sync 0.01 s  eta 2:53",
    ]


def test_the_eta_follows_recent_steps_and_counts_what_lies_between_them() -> None:
    stream = io.StringIO()
    wall_s = itertools.accumulate([0.0, *[100.0] * 5, *[3.0] * 20])
    progress = Progress(total=1026, stream=stream, clock=wall_s.__next__)
    for step in range(26):
        progress.step(step, {}, 1.0, {})
    assert stream.getvalue().splitlines()[-1].endswith("eta 50:00")  # 1000 steps at 3 s, not at 1 s


def test_a_step_without_metrics_and_the_last_step() -> None:
    stream = io.StringIO()
    progress = Progress(total=2, stream=stream, clock=lambda: 0.0)
    progress.step(0, {}, 1.0, {})
    progress.step(1, {"reward/mean": float("nan")}, 1.0, {})
    assert stream.getvalue() == "step 1/2  1.0 s  eta 0:01\nstep 2/2  reward nan  1.0 s\n"


def test_on_a_terminal_the_live_line_stays_below_the_messages() -> None:
    stream = Terminal()
    progress = Progress(total=4, stream=stream, clock=lambda: 0.0)
    progress.message("start")
    progress.step(0, *STEP)
    progress.evaluation(1, {"accuracy": 0.5})
    progress.step(1, *STEP)
    progress.message("checkpoint")
    lines = screen(stream.getvalue())
    assert lines[:3] == ["start", "evaluation after step 1: accuracy 0.50", "checkpoint"]
    assert re.match(r"#{4}-{4} eta \d:\d\d  step 2/4  reward 0.71", lines[3])
    assert lines[4] == ""  # what is printed after the run starts on a line of its own
    assert len(lines) == 5


def test_the_live_line_fits_the_terminal(monkeypatch) -> None:
    for columns, expected in ((80, "#### eta 0:02  step 2/4  reward 0.71  1.9 s"), (30, "eta 0:02  step 2/4")):
        monkeypatch.setenv("COLUMNS", str(columns))
        stream = Terminal()
        progress = Progress(total=4, stream=stream, clock=lambda: 0.0)
        progress.step(0, *STEP)
        progress.step(1, *STEP)
        (line, after) = screen(stream.getvalue())
        assert expected in line.replace("-", "") and len(line) < columns and after == ""
        assert "eta" in line[:20]
        assert "eta" not in line[20:] and not line.endswith(" ")


def test_what_is_going_on_is_shown_after_two_quiet_seconds_and_goes_away(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(live_line, "QUIET_S", 0.02)
    monkeypatch.setattr(live_line, "TICK_S", 0.01)
    stream = Terminal()
    progress = Progress(total=4, stream=stream, clock=lambda: 0.0)
    progress.step(0, *STEP)
    with progress.doing("outer"):
        with progress.doing(lambda: "step 2/4  rollout 37/64"):
            wait_until(lambda: "rollout 37/64" in stream.getvalue())
            lines = screen(stream.getvalue())
            assert "step 1/4" in lines[0]
            assert (lines[1], lines[2:]) == ("step 2/4  rollout 37/64  0:00", [""])
            progress.message("above")
            assert screen(stream.getvalue())[0] == "above"
        wait_until(lambda: "outer" in stream.getvalue())
    assert [line[:17] for line in screen(stream.getvalue())] == ["above", "##------ eta 0:06", ""]
    assert threading.active_count() == 1 or "show activity" not in {one.name for one in threading.enumerate()}


def test_activities_are_quiet_and_start_no_thread_without_a_terminal() -> None:
    stream = io.StringIO()
    progress = Progress(total=4, stream=stream)
    with progress.doing("nothing to see"):
        assert "show activity" not in {one.name for one in threading.enumerate()}
    assert stream.getvalue() == ""


def test_workers_and_stages_in_words() -> None:
    def stage(name: str, num_done: int, num_items: int = 0, unit: str = "") -> StageProgress:
        return StageProgress(
            stage=name, step=0, phase="train", num_done=num_done, num_items=num_items, unit=unit, is_computing=True
        )

    stages = [stage("rollout", 37, 64), stage("actor", 3, unit="micro-batches"), stage("env", 0)]
    executor: Any = SimpleNamespace(progress=lambda: stages, num_started=lambda: (1, 5))
    assert running("step 13/100", executor)() == "step 13/100  rollout 37/64  actor 3 micro-batches  env"
    assert starting(executor) == "starting 5 workers, 1 is up"
    executor.num_started = lambda: (5, 5)
    assert starting(executor) == "sending the weights to the engines"


def wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_warning_is_red_on_a_terminal_and_plain_elsewhere(monkeypatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    for stream, expected in ((Terminal(), "\x1b[31mmind this\x1b[0m\n"), (io.StringIO(), "mind this\n")):
        Progress(total=1, stream=stream).warning("mind this")
        assert stream.getvalue() == expected
    monkeypatch.setenv("NO_COLOR", "1")
    Progress(total=1, stream=(stream := Terminal())).warning("mind this")
    assert stream.getvalue() == "mind this\n"
