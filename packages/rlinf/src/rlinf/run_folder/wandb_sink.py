"""Sends metrics to W&B for runs with `run.wandb`. The package is an extra and is only imported then."""

from __future__ import annotations

import importlib.util
import inspect
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlinf.errors import UserError
from rlinf.run_folder.plain_files import read_plain_json
from rlinf.run_folder.rows import to_json, write_file

if TYPE_CHECKING:
    from rlinf.config.common import WandbConfig

LOGIN_HINT = "log in with `wandb login`, or write to the run folder alone with --run.wandb.mode offline"
MODES = ("online", "offline", "shared", "disabled", "dryrun", "run")
"""W&B's modes; the last two are old names of offline and online."""
RUN_FILE = "wandb.json"
"""File in the run folder with the id of the W&B run, so that a resumed run continues it."""


def check_wandb(settings: WandbConfig | None) -> None:
    """Raises: UserError if the config uses W&B and it is not installed or has no login."""
    if settings is None:
        return
    spec = importlib.util.find_spec("wandb")
    if spec is None or spec.origin is None:  # a folder named `wandb` may hold the package's files
        raise UserError(
            f"run.wandb.project={settings.project}: wandb is not installed",
            hint="pip install 'rlinf[wandb]', or leave it out with --run.wandb null",
        )
    mode = settings.mode or os.environ.get("WANDB_MODE") or "online"
    if mode not in MODES:
        raise UserError(f"WANDB_MODE={mode} is no mode of W&B", hint=f"use one of {', '.join(MODES)}, or unset it")
    if mode in ("online", "run", "shared") and not _has_login():
        raise UserError(f"run.wandb.project={settings.project}: nobody is logged in to W&B", hint=LOGIN_HINT)


def _has_login() -> bool:
    """Returns whether W&B has an API key, from an env var or `wandb login`."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    import wandb  # pyright: ignore[reportMissingImports]

    login: Any = getattr(wandb, "login", None)
    if login is not None and "prompt" in inspect.signature(login).parameters:
        # It returns no key under WANDB_MODE=offline, but `run.wandb.mode` takes precedence.
        return os.environ.get("WANDB_MODE") not in (None, "", "online") or login(prompt=False, verify=False)
    api: Any = getattr(wandb, "api", None)
    if not hasattr(api, "api_key"):
        return True  # another version of the API; `wandb.init` will check the login
    return bool(api.api_key)


class WandbSink:
    """Metrics of one run on W&B. Training steps count from 0, and evaluations use the number of completed steps, so the
    axis is a separate metric and not W&B's counter, which only increases."""

    def __init__(self, settings: WandbConfig, folder: Path, config: Mapping[str, Any]) -> None:
        """
        Args:
            folder: the run's folder, which also gets W&B's files.
            config: the run's config, shown on W&B.
        Raises: UserError if W&B does not start, for example without a login or access to the project.
        """
        import wandb  # pyright: ignore[reportMissingImports]

        try:
            self._run: Any = wandb.init(
                project=settings.project,
                entity=settings.entity,
                name=settings.name or folder.resolve().name,
                id=_run_id(folder),
                resume="allow",
                mode=settings.mode,
                dir=str(folder),
                config=dict(config),
            )
        except Exception as error:  # wandb raises its own errors and those of its transport
            raise UserError(
                f"run.wandb.project={settings.project}: wandb did not start: {type(error).__name__}: {error}",
                hint=LOGIN_HINT,
            ) from error
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, prefix: str, step: int, values: Mapping[str, float]) -> None:
        self._run.log({**{prefix + name: value for name, value in values.items()}, "step": step})

    def close(self) -> None:
        self._run.finish()


def _run_id(folder: Path) -> str:
    file = folder / RUN_FILE
    if file.exists():
        return str(read_plain_json(file)["id"])
    run_id = secrets.token_hex(4)
    write_file(file, to_json({"id": run_id}) + "\n")
    return run_id
