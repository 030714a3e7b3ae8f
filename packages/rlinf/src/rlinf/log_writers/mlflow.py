"""MLflow: a tracking server, or a folder. The package is an extra and is imported only by runs that use it.

Uses the client alone, so that the small distribution `mlflow-skinny` is enough, and no global state of MLflow.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import Field

from rlinf.errors import INTERRUPTED, UserError
from rlinf.log_writers.base import LoggedRun, LogWriter, SampleRows, side_by_side
from rlinf.log_writers.spec import LogWriterSpec, Uploads, module

T = TypeVar("T")

MAX_PARAMETERS = 100
"""Parameters of one request."""
MAX_METRICS = 1000
"""Metrics of one request."""
MAX_TEXT = 6000
"""Characters of a parameter's value; servers refuse longer ones."""
PROBE_S = 10.0
"""Seconds that a server has to answer before a run starts."""


class MlflowOptions(Uploads):
    """The run on MLflow."""

    tracking_uri: str | None = Field(
        default=None,
        min_length=1,
        description="Address of the server, or file: and a folder; null: the env var MLFLOW_TRACKING_URI, or the "
        "folder mlruns where the command runs.",
    )
    experiment: str | None = Field(
        default=None,
        min_length=1,
        description="Name of the experiment; null: the env var MLFLOW_EXPERIMENT_NAME, or rlinf without it.",
    )
    name: str | None = Field(default=None, min_length=1, description="Name of the run; null: the name of its folder.")
    tags: dict[str, str] = Field(default={}, description="Tags of the run: name -> text.")

    @property
    def given_uri(self) -> str | None:
        """The address in the options or the env var."""
        return self.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or None


class MlflowWriter(LogWriter):
    """A run on MLflow. Config keys become parameters, samples become tables (JSON), films and pages become files."""

    def __init__(self, options: MlflowOptions) -> None:
        self._options = options
        self._client: Any = None
        self._is_folder = False
        self._run_id = ""
        self._tables: list[str] = []

    def begin(self, run: LoggedRun) -> None:
        """Creates the run, or continues it. Raises: UserError if the run to continue is not on the server."""
        # Retries happen between calls (rlinf.log_writers.delivery); a call that retries for minutes delays the end.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow 3 refuses folders without it
        self._mlflow = module("mlflow")
        known_run = run.recall("mlflow")
        uri = self._options.given_uri or known_run.get("tracking_uri") or Path("mlruns").absolute().as_uri()
        self._is_folder = "://" not in uri or uri.startswith("file:")
        self._client = self._mlflow.MlflowClient(tracking_uri=uri)
        if "run_id" in known_run:
            self._continue(str(known_run["run_id"]), uri, run.folder)
            return
        name = self._options.experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "rlinf"
        experiment = self._client.get_experiment_by_name(name)
        experiment_id = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        tags = {**self._options.tags, "rlinf.run": run.id, "rlinf.folder": str(run.folder.resolve())}
        created = self._client.create_run(experiment_id, run_name=self._options.name or run.name, tags=tags)
        self._run_id = created.info.run_id
        run.remember("mlflow", {"run_id": self._run_id, "tracking_uri": uri})
        entity = self._mlflow.entities.Param
        parameters = [entity(_name(key), value[:MAX_TEXT]) for key, value in flat(run.config).items()]
        for batch in _batches(parameters, MAX_PARAMETERS):
            self._client.log_batch(self._run_id, params=batch)

    def _continue(self, run_id: str, uri: str, folder: Path) -> None:
        try:
            tags = self._client.get_run(run_id).data.tags
            self._client.update_run(run_id, status="RUNNING")
        except self._mlflow.exceptions.MlflowException as error:
            raise UserError(
                f"run.loggers.mlflow: the run {run_id} of {folder / 'mlflow.json'} cannot be continued at {uri}: "
                f"{error}",
                hint="set run.loggers.mlflow.tracking_uri to where it is, or delete that file to begin another run",
            ) from error
        self._run_id = run_id
        self._tables = [table["path"] for table in json.loads(tags.get("mlflow.loggedArtifacts", "[]"))]

    def write(self, step: int, values: Mapping[str, float]) -> None:
        now_ms = int(time.time() * 1000)
        entity = self._mlflow.entities.Metric
        metrics = [entity(self._metric(name), float(value), now_ms, step) for name, value in values.items()]
        for batch in _batches(metrics, MAX_METRICS):
            self._client.log_batch(self._run_id, metrics=batch)

    def _metric(self, name: str) -> str:
        """Returns the name of a metric. In a folder, where each metric is a file, `accuracy` cannot be there besides
        `accuracy/aime24`, so slashes after the first one become dots."""
        first, slash, rest = _name(name).partition("/")
        return first + slash + rest.replace("/", ".") if self._is_folder else first + slash + rest

    def samples(self, step: int, rows: SampleRows) -> None:
        columns, cells = side_by_side(rows)
        file = f"samples/step-{step:06}.json"
        self._client.log_dict(self._run_id, {"columns": columns, "data": cells}, file)
        if file not in self._tables:  # the tag makes MLflow show the files as tables
            self._tables.append(file)
            tables = json.dumps([{"path": table, "type": "table"} for table in self._tables])
            self._client.set_tag(self._run_id, "mlflow.loggedArtifacts", tables)

    def video(self, step: int, path: Path) -> None:
        self._client.log_artifact(self._run_id, str(path), "videos")

    def artifact(self, name: str, path: Path) -> None:
        self._client.log_artifact(self._run_id, str(path))

    def close(self, failure: str | None) -> None:
        status = "FINISHED" if failure is None else "KILLED" if failure == INTERRUPTED else "FAILED"
        self._client.set_terminated(self._run_id, status=status)


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Returns dotted key -> value as text.

    Example: {"run": {"num_steps": 5}, "seed": null} gives {"run.num_steps": "5", "seed": "null"}.
    """
    values: dict[str, str] = {}
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            values |= flat(value, f"{prefix}{name}.")
        else:
            values[f"{prefix}{name}"] = value if isinstance(value, str) else json.dumps(value)
    return values


def _name(name: str) -> str:
    """Returns a name with the characters that all versions of MLflow accept."""
    return re.sub(r"[^\w\-./ ]", "_", name)


def _batches(entries: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for start in range(0, len(entries), size):
        yield entries[start : start + size]


@dataclass(frozen=True, kw_only=True)
class MlflowSpec(LogWriterSpec):
    """Checks that a server answers."""

    def check(self, options: Any) -> None:
        super().check(options)
        uri = options.given_uri or ""
        if not uri.startswith(("http://", "https://")):
            return
        requests = module("requests")
        try:
            requests.get(uri, timeout=PROBE_S)
        except requests.RequestException as error:
            at = f"run.loggers.mlflow.tracking_uri={uri}" if options.tracking_uri else f"MLFLOW_TRACKING_URI={uri}"
            raise UserError(
                f"{at}: the server does not answer: {type(error).__name__}",
                hint="start it with `mlflow server`, or leave it out with --run.loggers.mlflow null",
            ) from error


SPEC = MlflowSpec(
    name="mlflow",
    title="MLflow",
    package="mlflow",
    section=MlflowOptions,
    implementation="rlinf.log_writers.mlflow:MlflowWriter",
)
