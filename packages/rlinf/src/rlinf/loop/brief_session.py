"""Starts the processes of a prepared job for a few runs of flows of its own, as `rlinf check` does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from rlinf.config.devices import device_kind
from rlinf.config.downloads import snapshot_folders
from rlinf.console.progress import Progress
from rlinf.jobs.base import Flows, Job
from rlinf.loop.deadlines import Deadlines
from rlinf.loop.session import Session
from rlinf.planning.plans import make_plans
from rlinf.processes import fork_server
from rlinf.processes.executor import make_executor, run_failed
from rlinf.run_folder import RunFolder
from rlinf_workers import Flow, WorkersError


@contextmanager
def brief_session(
    job: Job, folder: RunFolder, flows: Flows, run_flows: Sequence[Flow], *, num_rounds: int
) -> Iterator[Session]:
    """Yields a session that has started `run_flows` and synced their weights; its processes end with the block.

    Args:
        flows: the job's.
        run_flows: flows of worker groups that `flows.train` declares.

    Raises: UserError before a process starts; RunFailed if a worker dies or raises.
    """
    config = job.config
    planned = make_plans(job, replace(flows, others=tuple(run_flows)), folder.path)
    job.write_inputs(folder.path)
    forks = device_kind(config.cluster, job.machine) == "cpu" and fork_server.start(config)
    executor = make_executor(
        config.cluster,
        planned.cluster,
        models=snapshot_folders(config),
        log_folder=folder.path / "logs",
        worker_timeout_s=config.run.worker_timeout_s,
        forks=forks,
        venvs=job.venvs,
    )
    session = Session(job, flows, executor, folder, Progress(total=num_rounds), Deadlines(config.run.step_timeout_s))
    with executor:
        try:
            for flow in run_flows:
                executor.start(flow, planned.plans[flow.name])
            session.sync_weights()
            yield session
        except WorkersError as error:
            raise run_failed(error, None) from error
