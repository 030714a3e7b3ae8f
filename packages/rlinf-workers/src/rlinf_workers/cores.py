"""The cores that a worker's own processes may use where the worker itself is pinned to those of its CPU slots."""

from __future__ import annotations

import os

ALL_CORES = "RLINF_ALL_CORES"
"""Env var of a pinned worker: the driver's cores, separated by commas."""


def pin(cores: set[int]) -> None:
    """Pins this process to these cores."""
    os.environ[ALL_CORES] = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    os.sched_setaffinity(0, cores)


def unpin() -> None:
    """Lets this process use the cores that its pinned parent had before."""
    if cores := os.environ.get(ALL_CORES):
        os.sched_setaffinity(0, set(map(int, cores.split(","))))
