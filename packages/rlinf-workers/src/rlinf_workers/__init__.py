"""Worker processes and the execution of flows: the same program under any plan.

A name is imported when it is first asked for, so that what needs no torch (rlinf_workers.explaining) starts without.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlinf_comm import record
    from rlinf_workers.errors import (
        FlowDefinitionError,
        RemoteError,
        SettingsRefused,
        StepTimeout,
        WorkerLost,
        WorkersError,
    )
    from rlinf_workers.execution.executor import Executor, FlowRun
    from rlinf_workers.execution.ports import Reader, Writer
    from rlinf_workers.flow import Flow
    from rlinf_workers.group import WorkerGroup
    from rlinf_workers.launchers.local.launcher import LocalLauncher
    from rlinf_workers.worker import StepContext, Worker

__version__ = "0.1.0"

__all__ = [
    "Flow",
    "Worker",
    "WorkerGroup",
    "Reader",
    "Writer",
    "StepContext",
    "record",
    "Executor",
    "FlowRun",
    "LocalLauncher",
    "WorkersError",
    "FlowDefinitionError",
    "RemoteError",
    "WorkerLost",
    "SettingsRefused",
    "StepTimeout",
]

_MODULES = {
    "flow": ("Flow",),
    "worker": ("Worker", "StepContext"),
    "group": ("WorkerGroup",),
    "execution.ports": ("Reader", "Writer"),
    "execution.executor": ("Executor", "FlowRun"),
    "launchers.local.launcher": ("LocalLauncher",),
    "errors": (
        "WorkersError",
        "FlowDefinitionError",
        "RemoteError",
        "WorkerLost",
        "SettingsRefused",
        "StepTimeout",
    ),
}
_PLACES = {name: f"{__name__}.{module}" for module, names in _MODULES.items() for name in names}
_PLACES["record"] = "rlinf_comm"


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PLACES[name]), name)
