"""The errors of this package, as one tree."""

from __future__ import annotations

import re


class WorkersError(Exception):
    """Base of all errors between a flow and its processes."""


class FlowDefinitionError(WorkersError, ValueError):
    """An invalid flow, worker class or call; the message states what is allowed."""


class WeightFilesError(WorkersError, ValueError):
    """Files of weights that are incomplete or belong to another model; the message says which and what to do."""


class InterpreterRefused(WorkersError, ValueError):
    """A worker cannot be started by that Python interpreter; the message says why and what to do."""


class ClusterRefused(WorkersError):
    """The machines of a cluster are missing or too small; the message states what is required, what exists, what to
    do."""


class NodeLost(ClusterRefused):
    """A machine of a cluster was lost while it was needed; the remaining ones may suffice."""


class SettingsRefused(WorkersError, ValueError):
    """Raised in a worker's constructor if it cannot be created with its settings in its venv. The message says why and
    what to do, and is all that the user sees."""


class WeightSyncRefused(WorkersError):
    """A weight sync cannot work between these ranks; the message says why. `cluster.weight_sync: auto` then tries the
    next."""


class RemoteError(WorkersError):
    """An exception raised inside a worker process, with the traceback from there.

    Attributes:
        worker: `role/rank` of the process.
        error_type: name of the exception's class in the worker.
        message: the exception's message.
        remote_traceback: its formatted traceback.
    """

    def __init__(self, worker: str, error_type: str, message: str, remote_traceback: str) -> None:
        super().__init__(f"{worker}: {error_type}: {message}")
        self.worker = worker
        self.error_type = error_type
        self.message = message
        self.remote_traceback = remote_traceback
        self.__cause__ = _RemoteTraceback(remote_traceback)

    @property
    def raised_in(self) -> str | None:
        """`FILE:LINE` of the first cause: where a custom environment, reward or model raised."""
        first_cause = self.remote_traceback.partition("\n\n")[0]
        frames = re.findall(r'^  File "(.+)", line (\d+)', first_cause, flags=re.MULTILINE)
        return ":".join(frames[-1]) if frames else None


class _RemoteTraceback(Exception):
    """Represents the remote exception, so that Python prints its traceback above RemoteError's."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class WorkerLost(WorkersError):
    """A worker process died, stopped sending heartbeats or could not start.

    Attributes:
        worker: `role/rank` of the process.
        log_tail: the last lines of its log.
        refusal: the message of a SettingsRefused in its constructor; None: another cause.
        raised_at_start: its constructor raised, or it speaks another protocol, so a restart would fail the same way.
    """

    def __init__(
        self,
        worker: str,
        host: str,
        cause: str,
        log_path: str,
        log_tail: str,
        refusal: str | None = None,
        *,
        raised_at_start: bool = False,
    ) -> None:
        tail = log_tail.strip() or "(empty)"
        super().__init__(f"worker {worker} on {host} was lost: {cause}\nlog: {log_path}, last lines:\n{tail}")
        self.worker = worker
        self.log_tail = log_tail
        self.refusal = refusal
        self.raised_at_start = raised_at_start


class ProcessLost(WorkersError):
    """A process that a worker had started, of a generation engine for example, has died, and the worker cannot continue
    without it. A new worker may start another."""


class StepTimeout(WorkersError):
    """A run of a flow passed its deadline; the message names the root cause and contains the wait-for graph."""
