"""All checks before a run, in one ordered list: `CHECKS`.

Each check is a function that raises UserError and may return notes for the run's manifest. Checks of the config import
nothing heavy, so that typos fail at once. The names in the configs of `rlinf eval` and `rlinf play` are checked here,
too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rlinf.address_space import check_address_space
from rlinf.config.common import ClusterConfig, JobConfig
from rlinf.config.evaluation import EvalConfig
from rlinf.config.inputs import check_model_folder
from rlinf.config.playing import TrainedConfig
from rlinf.errors import UserError
from rlinf.hub import hub_name
from rlinf.jobs.spec import job_spec
from rlinf.log_writers.base import LogWriter
from rlinf.log_writers.spec import LOG_WRITERS
from rlinf.plugin_checks import named_class, spec_of
from rlinf.tasks.row_files import matching
from rlinf.venvs import python_of
from rlinf_algos import AlgosError, Registry
from rlinf_workers.plugins import ENGINES, LAUNCHERS, POLICIES, WEIGHT_SYNCS

if TYPE_CHECKING:
    from rlinf.jobs.base import Job
    from rlinf.machine import Machine

Subject = Literal["train", "config", "driver", "machine", "job"]


def run_checks(subject: Subject, *arguments: Any) -> list[str]:
    """Runs the checks of a subject, in order; returns their notes. Raises: UserError."""
    return [note for of, check in CHECKS if of == subject for note in check(*arguments) or ()]


# -- checks ------------------------------------------------------------------------------------------------------------


def address_space(config: JobConfig) -> None:
    check_address_space()


def names(config: JobConfig) -> None:
    """Every name is known, and every import path leads to a module."""
    for registry, name, at in _names(config):
        refused(registry.locate, name, at)


def files(config: JobConfig) -> None:
    """Files, folders and venvs exist."""
    _check_venvs(config.venvs)
    if config.plan.profile is not None:
        check_file(config.plan.profile, "plan.profile", "rlinf profile RECIPE writes such a file")
    job_spec(config).check_references(config)


def loggers(config: JobConfig) -> None:
    """The log writers' packages are installed, their servers answer, and the user is logged in."""
    for name, options in config.run.loggers.chosen.items():
        if ":" in name:
            named_class(LOG_WRITERS, name, options, at=f"run.loggers.{name}", options_at="its options", base=LogWriter)
        spec_of(LOG_WRITERS, name, at="run.loggers").check(options)


def processes(config: JobConfig) -> None:
    """The launcher and the weight sync accept their options, and the env vars to pass on are set."""
    from rlinf.processes.executor import check_plugins

    check_plugins(config.cluster)


def placement(config: JobConfig, machine: Machine, num_devices: int) -> None:
    """Mode and placement fit the devices."""
    from rlinf.config.devices import check_placement

    check_placement(config, machine, num_devices)


def inputs(job: Job) -> list[str]:
    """The checks of this kind of job: models, data, rewards, the algorithm."""
    return [note for check in job.checks for note in check(job) or ()]


def score_to_stop_at(job: Job) -> None:
    """A score between 0 and 1 can reach `run.stop_at_score`."""
    limit = job.config.run.stop_at_score
    if limit is not None and job.score.is_share and not 0 < limit <= 1:
        raise UserError(
            f"run.stop_at_score={limit:g}: the score of this run is its {job.score.name}, a share; use a number above "
            "0 and up to 1"
        )


def plan(job: Job) -> None:
    """A plan exists, and its ranks have the memory that they need."""
    from rlinf.planning.plans import make_plans

    folder = Path("not-made-yet")
    make_plans(job, job.build(folder), folder)


CHECKS: tuple[tuple[Subject, Callable[..., Sequence[str] | None]], ...] = (
    ("train", loggers),
    ("config", address_space),
    ("config", names),
    ("config", files),
    ("driver", processes),
    ("machine", placement),
    ("job", inputs),
    ("job", score_to_stop_at),
    ("job", plan),
)
"""By subject: checks of `train`, `config` and `driver` take the config, those of `machine` also the machine and its
number of devices, those of `job` the job. Those of `train` are for `rlinf train` alone, before it downloads anything.
`rlinf.jobs.prepare` examines the venvs, detects the machine and counts its devices after the checks of `driver`."""


# -- what configs name -------------------------------------------------------------------------------------------------


def check_names(config: JobConfig) -> None:
    """`names` for a plan, which does not need import paths to be followed. Raises: UserError."""
    for registry, name, at in _names(config):
        refused(registry.check, name, at)


def check_eval_references(config: EvalConfig) -> None:
    """`names` and `files` for an evaluation. Raises: UserError."""
    _check_processes(config.cluster, config.venvs)
    refused(ENGINES.locate, config.engine, f"engine={config.engine}")
    for name, benchmark in config.benchmarks.items():
        if benchmark.reward is not None and ":" in benchmark.reward:
            at = f"benchmarks.{name}.reward={benchmark.reward}"
            refused(Registry("reward").locate, benchmark.reward, at)
    if not config.model.exists():
        check_model_folder(config.model, key="model")
    check_data(benchmark.file for benchmark in config.benchmarks.values())


def check_trained_references(config: TrainedConfig) -> None:
    """`names` and `files` for the config of a trained policy. Raises: UserError."""
    _check_processes(config.cluster, config.venvs)
    refused(POLICIES.locate, config.policy.name, "policy.name")


def _names(config: JobConfig) -> Iterator[tuple[Registry[Any], str, str]]:
    """Yields (registry, name, key) for each name in a run's config."""
    yield from _cluster_names(config.cluster)
    for name in config.run.loggers.chosen:
        yield LOG_WRITERS, name, f"run.loggers.{name}"
    yield from job_spec(config).names(config)


def _cluster_names(cluster: ClusterConfig) -> Iterator[tuple[Registry[Any], str, str]]:
    yield LAUNCHERS, cluster.launcher, "cluster.launcher"
    if cluster.weight_sync != "auto":
        yield WEIGHT_SYNCS, cluster.weight_sync, "cluster.weight_sync"


def _check_processes(cluster: ClusterConfig, venvs: Mapping[str, str]) -> None:
    for registry, name, at in _cluster_names(cluster):
        refused(registry.locate, name, at)
    _check_venvs(venvs)


def _check_venvs(venvs: Mapping[str, str]) -> None:
    for role, python in venvs.items():
        try:
            python_of(python)
        except UserError as error:
            raise UserError(f"venvs.{role}: {error.message}", hint=error.hint) from error


def refused(check: Callable[[str], None], name: str, at: str) -> None:
    """Converts a registry's error about a name into a UserError that begins with the key."""
    try:
        check(name)
    except AlgosError as error:
        raise UserError(f"{at}: {error}") from error


def check_file(path: Path, key: str, hint: str) -> None:
    if not path.exists():
        raise UserError(f"{key}={path}: No such file or directory", hint=hint)


def check_data(paths: Iterable[Path]) -> None:
    for path in paths:
        if hub_name(path) is None and not matching(path)[0].exists():
            raise UserError(f"{path}: No such file or directory", hint="check the path of the data file")
