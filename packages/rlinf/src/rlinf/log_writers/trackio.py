"""trackio. The package is an extra and is imported only by runs that use it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from rlinf.log_writers.base import LoggedRun, LogWriter, SampleRows, side_by_side
from rlinf.log_writers.spec import LogWriterSpec, Uploads, module


class TrackioOptions(Uploads):
    """The run in trackio."""

    project: str = Field(default="rlinf", min_length=1, description="Name of the project.")
    name: str | None = Field(default=None, min_length=1, description="Name of the run; null: the name of its folder.")
    group: str | None = Field(default=None, min_length=1, description="Group of runs, such as the seeds of a setting.")
    space_id: str | None = Field(
        default=None,
        min_length=1,
        description="Hugging Face Space that shows the runs, USER/NAME; null: this machine, with `trackio show`.",
    )


class TrackioWriter(LogWriter):
    """A run in trackio, which continues a run by its name."""

    def __init__(self, options: TrackioOptions) -> None:
        self._options = options
        self._run: Any = None

    def begin(self, run: LoggedRun) -> None:
        options = self._options
        self._trackio = module("trackio")
        self._run = self._trackio.init(
            project=options.project,
            name=options.name or run.name,
            group=options.group,
            space_id=options.space_id,
            config=dict(run.config),
            resume="never" if run.resumed_from_step is None else "allow",
            embed=False,
        )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def samples(self, step: int, rows: SampleRows) -> None:
        columns, cells = side_by_side(rows)
        self._run.log({"samples": self._trackio.Table(columns=columns, data=cells)}, step=step)

    def video(self, step: int, path: Path) -> None:
        self._run.log({"evaluation/film": self._trackio.Video(str(path), format="mp4")}, step=step)

    def close(self, failure: str | None) -> None:
        self._run.finish()


SPEC = LogWriterSpec(
    name="trackio",
    title="trackio",
    package="trackio",
    section=TrackioOptions,
    implementation="rlinf.log_writers.trackio:TrackioWriter",
)
