"""The level of what processes log to their standard error; for a worker that is its file in the run's `logs/`."""

from __future__ import annotations

import logging
import os

LOG_LEVEL_VARIABLE = "RLINF_LOG_LEVEL"
LOG_LEVELS = ("debug", "info", "warning", "error")


def set_up_logging(default: str) -> None:
    """Logs at the level that the env var RLINF_LOG_LEVEL names, or else at `default`. Does nothing where the program
    that this package runs in has set logging up."""
    level = os.environ.get(LOG_LEVEL_VARIABLE, default).lower()
    logging.basicConfig(
        level=(level if level in LOG_LEVELS else default).upper(), format="%(levelname)s %(name)s: %(message)s"
    )
