"""Lines of a run on a terminal and elsewhere."""

import io
import itertools
import re

from rlinf.console.progress import Progress

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
        "step 11/100  reward 0.71  accuracy 0.84 (step 10)  1.9 s  rollout 0.60 actor 1.1 sync 0.01  eta 2:53",
        "step 12/100  reward 0.71  accuracy 0.84 (step 10)  1.9 s  rollout 0.60 actor 1.1 sync 0.01  eta 2:53",
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
    assert re.match(r"#{10}-{10} step 2/4  eta \d:\d\d  reward 0.71", lines[3])
    assert lines[4] == ""  # what is printed after the run starts on a line of its own
    assert len(lines) == 5


def test_the_live_line_fits_the_terminal(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    stream = Terminal()
    progress = Progress(total=4, stream=stream, clock=lambda: 0.0)
    progress.step(0, *STEP)
    progress.step(1, *STEP)
    assert len(screen(stream.getvalue())[0]) == 39
    assert len(screen(stream.getvalue())) == 2


def test_a_warning_is_red_on_a_terminal_and_plain_elsewhere(monkeypatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    for stream, expected in ((Terminal(), "\x1b[31mmind this\x1b[0m\n"), (io.StringIO(), "mind this\n")):
        Progress(total=1, stream=stream).warning("mind this")
        assert stream.getvalue() == expected
    monkeypatch.setenv("NO_COLOR", "1")
    Progress(total=1, stream=(stream := Terminal())).warning("mind this")
    assert stream.getvalue() == "mind this\n"
