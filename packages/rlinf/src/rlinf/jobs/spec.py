"""What is known of a job before any process starts, without torch: its config, its plan, what its recipes name; and the
jobs that a recipe may name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlinf.config.common import JobConfig
from rlinf.errors import UserError
from rlinf.plugin_checks import spec_of
from rlinf_workers.plugins import Plugins, Spec, imported

if TYPE_CHECKING:
    from rlinf.jobs.base import Job
    from rlinf.machine import Machine
    from rlinf.planning.memory import Load
    from rlinf_algos import Registry
    from rlinf_envs import KindSpec
    from rlinf_sched import Cluster, Plan, Problem
    from rlinf_workers.launchers import Interpreter


@dataclass(frozen=True, kw_only=True)
class JobSpec(Spec):
    """A kind of training; `implementation` is a subclass of `rlinf.jobs.base.Job`.

    A custom job needs `config` alone; what it leaves out here has a default. A method gets a config of that type.
    """

    config: Any = None
    """Its config model, a subclass of `rlinf.config.common.JobConfig`; or the import path of it."""
    resumable: tuple[str, ...] = ()
    """Keys that may change when a run is resumed, beside those of every job; no number depends on them."""
    acts: bool = False
    """Its checkpoints hold a policy that acts in environments: `rlinf play` and `rlinf eval --suite` take them. Its
    config has the sections `env` and `policy`."""
    samples_text: bool = False
    """An engine samples text, which a trainer scores: `rlinf check` compares the two. Its config is a
    `rlinf.config.reasoning.ReasoningConfig`."""

    def config_model(self) -> type[JobConfig]:
        """`config`, imported. Raises: UserError where it is none."""
        model = imported(self.config) if isinstance(self.config, str) else self.config
        if not (isinstance(model, type) and issubclass(model, JobConfig)):
            raise UserError(
                f"job={self.name}: its spec has no config model",
                hint="a job is a rlinf.jobs.spec.JobSpec whose `config` is a subclass of rlinf.config.common.JobConfig",
            )
        return model

    def names(self, config: Any) -> Iterable[tuple[Registry[Any], str, str]]:
        """What a config names: a registry, a name in it, and the key as a message begins with it."""
        return ()

    def check_references(self, config: Any) -> None:
        """Raises: UserError for a file or folder that the config names and that is not there."""

    def resolve_for_devices(self, config: Any, num_devices: int) -> Any:
        """The config with what it leaves to the devices."""
        return config

    def settle(self, config: Any, machine: Machine) -> Any:
        """The config with what is chosen by measurement, and notes about it; other processes of the run have not
        started. Raises: UserError, RunFailed."""
        return config

    def settle_for_plan(self, config: Any, num_devices: int, *, gpu: str) -> Any:
        """`settle` for the GPUs of `problem`: nothing is measured. Raises: UserError."""
        return config

    def env_kinds(self, config: Any) -> Sequence[KindSpec]:
        """Returns the kinds of environments that a run uses, for `rlinf doctor`."""
        return ()

    def preload(self, config: Any) -> Sequence[str]:
        """Modules that the workers import, for the process from which they are forked."""
        return ()

    def problem(self, config: Any, num_devices: int, *, gpu: str, env_step_s: float | None) -> Problem:
        """What the planner plans for GPUs that need not be there.

        Args:
            gpu: a product that the planner has a datasheet of.
            env_step_s: seconds of one step of one environment on a core; None: public figures.

        Raises: UserError where nothing is known of it.
        """
        raise UserError(
            f"job={self.name}: its spec says nothing of what its stages take",
            hint="measure it with rlinf profile, and plan from the file that it writes",
        )

    def plan_notes(self, config: Any, cluster: Cluster, *, env_step_s: float | None) -> Sequence[str]:
        """What `problem`, which has this cluster, takes for granted and a recipe does not say."""
        return ()

    def loads(self, config: Any, plan: Plan, cluster: Cluster) -> list[Load]:
        """What the ranks of a plan for `problem` hold; empty where it is not counted."""
        return []

    def make(self, config: Any, machine: Machine, venvs: Mapping[str, Interpreter]) -> Job:
        """The job of a config. Raises: UserError for wrong inputs.

        Args:
            environments: role -> the interpreter of its own, where it has one.
        """
        return self.load()(config, machine)


def with_shards(config: Any, num_devices: int, *, most: int, whole: int = 0) -> Any:
    """The config with a number in place of `actor.num_shards: auto`: a shard for each replica of the actor that the
    devices have room for. What is written down is a number, so a resumed run keeps it on any machine.

    Args:
        most: how many shards a batch has room for.
        whole: a size that the shards have to divide; 0: any.
    """
    if config.actor.num_shards != "auto":
        return config
    num_replicas = max(1, num_devices // config.replica_sizes.get("actor", 1))
    counts = range(min(num_replicas, most), 0, -1)
    num_shards = next(count for count in counts if num_replicas % count == 0 and whole % count == 0)
    return config.model_copy(update={"actor": config.actor.model_copy(update={"num_shards": num_shards})})


JOBS: Plugins[JobSpec] = Plugins(
    "job",
    {
        "reasoning": "rlinf.jobs.reasoning.spec:SPEC",
        "embodied": "rlinf.jobs.embodied.spec:SPEC",
        "sft": "rlinf.jobs.supervised.spec:SFT",
        "dpo": "rlinf.jobs.supervised.spec:DPO",
        "reward_model": "rlinf.jobs.supervised.spec:REWARD_MODEL",
    },
    base="rlinf.jobs.spec:JobSpec",
)


def job_spec(config: JobConfig) -> JobSpec:
    """The spec of a config's job. Raises: UserError."""
    return named_job(config.job)


def named_job(name: str) -> JobSpec:
    """The spec of a job by its name or import path. Raises: UserError."""
    return spec_of(JOBS, name, at="job")
