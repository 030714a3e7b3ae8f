"""Jobs: the training programs behind the recipes. `run` is what `rlinf train` calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlinf.config.common import JobConfig
    from rlinf.jobs.base import Job
    from rlinf.machine import Machine
    from rlinf.run_folder import RunFolder
    from rlinf_workers import Measured

__all__ = ["prepare", "run", "measure"]


def prepare(config: JobConfig, machine: Machine | None = None) -> Job:
    """The job of a config, after the checks of the driver, the machine and the job (`rlinf.jobs.checks`; those of the
    config go before, without torch); nothing is written or started. `job.config` has no number left that depends on the
    machine.

    Args:
        machine: where it will run; None: what its launcher has.

    Raises: UserError.
    """
    from rlinf.config.devices import check_cluster, resolve_for_devices
    from rlinf.jobs.checks import run_checks
    from rlinf.jobs.spec import job_spec
    from rlinf.machine import machine_of
    from rlinf.processes.env_vars import as_in_workers
    from rlinf.processes.venvs import examine_venvs
    from rlinf.run_folder.fingerprints import code_fingerprints

    run_checks("driver", config)
    machine = machine or machine_of(config.cluster)
    config = job_spec(config).settle(config, machine)
    venvs = examine_venvs(config.group_venvs)
    num_devices = check_cluster(config.cluster, machine)
    run_checks("machine", config, machine, num_devices)
    config = resolve_for_devices(config, num_devices)
    with as_in_workers(config.cluster):
        job = job_spec(config).make(config, machine, venvs)
        job.venvs = venvs
        job.notes = [*job.notes, *run_checks("job", job)]
    job.inputs = {**job.inputs, **code_fingerprints(job.config.model_dump(mode="json"))}
    return job


def run(job: Job, folder: RunFolder) -> str:
    """Runs a prepared job in its folder; returns what to tell of it. Where processes are lost and cannot be replaced,
    all are started anew from its newest checkpoint, on the machines that are left.

    Raises: RunFailed when a worker raises, or dies and the run is not to go on.
    """
    from rlinf.errors import ProcessesLost, RunFailed, UserError
    from rlinf.loop.restarts import Restarts
    from rlinf.loop.training_loop import TrainingLoop
    from rlinf.run_folder.fingerprints import changed_inputs

    restarts = Restarts(job.config.run)
    failure: ProcessesLost | None = None
    while True:
        loop = TrainingLoop(job, folder, restarts)
        try:
            return loop.run()
        except ProcessesLost as error:
            failure = error
        except UserError as error:
            if failure is None:
                raise
            raise RunFailed(f"{failure}\nand then: {error}") from error
        restarts.check(failure, loop.step)
        checkpoint = folder.begin_again(str(failure))
        loop.progress.warning(str(failure))
        inputs = job.inputs
        try:
            job, note = _where_machines_are_left(job)
        except UserError as error:
            raise RunFailed(f"{failure}\nand then: {error}") from error
        if changed := changed_inputs(inputs, job.inputs):
            raise RunFailed(f"{failure}\nand then: {', '.join(changed)} changed while the run was under way")
        place = checkpoint.name if checkpoint else "the start"
        folder.note(f"{failure.summary}; the run went on from {place} with new processes{note}")
        loop.progress.message(f"going on from {place} with new processes{note}")


def _where_machines_are_left(job: Job) -> tuple[Job, str]:
    """The job on what its launcher has now, and what to tell of that."""
    from rlinf.config.common import PlanConfig
    from rlinf.errors import UserError
    from rlinf.machine import machine_of

    cluster = job.config.cluster
    if not cluster.launcher_spec.has_nodes:
        return job, ""
    try:
        machine = machine_of(cluster)
    except UserError:  # fewer nodes than num_nodes, and none came back while the launcher waited
        options = {key: value for key, value in cluster.launcher_options.items() if key != "num_nodes"}
        cluster = cluster.model_copy(update={"launcher_options": options})
        machine = machine_of(cluster)
    if machine == job.machine:
        return job, ""
    cluster = cluster.model_copy(update={"num_devices": "auto"})
    config = job.config.model_copy(update={"cluster": cluster})
    note = f", on {len(machine.nodes)} of {len(job.machine.nodes)} nodes"
    try:
        return prepare(config, machine), note
    except UserError as error:  # the mode or the placement needs what was lost
        config = config.model_copy(update={"mode": "auto", "plan": PlanConfig()})
        return prepare(config, machine), f"{note}, in mode auto: {error.message}"


def measure(job: Job, folder: RunFolder) -> Measured:
    """The first steps of a prepared job in mode auto, and what its stages took.

    Raises: as `run`.
    """
    from rlinf.loop.training_loop import TrainingLoop

    return TrainingLoop(job, folder).measure()
