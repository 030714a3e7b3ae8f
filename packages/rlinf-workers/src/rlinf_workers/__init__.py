"""Worker processes and the execution of flows: the same program under any plan."""

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
from rlinf_workers.launcher.local import LocalLauncher
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
