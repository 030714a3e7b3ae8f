"""All that is checked before a run, in the order in which its user is answered.

Each check is a function that raises UserError; what it returns are notes for the run's manifest. Checks of the config
import nothing heavy: a mistyped name is answered at once. `rlinf eval` and `rlinf play` look up what their configs name
here, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rlinf.address_space import check_address_space
from rlinf.config.common import ClusterConfig, JobConfig
from rlinf.config.evaluation import EvalConfig
from rlinf.config.inputs import check_model_folder, download_hint
from rlinf.config.playing import TrainedConfig
from rlinf.errors import UserError
from rlinf.jobs.plugins import job_spec
from rlinf.venvs import python_of
from rlinf_algos import AlgosError, Registry
from rlinf_workers.plugins import ENGINES, LAUNCHERS, POLICIES, WEIGHT_SYNCS

if TYPE_CHECKING:
    from rlinf.jobs.base import Job
    from rlinf.machine import Machine

Subject = Literal["config", "driver", "machine", "job"]


def run_checks(subject: Subject, *arguments: Any) -> list[str]:
    """Runs the checks of a subject, in order; returns their notes. Raises: UserError."""
    return [note for of, check in CHECKS if of == subject for note in check(*arguments) or ()]


# -- checks ------------------------------------------------------------------------------------------------------------


def address_space(config: JobConfig) -> None:
    check_address_space()


def names(config: JobConfig) -> None:
    """Something is known by each name, and an import path leads to it."""
    for registry, name, at in _names(config):
        refused(registry.locate, name, at)


def files(config: JobConfig) -> None:
    """Files, folders and venvs are there."""
    _check_venvs(config.venvs)
    if config.plan.profile is not None:
        check_file(config.plan.profile, "plan.profile", "rlinf profile RECIPE writes such a file")
    job_spec(config).check_references(config)


def wandb(config: JobConfig) -> None:
    """It is installed, and somebody is logged in."""
    from rlinf.run_folder.wandb_sink import check_wandb

    check_wandb(config.run.wandb)


def processes(config: JobConfig) -> None:
    """The launcher and the weight sync take their options, and env vars to pass on are set."""
    from rlinf.processes.executor import check_plugins

    check_plugins(config.cluster)


def devices(config: JobConfig, machine: Machine) -> None:
    """The machine has them, and mode and placement fit them."""
    from rlinf.config.devices import check_devices

    check_devices(config, machine)


def inputs(job: Job) -> list[str]:
    """What its own kind of job checks: models, data, rewards, the algorithm."""
    return [note for check in job.checks for note in check(job) or ()]


def score_to_stop_at(job: Job) -> None:
    """A share can reach it, and has not from the beginning."""
    limit = job.config.run.stop_at_score
    if limit is not None and job.score.is_share and not 0 < limit <= 1:
        raise UserError(
            f"run.stop_at_score={limit:g}: the score of this run is its {job.score.name}, a share; use a number above "
            "0 and up to 1"
        )


def plan(job: Job) -> None:
    """There is one, and its ranks have the memory that they need."""
    from rlinf.planning.plans import make_plans

    folder = Path("not-made-yet")
    make_plans(job, job.build(folder), folder)


CHECKS: tuple[tuple[Subject, Callable[..., Sequence[str] | None]], ...] = (
    ("config", address_space),
    ("config", names),
    ("config", files),
    ("driver", wandb),
    ("driver", processes),
    ("machine", devices),
    ("job", inputs),
    ("job", score_to_stop_at),
    ("job", plan),
)
"""Subject -> what the checks get: `config` and `driver` a config, `machine` a config and the machine, `job` a job.
Between `driver` and `machine` the venvs of roles are examined and the machine is looked at."""


# -- what configs name -------------------------------------------------------------------------------------------------


def check_names(config: JobConfig) -> None:
    """As `names`, but import paths are not followed, which a plan needs not."""
    for registry, name, at in _names(config):
        refused(registry.check, name, at)


def check_eval_references(config: EvalConfig) -> None:
    """As `names` and `files`, of an evaluation. Raises: UserError."""
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
    """As `names` and `files`, of what a trained policy acts with. Raises: UserError."""
    _check_processes(config.cluster, config.venvs)
    refused(POLICIES.locate, config.policy.name, "policy.name")


def _names(config: JobConfig) -> Iterator[tuple[Registry[Any], str, str]]:
    """What a run names, with the key as a message begins with it."""
    yield from _cluster_names(config.cluster)
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
    """What a registry says of a name, as an error that begins with the key."""
    try:
        check(name)
    except AlgosError as error:
        raise UserError(f"{at}: {error}") from error


def check_file(path: Path, key: str, hint: str) -> None:
    if not path.exists():
        raise UserError(f"{key}={path}: No such file or directory", hint=hint)


def check_data(paths: Iterable[Path]) -> None:
    for path in paths:
        if not path.exists():
            hint = download_hint(path, "--repo-type dataset ") or "check the path of the data file"
            raise UserError(f"{path}: No such file or directory", hint=hint)
