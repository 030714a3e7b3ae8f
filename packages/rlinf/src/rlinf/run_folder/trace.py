"""trace.json: a timeline of all workers as Chrome trace events, for Perfetto (ui.perfetto.dev).

The file is a JSON array with one event per line, valid after every write, so the trace of a killed run opens in any
tool. A lane (a device, or a worker without one) is a "process" of the trace, a worker on it a "thread". Format: "Trace
Event Format", the array form, by the Chromium authors.

Times are whole microseconds; start and end of an event are both rounded down, so that consecutive events do not overlap
by a rounding error, which would make viewers drop them. A trace that exceeds its limit keeps its first and last steps.
"""

from __future__ import annotations

import bisect
import io
import json
import os
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlinf.run_folder.plain_files import create_plain, open_plain, read_plain
from rlinf.run_folder.rows import to_json

SESSION = "session"
"""Name of the instant event that a run writes when it starts and each time it resumes."""
LEFT_OUT = "left out"
"""Name of the instant event that replaces omitted steps; its args are the first and the last of them."""
LIMIT_BYTES = 16 << 20
HEAD_SHARE, TAIL_SHARE = 0.25, 0.5
"""Shares of the limit that the beginning and the end of the trace keep once the limit is exceeded. The rest is free for
new events, so that a long run does not rewrite its trace at each step."""
_NO_STEP = -1
_OPEN, _BETWEEN, _CLOSE = b"[\n", b",\n", b"\n]\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceEvent:
    """One time span on one lane."""

    name: str
    """The activity: `rollout`, `wait for lease`, `receive weights`."""
    category: str
    """stage, lease, sync, channel or driver."""
    lane: str
    """The lane: `device cpu:0`, `reward/0`."""
    start_ns: int
    """Unix time."""
    duration_ns: int
    args: Mapping[str, Any] = field(default_factory=dict)
    """Scalars; the report uses `worker` and `step`."""


class TraceWriter:
    """Appends events to a file, after those of earlier sessions of the run.

    Attributes:
        leaves_out: whether steps in the middle of the run were omitted.
    """

    def __init__(self, path: Path, *, origin_ns: int, limit_bytes: int = LIMIT_BYTES) -> None:
        """
        Args:
            path: trace.json; appended to if it exists.
            origin_ns: Unix time at which the trace starts; the same in all sessions of a run.
            limit_bytes: maximum size of the file, which a single write may exceed.
        """
        self._path = path
        self._origin_ns = origin_ns
        self._limit_bytes = limit_bytes
        self._numbers: dict[tuple[str, ...], int] = {}
        self.leaves_out = False
        events = list(read_events(path))
        self._take_numbers(events)
        self._begin([to_json(event).encode() for event in events])

    def session(self, start_ns: int, **args: Any) -> None:
        """Marks the start of a session."""
        self._write([_instant(SESSION, self._us(start_ns), args)])

    def write(self, events: Sequence[TraceEvent]) -> None:
        lines: list[dict[str, Any]] = []
        for event in events:
            pid = self._number((event.lane,), lines)
            tid = self._number((event.lane, str(event.args.get("worker", event.lane))), lines)
            start_us = self._us(event.start_ns)
            lines.append(
                {
                    "name": event.name,
                    "cat": event.category,
                    "ph": "X",
                    "ts": start_us,
                    "dur": self._us(event.start_ns + event.duration_ns) - start_us,
                    "pid": pid,
                    "tid": tid,
                    "args": dict(event.args),
                }
            )
        self._write(lines)

    def close(self) -> None:
        self._file.close()

    # -- the file --------------------------------------------------------------------------------------------------

    def _begin(self, lines: Sequence[bytes | memoryview]) -> None:
        """Writes a file with these events, or blocks of events, and keeps it open."""
        partial = self._path.with_name(f".{self._path.name}.partial")
        content = _OPEN + _BETWEEN.join(lines)
        with open(create_plain(partial), "wb") as file:
            file.write(content + _CLOSE)
        partial.replace(self._path)
        self._file = io.FileIO(open_plain(self._path, os.O_RDWR), "r+")
        self._end, self._is_empty = len(content), not lines

    def _write(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Replaces the closing bracket by events and a new closing bracket, in one write."""
        if not lines:
            return
        text = _BETWEEN.join(to_json(line).encode() for line in lines)
        content = text if self._is_empty else _BETWEEN + text
        self._file.seek(self._end)
        self._file.write(content + _CLOSE)
        self._end, self._is_empty = self._end + len(content), False
        if self._end > self._limit_bytes:
            self._shorten()

    def _shorten(self) -> None:
        """Omits steps in the middle. Reads events one by one, because a list of all takes several times the file's
        size."""
        content = memoryview(read_plain(self._path))
        ends, steps = array("q"), array("q")
        for line in _lines(content):
            ends.append(len(line) + len(_BETWEEN) + (ends[-1] if ends else len(_OPEN)))
            steps.append(json.loads(line).get("args", {}).get("step", _NO_STEP))
        first, last = _middle(ends, steps, self._limit_bytes)
        begin, end = (ends[index - 1] if index else len(_OPEN) for index in (first, last))
        head, tail = content[len(_OPEN) : begin - len(_BETWEEN)], content[end : -len(_CLOSE)]
        blocks = [head, *_without_spans(_lines(content[begin:end])), tail]
        self._file.close()
        self._begin([block for block in blocks if block])
        self.leaves_out = True

    # -- events ----------------------------------------------------------------------------------------------------

    def _us(self, time_ns: int) -> int:
        return (time_ns - self._origin_ns) // 1000

    def _number(self, key: tuple[str, ...], lines: list[dict[str, Any]]) -> int:
        """Returns the number of a lane, or of a worker on it; adds the naming event for a new one."""
        if key not in self._numbers:
            number = self._numbers[key] = len(self._numbers) + 1
            kind, tid = ("process_name", 0) if len(key) == 1 else ("thread_name", number)
            lines.append(
                {"name": kind, "ph": "M", "pid": self._numbers[key[:1]], "tid": tid, "args": {"name": key[-1]}}
            )
        return self._numbers[key]

    def _take_numbers(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Restores the numbers from an earlier session."""
        lanes: dict[int, str] = {}
        for event in events:
            if event.get("name") == "process_name":
                lanes[event["pid"]] = event["args"]["name"]
                self._numbers[event["args"]["name"],] = event["pid"]
            elif event.get("name") == "thread_name":
                self._numbers[lanes[event["pid"]], event["args"]["name"]] = event["tid"]


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the events of a trace in file order; a truncated line is skipped."""
    try:
        descriptor = open_plain(path)
    except FileNotFoundError:
        return
    with open(descriptor, "rb") as file:
        for line in file:
            text = line.strip().rstrip(b",")
            if text in (b"", b"[", b"]"):
                continue
            try:
                event = json.loads(text)
            except (ValueError, RecursionError):
                continue
            if isinstance(event, dict):
                yield event


def _instant(name: str, ts: int, args: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": name, "cat": "driver", "ph": "i", "s": "g", "ts": ts, "pid": 0, "tid": 0, "args": dict(args)}


def _lines(content: memoryview) -> Iterator[bytes]:
    """Yields the events in a part of the file, without separators."""
    for line in io.BytesIO(content):
        text = line.rstrip(b",\n")
        if text not in (b"", b"[", b"]"):
            yield text


def _middle(ends: Sequence[int], steps: Sequence[int], limit_bytes: int) -> tuple[int, int]:
    """Returns begin and end of the events to omit, at step boundaries if there are several steps before or after.
    `ends` are the events' end offsets in the file, `steps` their steps."""
    borders = [i for i in range(1, len(steps)) if steps[i - 1] != steps[i]]
    head = bisect.bisect_right(ends, HEAD_SHARE * limit_bytes)
    first = max((border for border in borders if border <= head), default=head)
    tail = max(first, bisect.bisect_left(ends, ends[-1] - TAIL_SHARE * limit_bytes) + 1)
    return first, min((border for border in borders if border >= tail), default=tail)


def _without_spans(lines: Iterable[bytes]) -> list[bytes]:
    """Returns the events that name lanes and sessions, and one event with the steps omitted now or earlier."""
    remaining: list[bytes] = []
    steps: list[int] = []
    start_us: int | None = None
    for line in lines:
        event = json.loads(line)
        if event["ph"] == "M" or (event["ph"] == "i" and event["name"] != LEFT_OUT):
            remaining.append(line)
        elif event["name"] == LEFT_OUT:
            steps += event["args"].values()
        elif "step" in event["args"]:
            steps.append(event["args"]["step"])
        if "ts" in event:
            start_us = event["ts"] if start_us is None else min(start_us, event["ts"])
    if not steps or start_us is None:
        return remaining
    marker = _instant(LEFT_OUT, start_us, {"first_step": min(steps), "last_step": max(steps)})
    return [*remaining, to_json(marker).encode()]
