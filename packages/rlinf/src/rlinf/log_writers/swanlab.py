"""SwanLab. The package is an extra and is imported only by runs that use it."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from rlinf.config.base import Strings
from rlinf.errors import INTERRUPTED, UserError
from rlinf.log_writers.base import LoggedRun, LogWriter, SampleRows, side_by_side
from rlinf.log_writers.spec import LogWriterSpec, Uploads, module

FOLDER = "swanlab"
"""Folder of SwanLab's files in the run's folder."""


class SwanlabOptions(Uploads):
    """The run on SwanLab."""

    project: str = Field(default="rlinf", min_length=1, description="Name of the project.")
    workspace: str | None = Field(
        default=None, min_length=1, description="User or organization; null: the user who is logged in."
    )
    name: str | None = Field(default=None, min_length=1, description="Name of the run; null: the name of its folder.")
    mode: Literal["online", "local", "offline"] | None = Field(
        default=None,
        description="local and offline write to the run folder, offline for `swanlab sync`; null: the env var "
        "SWANLAB_MODE decides.",
    )
    group: str | None = Field(default=None, min_length=1, description="Group of runs, such as the seeds of a setting.")
    job_type: str | None = Field(default=None, min_length=1, description="Kind of run within the group.")
    tags: Strings = Field(default=(), description="Labels to filter runs by.")


class SwanlabWriter(LogWriter):
    """A run on SwanLab. It shows only GIFs as videos, so films are HTML with the MP4 inside."""

    def __init__(self, options: SwanlabOptions) -> None:
        self._options = options
        self._run: Any = None
        self._folder = Path()

    def begin(self, run: LoggedRun) -> None:
        options, self._folder = self._options, run.folder
        self._swanlab = module("swanlab")
        self._run = self._swanlab.init(
            project=options.project,
            workspace=options.workspace,
            name=options.name or run.name,
            mode=options.mode,
            group=options.group,
            job_type=options.job_type,
            tags=list(options.tags) or None,
            id=run.id,
            resume="allow",
            log_dir=str(run.folder / FOLDER),
            config=dict(run.config),
        )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def samples(self, step: int, rows: SampleRows) -> None:
        columns, cells = side_by_side(rows)
        table = self._swanlab.echarts.Table()
        table.add(columns, [["" if cell is None else cell for cell in row] for row in cells])
        self._run.log({"samples": table}, step=step)

    def video(self, step: int, path: Path) -> None:
        film = base64.b64encode(path.read_bytes()).decode()
        page = f'<video controls autoplay muted loop src="data:video/mp4;base64,{film}"></video>'
        self._run.log({"evaluation/film": self._swanlab.Html(page)}, step=step)

    def artifact(self, name: str, path: Path) -> None:
        self._run.save(str(path.resolve()), base_path=str(path.resolve().parent), policy="now")
        if path.suffix == ".html":
            self._run.log({name: self._swanlab.Html(path)}, step=0)

    def close(self, failure: str | None) -> None:
        if failure is None:
            self._run.finish()
        else:
            self._run.finish(state="aborted" if failure == INTERRUPTED else "crashed", error=failure)


@dataclass(frozen=True, kw_only=True)
class SwanlabSpec(LogWriterSpec):
    """Knows when SwanLab needs a login."""

    def check(self, options: Any) -> None:
        super().check(options)
        settings = module("swanlab").Settings()
        if (options.mode or settings.mode) == "online" and not settings.api_key:
            raise UserError(
                "run.loggers.swanlab: nobody is logged in to SwanLab",
                hint="log in with `swanlab login`, or write to the run folder alone with --run.loggers.swanlab.mode "
                "offline",
            )


SPEC = SwanlabSpec(
    name="swanlab",
    title="SwanLab",
    package="swanlab",
    section=SwanlabOptions,
    implementation="rlinf.log_writers.swanlab:SwanlabWriter",
)
