"""The level of what processes log to their standard error; for a worker that is its file in the run's `logs/`."""

from __future__ import annotations

import logging
import os

LOG_LEVEL_VARIABLE = "RLINF_LOG_LEVEL"
"""The env var with the log level, which child processes inherit."""
LOG_LEVELS = ("debug", "info", "warning", "error")
"""The levels that the env var may have, the most detailed first."""


def set_up_logging(default: str) -> None:
    """Sets the log level from the env var RLINF_LOG_LEVEL, or else to `default`. Does nothing if the program has
    already configured logging."""
    level = os.environ.get(LOG_LEVEL_VARIABLE, default).lower()
    logging.basicConfig(
        level=(level if level in LOG_LEVELS else default).upper(), format="%(levelname)s %(name)s: %(message)s"
    )
