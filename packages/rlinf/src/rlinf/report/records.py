"""Reads a run folder for the report. Any file may be missing or truncated, as in a run that died early."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rlinf.errors import UserError
from rlinf.run_folder import read_events, read_rows
from rlinf.run_folder.folder import films_of
from rlinf.run_folder.plain_files import read_plain
from rlinf.run_folder.rows import iter_rows

WORST = "worst_token"
"""Key that marks rows of samples.jsonl that describe one token instead of a sample."""
MAX_SAMPLE_STEPS = 8
"""Maximum number of steps whose samples are shown."""
OBJECTS = ("manifest", "plan", "plan_times", "memory", "flow", "result")
"""Files with one JSON object; each is a field of `RunRecords`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """One metric over the run, without nulls."""

    steps: tuple[int, ...]
    values: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.steps)


@dataclass(frozen=True, kw_only=True, slots=True)
class SpanRecord:
    """One time span from the trace."""

    name: str
    category: str
    lanes: tuple[str, ...]
    """Devices (`cpu:0`), or the worker if it has none."""
    is_device: bool
    worker: str
    step: int | None
    phase: str | None
    """`train` or `evaluate`, if the trace records it."""
    num_items: int
    start_s: float
    """Seconds from the run's start."""
    duration_s: float
    label: str = ""
    """A few words to draw on the bar, if there is room."""

    @property
    def end_s(self) -> float:
        return self.start_s + self.duration_s


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecords:
    """Everything that the report shows, as read from the folder."""

    path: Path
    config_yaml: str
    config: Mapping[str, Any]
    manifest: Mapping[str, Any]
    plan: Mapping[str, Any]
    plan_times: Mapping[str, Any]
    memory: Mapping[str, Any]
    flow: Mapping[str, Any]
    result: Mapping[str, Any]
    metrics: tuple[Mapping[str, Any], ...]
    evaluations: tuple[Mapping[str, Any], ...]
    samples: tuple[Mapping[str, Any], ...]
    """The samples of at most `MAX_SAMPLE_STEPS` steps, and the worst tokens of all steps."""
    films: Mapping[int, Path]
    """Training steps before an evaluation -> its film."""

    @property
    def name(self) -> str:
        return str(self.config.get("name") or self.manifest.get("name") or self.path.name)

    @property
    def num_steps_done(self) -> int:
        return max((row["step"] for row in self.metrics), default=-1) + 1

    def series(self, name: str, *, evaluation: bool = False) -> Series:
        rows = self.evaluations if evaluation else self.metrics
        points = [(row["step"], row["metrics"].get(name)) for row in rows]
        points = [(step, value) for step, value in points if value is not None]
        return Series(steps=tuple(step for step, _ in points), values=tuple(float(value) for _, value in points))

    def metric_names(self, *, evaluation: bool = False) -> list[str]:
        """Returns metric names in the order of their first appearance."""
        rows = self.evaluations if evaluation else self.metrics
        return list(dict.fromkeys(name for row in rows for name in row["metrics"]))

    def stages(self) -> list[str]:
        """The computing stages: in the plan's order, then others that have timing metrics."""
        planned = [stage["stage"] for stage in self.plan.get("stages", [])]
        timed = [name[len("time/") : -len("_s")] for name in self.metric_names() if is_stage_time(name)]
        return list(dict.fromkeys([*planned, *(stage for stage in timed if stage != "sync")]))

    def spans(self) -> Iterator[SpanRecord]:
        """Yields the spans of the trace in file order, without loading it into memory."""
        lanes: dict[int, str] = {}
        for event in read_events(self.path / "trace.json"):
            if event.get("name") == "process_name" and event.get("ph") == "M":
                lanes[event["pid"]] = event["args"]["name"]
            elif event.get("ph") == "X":
                yield _span(event, lanes.get(event.get("pid", -1), "?"))


OTHER_TIMES = ("time/step_s", "time/checkpoint_s", "time/checkpoint_wait_s")


def is_stage_time(name: str) -> bool:
    return name.startswith("time/") and name.endswith("_s") and name not in OTHER_TIMES


def read_run(path: Path) -> RunRecords:
    """Reads all files that exist.

    Raises:
        UserError: the folder does not exist or holds no run.
    """
    if not path.is_dir():
        raise UserError(f"there is no run folder {path}", hint="give the folder that `rlinf train` wrote")
    if not any((path / name).exists() for name in ("manifest.json", "metrics.jsonl", "config.yaml")):
        raise UserError(
            f"{path} is not a run's folder: it has no manifest.json, config.yaml or metrics.jsonl",
            hint="give the folder that `rlinf train` wrote, runs/<name>-<time> by default",
        )
    config_yaml = _text(path / "config.yaml")
    return RunRecords(
        path=path,
        config_yaml=config_yaml,
        config=_mapping(config_yaml, yaml.safe_load),
        **{name: _mapping(_text(path / f"{name}.json"), json.loads) for name in OBJECTS},
        metrics=_step_rows(path / "metrics.jsonl"),
        evaluations=_step_rows(path / "evaluations.jsonl"),
        samples=_sample_rows(path / "samples.jsonl"),
        films=films_of(path),
    )


def _span(event: Mapping[str, Any], lane: str) -> SpanRecord:
    args = event.get("args", {})
    is_device = lane.startswith("device ")
    return SpanRecord(
        name=str(event.get("name", "?")),
        category=str(event.get("cat", "driver")),
        lanes=tuple(lane[len("device ") :].split("+")) if is_device else (lane,),
        is_device=is_device,
        worker=str(args.get("worker", lane)),
        step=args.get("step"),
        phase=args.get("phase"),
        num_items=int(args.get("num_items") or 0),
        start_s=event.get("ts", 0.0) / 1e6,
        duration_s=event.get("dur", 0.0) / 1e6,
    )


def _step_rows(path: Path) -> tuple[Mapping[str, Any], ...]:
    """Reads the rows of metrics per step, without values that are neither numbers nor null."""
    rows = (row for row in read_rows(path) if _is_step(row.get("step")) and isinstance(row.get("metrics"), dict))
    return tuple(
        {
            "step": row["step"],
            "time_s": row.get("time_s") if _is_number(row.get("time_s")) else None,
            "metrics": {name: value for name, value in row["metrics"].items() if _is_number(value)},
        }
        for row in rows
    )


def _sample_rows(path: Path) -> tuple[Mapping[str, Any], ...]:
    """Reads the worst tokens, and the samples of some steps, evenly spread, with the first and the last. The file of a
    long run may have gigabytes, so the others are not kept."""
    worst: list[Mapping[str, Any]] = []
    by_step: dict[int, list[Mapping[str, Any]]] = {}
    index: dict[int, int] = {}  # of the kept steps, among all steps of the file
    num_steps, stride = 0, 1
    for row in iter_rows(path):
        step: Any = row.get("step")
        if WORST in row:
            worst.append(row if _is_step(step) else {name: value for name, value in row.items() if name != "step"})
        elif _is_step(step):
            if step not in by_step:
                if len(by_step) == MAX_SAMPLE_STEPS:
                    stride *= 2
                for other in [other for other in by_step if index[other] % stride]:
                    del by_step[other]
                index[step], num_steps = num_steps, num_steps + 1
            by_step.setdefault(step, []).append(row)
    return (*worst, *(row for step in sorted(by_step) for row in by_step[step]))


def _is_step(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, (int, float)) and abs(value) < 1e300)


def _text(path: Path) -> str:
    try:
        return read_plain(path).decode("utf-8", errors="replace")
    except FileNotFoundError:
        return ""


def _mapping(text: str, parse: Callable[[str], Any]) -> dict[str, Any]:
    try:
        value = parse(text)
    except (ValueError, RecursionError, yaml.YAMLError):
        return {}
    return value if isinstance(value, dict) else {}
