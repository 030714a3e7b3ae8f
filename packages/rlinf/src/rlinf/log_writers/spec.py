"""What is known of a log writer before a run starts: its options, and what is missing on this machine. The log writers
that a recipe may name."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import Field

from rlinf.config.base import Section
from rlinf.errors import UserError
from rlinf_workers.plugins import Plugins, Spec

if TYPE_CHECKING:
    from rlinf.log_writers.base import LogWriter


class Uploads(Section):
    """What a log writer gets beside metrics. Options of the shipped writers for experiment trackers."""

    samples_every: int = Field(
        default=10, ge=0, description="Training steps between tables of sampled completions; 0: no tables."
    )
    videos: bool = Field(default=True, description="Send the films of evaluations.")
    artifacts: bool = Field(default=True, description="Send config, plan, result and report at the end of the run.")


@dataclass(frozen=True, kw_only=True)
class LogWriterSpec(Spec):
    """A log writer; `implementation` is a subclass of `rlinf.log_writers.LogWriter`."""

    section: type[Section] | None = None
    """Its options, which its constructor takes; None: the constructor takes the recipe's options as keyword
    arguments."""
    title: str = ""
    """What it writes to, for descriptions and messages."""
    package: str = ""
    """The module that it imports; the extra of rlinf that installs it has the writer's name."""

    def check(self, options: Any) -> None:
        """Checks that the writer can work: packages, login, server.

        Args:
            options: a `section`; a mapping for a writer without one.

        Raises: UserError.
        """
        if not self.package:
            return
        package_spec = importlib.util.find_spec(self.package)
        if package_spec is None or package_spec.origin is None:  # a folder of that name may hold the package's files
            raise UserError(
                f"run.loggers.{self.name}: {self.package} is not installed",
                hint=f"pip install 'rlinf[{self.name}]', or leave it out with --run.loggers.{self.name} null",
            )

    def make(self, options: Section | Mapping[str, Any]) -> LogWriter:
        """Returns the writer; nothing is opened yet."""
        return self.load()(options) if isinstance(options, Section) else self.load()(**options)


LOG_WRITERS: Plugins[LogWriterSpec] = Plugins(
    "log writer",
    {
        "tensorboard": "rlinf.log_writers.tensorboard:SPEC",
        "wandb": "rlinf.log_writers.wandb:SPEC",
        "mlflow": "rlinf.log_writers.mlflow:SPEC",
        "swanlab": "rlinf.log_writers.swanlab:SPEC",
        "trackio": "rlinf.log_writers.trackio:SPEC",
    },
    base="rlinf.log_writers.spec:LogWriterSpec",
)


def module(name: str) -> Any:
    """Imports an optional package. Nothing is known of its types, since it need not be installed."""
    return importlib.import_module(name)
