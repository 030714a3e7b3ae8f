"""trace.json: what every worker did when, as Chrome trace events that Perfetto (ui.perfetto.dev) opens.

The file is a JSON array that is never closed, one event a line: the format allows the missing `]` so that the trace of
a killed run opens too. A lane (a device, or a worker without one) is a "process" of the trace, a worker on it a
"thread". Format: "Trace Event Format", the array form, by the Chromium authors.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlinf.run_folder.rows import to_json, write_file

SESSION = "session"
"""Name of the instant event that a run writes when it starts and each time it resumes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceEvent:
    """One stretch of time on one lane."""

    name: str
    """What was done: `rollout`, `wait for lease`, `receive weights`."""
    category: str
    """stage, lease, sync, channel or driver."""
    lane: str
    """Where: `device cpu:0`, `reward/0`."""
    start_s: float
    """Unix time."""
    duration_s: float
    args: Mapping[str, Any] = field(default_factory=dict)
    """Scalars; `worker` and `step` are what the report looks for."""


class TraceWriter:
    """Streams events to a file, the ones of an earlier session of the run before them."""

    def __init__(self, path: Path, *, origin_s: float) -> None:
        """
        Args:
            path: trace.json; appended to if it is there.
            origin_s: Unix time that the trace counts from; the same in all sessions of a run.
        """
        self._origin_s = origin_s
        self._pids: dict[str, int] = {}
        self._tids: dict[tuple[str, str], int] = {}
        if path.exists():
            self._continue(path)
        else:
            path.write_text("[\n", encoding="utf-8")
        self._file = path.open("a", encoding="utf-8")

    def session(self, start_s: float, **args: Any) -> None:
        """Marks the start of a session."""
        event = {"name": SESSION, "cat": "driver", "ph": "i", "s": "g", "ts": self._us(start_s), "pid": 0, "tid": 0}
        self._write([{**event, "args": args}])

    def write(self, events: Sequence[TraceEvent]) -> None:
        lines: list[dict[str, Any]] = []
        for event in events:
            pid, tid = self._place(event, lines)
            lines.append(
                {
                    "name": event.name,
                    "cat": event.category,
                    "ph": "X",
                    "ts": self._us(event.start_s),
                    "dur": round(event.duration_s * 1e6, 1),
                    "pid": pid,
                    "tid": tid,
                    "args": dict(event.args),
                }
            )
        self._write(lines)

    def close(self) -> None:
        self._file.close()

    def _write(self, lines: Sequence[Mapping[str, Any]]) -> None:
        self._file.write("".join(f"{to_json(line)},\n" for line in lines))
        self._file.flush()

    def _us(self, start_s: float) -> float:
        return round((start_s - self._origin_s) * 1e6, 1)

    def _place(self, event: TraceEvent, lines: list[dict[str, Any]]) -> tuple[int, int]:
        """The event's process and thread; new ones are named first."""
        worker = str(event.args.get("worker", event.lane))
        if event.lane not in self._pids:
            pid = self._pids[event.lane] = len(self._pids) + 1
            lines.append({"name": "process_name", "ph": "M", "pid": pid, "tid": 0, "args": {"name": event.lane}})
        pid = self._pids[event.lane]
        if (event.lane, worker) not in self._tids:
            tid = self._tids[event.lane, worker] = len(self._tids) + 1
            lines.append({"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": worker}})
        return pid, self._tids[event.lane, worker]

    def _continue(self, path: Path) -> None:
        """Cuts a torn line off and takes over the lanes that are named already."""
        content = path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if whole != content or not whole:
            write_file(path, whole or b"[\n")
        lanes: dict[int, str] = {}
        for event in read_events(path):
            if event.get("name") == "process_name":
                lanes[event["pid"]] = event["args"]["name"]
                self._pids[event["args"]["name"]] = event["pid"]
            elif event.get("name") == "thread_name":
                self._tids[lanes[event["pid"]], event["args"]["name"]] = event["tid"]


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """The events of a trace in file order; a torn line is left out."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            text = line.strip().rstrip(b",")
            if text in (b"", b"[", b"]"):
                continue
            try:
                event = json.loads(text)
            except ValueError:
                continue
            if isinstance(event, dict):
                yield event
