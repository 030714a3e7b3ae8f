"""The log writers that a recipe may name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlinf_workers.plugins import Plugins

if TYPE_CHECKING:
    from rlinf.log_writers.spec import LogWriterSpec

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
