"""The errors of this package, as one tree."""

from __future__ import annotations

import re


class WorkersError(Exception):
    """Anything that goes wrong between a flow and its processes."""


class FlowDefinitionError(WorkersError, ValueError):
    """A flow, a worker class or a call that cannot be right; says what and what was allowed."""


class WeightFilesError(WorkersError, ValueError):
    """Files of weights that are not whole, or not those of the model; says which and what to do."""


class InterpreterRefused(WorkersError, ValueError):
    """A worker cannot be started by that Python interpreter; says why and what to do."""


class ClusterRefused(WorkersError):
    """The machines of a cluster are not there, or have too little; says what is wanted, what there is, what to do."""


class NodeLost(ClusterRefused):
    """A machine of a cluster went away while it was to be used; those that are left may do."""


class SettingsRefused(WorkersError, ValueError):
    """Raised in a worker's constructor: it cannot be made with its settings, in its environment. The message says why
    and what to do, and is all that the user is shown."""


class WeightSyncRefused(WorkersError):
    """A weight sync cannot work between these ranks; says why. `cluster.weight_sync: auto` takes the next best then."""


class RemoteError(WorkersError):
    """An exception raised inside a worker process, with the traceback from there.

    Attributes:
        worker: `role/rank` of the process.
        error_type: name of the exception's class over there.
        message: what it says.
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
        """`FILE:LINE` of the first cause: where an environment, a reward or a model of the user's own raised."""
        first_cause = self.remote_traceback.partition("\n\n")[0]
        frames = re.findall(r'^  File "(.+)", line (\d+)', first_cause, flags=re.MULTILINE)
        return ":".join(frames[-1]) if frames else None


class _RemoteTraceback(Exception):
    """Stands in for the exception over there, so that Python prints its traceback above RemoteError's."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class WorkerLost(WorkersError):
    """A worker process died, went silent or could not start.

    Attributes:
        worker: `role/rank` of the process.
        log_tail: the last lines of its log.
        refusal: what a SettingsRefused of its constructor said; None: it was lost in another way.
        raised_at_start: its constructor raised, or it speaks another protocol: another such process would end alike.
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
    """A process that a worker had started, of a generation engine for example, is gone, and the worker can do nothing
    without it. Another worker may start another."""


class StepTimeout(WorkersError):
    """A run of a flow passed its deadline; the message names the root cause and holds the wait-for graph."""
