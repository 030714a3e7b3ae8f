"""Runs a trained policy: env and policy workers on all devices, as in a run's evaluations.

Seeds, batches and their order are those of a run's evaluations, so the same seeds give the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rlinf.config.devices import device_kind, make_cluster
from rlinf.config.downloads import snapshot_folders
from rlinf.config.inputs import is_adapter
from rlinf.config.playing import TrainedConfig
from rlinf.errors import UserError
from rlinf.jobs.acting import (
    chosen_policy,
    env_spec,
    limit_notes,
    picture_notes,
    policy_settings,
    simulates_on_host,
    termination_notes,
)
from rlinf.jobs.embodied.flow import join_env_and_policy
from rlinf.jobs.env_interface import facts_of, needs_of, probe
from rlinf.jobs.films import collect, fps
from rlinf.jobs.training import policy_digest
from rlinf.machine import machine_of
from rlinf.playing.checkpoint import TrainedPolicy
from rlinf.playing.protocol import Protocol
from rlinf.processes.executor import make_executor, run_failed
from rlinf.processes.venvs import examine_venvs
from rlinf.run_folder.adapters import check_same_base
from rlinf_envs import EnvError, EnvSpec, EpisodeEnd, FieldSpec, RecordedEpisode
from rlinf_sched import Cluster, plan_for_mode
from rlinf_workers import Flow, RemoteError, StepContext, WeightFilesError, WorkersError
from rlinf_workers.roles import EnvInterface, EnvironmentSettings, EvaluationEnvironment, EvaluationPolicy

WORKER_TIMEOUT_S = 60.0
"""Heartbeat timeout in seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Played:
    """Results of some episodes."""

    episodes: tuple[EpisodeEnd, ...]
    """All episodes, by seed."""
    recorded: tuple[RecordedEpisode, ...]
    """The recorded episodes, the first ones by seed."""
    problems: tuple[str, ...]
    """Why some of the recorded episodes have no images."""


class PolicySession:
    """Checks its arguments on creation; starts its processes on entry and ends them on exit.

    Args:
        num_episodes: maximum number of episodes per evaluation.
        log_folder: folder for the workers' logs.
        acts_one_by_one: the policy answers one environment at a time, so that numbers depend on no batch.

    Raises: UserError if the environment cannot be created, does not fit the policy, or devices are missing.
    """

    def __init__(
        self, policy: TrainedPolicy, *, num_episodes: int, log_folder: Path, acts_one_by_one: bool = False
    ) -> None:
        config = policy.config
        self.policy = policy
        self.acts_one_by_one = acts_one_by_one
        self._log_folder, self._num_episodes = log_folder, num_episodes
        machine = machine_of(config.cluster)
        self._on_host = simulates_on_host(config.env, config.cluster, machine)
        self._venvs = examine_venvs(config.venvs)
        self._env_python = self._venvs["env"].path if "env" in self._venvs else None
        self.spec = env_spec(config.env)
        self.interface = probe(self.spec, self._env_python)
        self.notes = (
            *config.notes,
            *self.interface.notes,
            *termination_notes(config.env),
            *limit_notes(config.env, self.interface),
            *picture_notes(config.env, config.policy),
        )
        chosen, _ = chosen_policy(config.policy, self.interface, config.env.id)
        self._settings = policy_settings(chosen, self.interface, config.seed)
        self._needs = needs_of(self._settings, config.env.id)
        self.notes += self._needs.notes
        if policy.model is not None and is_adapter(policy.model):
            base = Path(str(self._settings.options.get("folder") or "the policy's first weights"))
            check_same_base(policy.model, policy_digest(self._settings), base, key="policy.options")
        self._num_groups = min(config.env.num_groups, num_episodes)
        self.cluster = _whole_shares(make_cluster(config.cluster, machine), self._num_groups)
        self._opened = ExitStack()
        self._known_facts: dict[str, dict[str, str]] = {}
        """By environment, without disturbance."""

    @property
    def reads(self) -> tuple[str, ...]:
        """The observation fields that the policy reads."""
        return self._needs.reads

    @property
    def batch_size(self) -> int:
        """Maximum number of environments that the policy answers together."""
        return 1 if self.acts_one_by_one else self._width(self._num_episodes)

    @property
    def fps(self) -> float:
        """Frames per second of films."""
        return fps(self._needs)

    def check(self, spec: EnvSpec) -> None:
        """Checks another environment for the policy. Its instructions may differ from the session's, if the policy
        accepts them; an environment that differs only by a disturbance is not created again.

        Raises: UserError if the environment cannot be created or does not fit the policy.
        """
        undisturbed = replace(spec, disturbance=None)
        interface = self.interface if undisturbed == self.spec else probe(undisturbed, self._env_python)
        others = f"than env.id={self.spec.id!r}, in which the policy acts"
        for name in self._needs.reads:
            other, own = _described(interface.fields.get(name)), _described(self.interface.fields[name])
            if other != own:
                raise UserError(f"env.id={spec.id!r} shows another {name} {others}: {other} in place of {own}")
        if not _alike(interface, self.interface):
            raise UserError(f"env.id={spec.id!r} takes other actions {others}")
        all_fields = interface.fields if spec.disturbance is None else spec.disturbance.fields(interface.fields)
        fields = {**self.interface.fields, **{name: all_fields[name] for name in self._needs.reads}}
        if fields != self.interface.fields:
            needs_of(replace(self._settings, fields=fields), spec.id)

    def protocol(self, spec: EnvSpec, *, first_seed: int, num_episodes: int) -> Protocol:
        """Returns the record of an evaluation.

        Args:
            spec: an environment that was passed to `check`, or the session's.
        """
        env = self.policy.config.env
        changes = {} if spec.disturbance is None else asdict(spec.disturbance)
        return Protocol(
            kind=spec.kind,
            env=spec.id,
            first_seed=first_seed,
            num_episodes=num_episodes,
            max_episode_steps=spec.max_episode_steps or 0,
            ends_early=not env.eval_ignore_terminations,
            chunk_size=self._needs.chunk_size,
            acting=self._needs.acting,
            simulator=self._facts(spec),
            disturbance={name: str(value) for name, value in changes.items() if value},
        )

    def task_groups(self, tasks: Iterable[str]) -> Mapping[str, str]:
        """Returns task -> the group that tables show it in (`KindSpec.task_groups`); empty: none. Raises: UserError."""
        env = self.policy.config.env
        try:
            return env.spec.task_groups(env.id, env.options, sorted(tasks))
        except EnvError as error:
            raise UserError(f"env.id={env.id!r}: {error}") from error

    def _facts(self, spec: EnvSpec) -> dict[str, str]:
        key = f"{spec.kind} {spec.id} {dict(spec.options)}"
        if key not in self._known_facts:
            self._known_facts[key] = facts_of(spec, self._env_python)
        return self._known_facts[key]

    def __enter__(self) -> PolicySession:
        with ExitStack() as opened:
            config = self.policy.config.cluster
            executor = make_executor(
                config,
                self.cluster,
                models=snapshot_folders(self.policy.config),
                log_folder=self._log_folder,
                worker_timeout_s=WORKER_TIMEOUT_S,
                venvs=self._venvs,
            )
            self._executor = opened.enter_context(executor)
            self._flow = self._make_flow()
            try:
                self._executor.start(self._flow, plan_for_mode(self._flow.graph(), self.cluster, "collocated"))
                if self.policy.model is not None:
                    self._executor.group("policy").call("load_policy", str(self.policy.model))
                if self.acts_one_by_one:
                    self._executor.group("policy").call("act_one_by_one")
            except RemoteError as error:
                if error.error_type != WeightFilesError.__name__:
                    raise run_failed(error, self._log_folder) from error
                raise UserError(
                    f"the policy of {self.policy.folder} does not fit env.id={self.spec.id!r}: {error.message}",
                    hint="let the environment show and take what it did in training",
                ) from error
            except WorkersError as error:
                raise run_failed(error, self._log_folder) from error
            self._opened = opened.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def play(
        self, spec: EnvSpec, *, first_seed: int, num_episodes: int, num_recorded: int = 0, timeout_s: float = 86400.0
    ) -> Played:
        """Runs episodes with the seeds from `first_seed` on, without exploration, each to its end as configured in the
        policy's run (`env.eval_ignore_terminations`).

        Args:
            spec: an environment that was passed to `check`, or the session's.
            num_recorded: number of episodes to record, from the first on.

        Raises: RunFailed if a worker dies or raises.
        """
        settings = self._environment_settings(spec, first_seed, num_episodes, num_recorded)
        try:
            env = self._executor.group("env")
            env.call("evaluate_in", settings)
            context = StepContext(step=self.policy.step, phase="evaluate", seed=self.policy.config.seed, num_items=0)
            self._executor.run(self._flow, context=context, feeds={}, timeout_s=timeout_s)
            ends = [end for of_rank in env.call("take_episodes") for end in of_rank]
            recorded, problems = collect(env, self._log_folder.parent)
        except WorkersError as error:
            raise run_failed(error, self._log_folder) from error
        return Played(
            episodes=tuple(sorted(ends, key=lambda end: end.seed)),
            recorded=tuple(recorded),
            problems=tuple(problems),
        )

    def _make_flow(self) -> Flow:
        flow = Flow("play")
        flow.worker("env", EvaluationEnvironment, self._environment_settings(self.spec, 0, self._num_groups, 0))
        flow.worker("policy", EvaluationPolicy, self._settings)
        join_env_and_policy(flow, self._num_groups, on_host=self._on_host)
        return flow

    def _environment_settings(
        self, spec: EnvSpec, first_seed: int, num_episodes: int, num_recorded: int
    ) -> EnvironmentSettings:
        """Limits the number of environments to that of the episodes."""
        width = self._width(num_episodes)
        return EnvironmentSettings(
            spec=replace(spec, num_envs=width, num_processes=min(width, spec.num_processes)),
            num_groups=self._num_groups,
            num_steps=self._needs.chunk_size,
            reads=self._needs.reads,
            chunk_size=self._needs.chunk_size,
            num_eval_episodes=num_episodes,
            eval_ignores_terminations=self.policy.config.env.eval_ignore_terminations,
            eval_seed=first_seed,
            num_recorded=num_recorded,
        )

    def _width(self, num_episodes: int) -> int:
        """Number of environments of a group."""
        widest = self.policy.config.env.num_envs // self.policy.config.env.num_groups
        return min(widest, -(-num_episodes // self._num_groups))


def acts_alone_by_default(config: TrainedConfig) -> bool:
    """Whether citable evaluations answer one environment at a time where the command line does not decide: on CPU
    devices, where it costs little."""
    return device_kind(config.cluster, machine_of(config.cluster)) == "cpu"


def _whole_shares(cluster: Cluster, num_groups: int) -> Cluster:
    """Returns the cluster with only as many devices as divide the groups evenly."""
    count = max(n for n in range(1, len(cluster.devices) + 1) if num_groups % n == 0)
    return replace(cluster, devices=cluster.devices[:count])


def _described(field: FieldSpec | None) -> str:
    """Describes a field without its texts."""
    return "none" if field is None else f"{field.dtype} of shape {list(field.shape)}"


def _alike(one: EnvInterface, other: EnvInterface) -> bool:
    """Returns whether both take the same actions."""
    a, b = one.actions, other.actions
    return (a.kind, a.shape) == (b.kind, b.shape) and bool((a.low == b.low).all() and (a.high == b.high).all())
