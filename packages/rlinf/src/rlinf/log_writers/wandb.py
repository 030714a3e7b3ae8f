"""W&B. The package is an extra and is imported only by runs that use it."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from rlinf.config.base import Strings
from rlinf.errors import UserError
from rlinf.log_writers.base import LoggedRun, LogWriter, SampleRows, side_by_side
from rlinf.log_writers.spec import LogWriterSpec, Uploads, module

LOGIN_HINT = "log in with `wandb login`, or write to the run folder alone with --run.loggers.wandb.mode offline"
MODES = ("online", "offline", "shared", "disabled", "dryrun", "run")
"""W&B's modes; the last two are old names of offline and online."""


class WandbOptions(Uploads):
    """The run on W&B."""

    project: str | None = Field(
        default=None,
        min_length=1,
        description="Name of the project; null: the env var WANDB_PROJECT, or rlinf without it.",
    )
    entity: str | None = Field(default=None, min_length=1, description="User or team; null: the user who is logged in.")
    name: str | None = Field(default=None, min_length=1, description="Name of the run; null: the name of its folder.")
    mode: Literal["online", "offline"] | None = Field(
        default=None,
        description="offline writes to the run folder, for `wandb sync`; null: the env var WANDB_MODE decides.",
    )
    group: str | None = Field(
        default=None,
        min_length=1,
        description="Group of runs that are shown together, such as the seeds of one setting.",
    )
    job_type: str | None = Field(default=None, min_length=1, description="Kind of run within the group.")
    tags: Strings = Field(default=(), description="Labels to filter runs by.")


class WandbWriter(LogWriter):
    """A run on W&B. Training steps count from 0, and evaluations use the number of completed steps, so the axis is a
    metric of its own, `step`, and not W&B's counter, which only increases."""

    def __init__(self, options: WandbOptions) -> None:
        self._options = options
        self._run: Any = None

    def begin(self, run: LoggedRun) -> None:
        """Starts the run, or continues it. Raises: UserError if W&B refuses, for example without access to the
        project."""
        options = self._options
        project = options.project or os.environ.get("WANDB_PROJECT") or "rlinf"
        self._wandb = module("wandb")
        try:
            self._run = self._wandb.init(
                project=project,
                entity=options.entity,
                name=options.name or run.name,
                group=options.group,
                job_type=options.job_type,
                tags=list(options.tags) or None,
                id=run.recall("wandb").get("id") or run.id,  # wandb.json is of runs whose manifest has no id
                resume="allow",
                mode=options.mode,
                dir=str(run.folder),
                config=dict(run.config),
                allow_val_change=True,  # a resumed run may have more steps
            )
        except Exception as error:  # wandb raises its own errors and those of its transport
            raise UserError(
                f"run.loggers.wandb.project={project}: wandb did not start: {type(error).__name__}: {error}",
                hint=LOGIN_HINT,
            ) from error
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, "step": step})

    def samples(self, step: int, rows: SampleRows) -> None:
        columns, cells = side_by_side(rows)
        self._run.log({"samples": self._wandb.Table(columns=columns, data=cells), "step": step})

    def video(self, step: int, path: Path) -> None:
        self._run.log({"evaluation/film": self._wandb.Video(str(path), format="mp4"), "step": step})

    def artifact(self, name: str, path: Path) -> None:
        artifact = self._wandb.Artifact(f"{self._run.id}-{name}", type=name)
        artifact.add_file(str(path))
        self._run.log_artifact(artifact)
        if path.suffix == ".html":
            self._run.log({name: self._wandb.Html(path.read_text(encoding="utf-8"), inject=False)})

    def close(self, failure: str | None) -> None:
        self._run.finish(exit_code=0 if failure is None else 1)


def _has_login() -> bool:
    """Returns whether W&B has an API key, from an env var or `wandb login`."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    wandb = module("wandb")
    login: Any = getattr(wandb, "login", None)
    if login is not None and "prompt" in inspect.signature(login).parameters:
        # It returns no key under WANDB_MODE=offline, but the option `mode` takes precedence.
        return os.environ.get("WANDB_MODE") not in (None, "", "online") or login(prompt=False, verify=False)
    api: Any = getattr(wandb, "api", None)
    if not hasattr(api, "api_key"):
        return True  # another version of the API; `wandb.init` will check the login
    return bool(api.api_key)


@dataclass(frozen=True, kw_only=True)
class WandbSpec(LogWriterSpec):
    """Knows when W&B needs a login."""

    def check(self, options: Any) -> None:
        super().check(options)
        mode = options.mode or os.environ.get("WANDB_MODE") or "online"
        if mode not in MODES:
            raise UserError(f"WANDB_MODE={mode} is no mode of W&B", hint=f"use one of {', '.join(MODES)}, or unset it")
        if mode in ("online", "run", "shared") and not _has_login():
            raise UserError("run.loggers.wandb: nobody is logged in to W&B", hint=LOGIN_HINT)


SPEC = WandbSpec(
    name="wandb",
    title="W&B",
    package="wandb",
    section=WandbOptions,
    implementation="rlinf.log_writers.wandb:WandbWriter",
)
