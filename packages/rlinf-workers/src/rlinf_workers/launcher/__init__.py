"""Processes: where workers live and how the driver talks to them."""

from rlinf_workers.launcher.base import Launcher, WorkerHandle, WorkerSpec
from rlinf_workers.launcher.local import LocalLauncher

__all__ = ["Launcher", "WorkerHandle", "WorkerSpec", "LocalLauncher"]
