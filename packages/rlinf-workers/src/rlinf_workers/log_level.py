"""The level of what processes log to their standard error; for a worker that is its file in the run's `logs/`."""

from __future__ import annotations

import logging
import os

VARIABLE = "RLINF_LOG_LEVEL"
LEVELS = ("debug", "info", "warning", "error")


def set_up_logging(default: str) -> None:
    """Logs at the level that the env var RLINF_LOG_LEVEL names, or else at `default`. Does nothing where the program
    that this package runs in has set logging up."""
    level = os.environ.get(VARIABLE, default).lower()
    logging.basicConfig(
        level=(level if level in LEVELS else default).upper(), format="%(levelname)s %(name)s: %(message)s"
    )
