"""The embodied job: a robot learns a task in simulation.

env -> observations -> policy -> actions -> env (a cycle, pipelined by environment groups);  policy ->
trajectories -> actor -> weights -> policy
"""

from __future__ import annotations

from pathlib import Path

from rlinf.config.devices import device_kind
from rlinf.config.embodied import EmbodiedConfig
from rlinf.errors import UserError
from rlinf.jobs.base import Flows, Job, Score
from rlinf.jobs.env_interface import needs_of, probe
from rlinf.jobs.training import backend_settings, optimizer_settings
from rlinf.machine import Machine
from rlinf_envs import EnvSpec
from rlinf_sched.plan import Plan
from rlinf_workers import Flow, FlowRun
from rlinf_workers.embodied.actor import ADAM_EPSILON, EmbodiedActor, EmbodiedActorSettings
from rlinf_workers.embodied.environment import Environment, EnvironmentSettings
from rlinf_workers.embodied.rollout import EmbodiedRollout
from rlinf_workers.policies.base import PolicySettings

SUCCESS = Score(name="success_at_end", text="success at the end of the episode, held-out reset seeds")
SUCCESS_ONCE = Score(name="success_once", text="success at any time of the episode")
CYCLE = ("env", "policy")
"""The stages that feed each other."""
RETURN = Score(name="return", text="mean return over held-out reset seeds", is_share=False)


class EmbodiedJob(Job):
    """Flows and evaluation of an embodied recipe."""

    config: EmbodiedConfig

    def __init__(self, config: EmbodiedConfig, machine: Machine, env_python: str | None = None) -> None:
        self.config = config
        self.machine = machine
        self.num_items = config.env.num_groups
        self._simulates_on_host = device_kind(config.cluster, machine) == "cuda"
        self._backend = backend_settings(config.actor, config.actor.num_shards)
        self._spec = self._env_spec(config)
        self._interface = probe(self._spec, env_python)
        self._policy = self._policy_settings()
        self._needs = needs_of(self._policy, config.env.id)
        self._check_chunks()
        self.notes = self._interface.notes
        self.score = SUCCESS if self._interface.knows_success else RETURN
        self.other_scores = (SUCCESS_ONCE,) if self._interface.knows_success else ()
        if not self._interface.knows_success and config.run.stop_at_score is not None:
            raise UserError(
                f"run.stop_at_score={config.run.stop_at_score}: {config.env.id} never says that an episode succeeded",
                hint="its score is the return; use --run.stop_at_score null",
            )

    # -- flows -----------------------------------------------------------------------------------------------------

    def chunks(self, plan: Plan) -> dict[str, int]:
        """Where env and policy share every device nothing overlaps, so all groups of a rank go over at once."""
        if plan.mode != "collocated" or self._simulates_on_host:
            return {}
        return {stage: self.config.env.num_groups // plan.stage(stage).num_replicas for stage in CYCLE}

    def build(self, folder: Path) -> Flows:
        train = self._train_flow()
        evaluate = Flow("evaluate").workers_of(train, "env", "policy")
        self._join_env_and_policy(evaluate)
        return Flows(train=train, evaluate=evaluate)

    def _train_flow(self) -> Flow:
        config = self.config
        flow = Flow(config.algorithm.name.rpartition(":")[2])
        flow.worker("env", Environment, self._environment_settings())
        flow.worker("policy", EmbodiedRollout, self._policy)
        flow.worker("actor", EmbodiedActor, self._actor_settings())
        self._join_env_and_policy(flow)
        flow.stage(
            "actor",
            EmbodiedActor.train,
            reads="trajectories",
            dispatch="key",
            ordered=True,
            trains=True,
            whole_batch=True,
            num_parts=config.actor.num_shards,
        )
        flow.weights("actor", to="policy")
        assert config.env.num_groups % config.actor.num_shards == 0, "checked by the config"
        return flow

    def _join_env_and_policy(self, flow: Flow) -> None:
        """Simulators are work for cores: beside GPUs they run on the host, and a CPU slot is a core."""
        groups = self.num_items
        sizes = tuple(size for size in range(1, groups + 1) if groups % size == 0)
        flow.stage(
            "env",
            Environment.interact,
            reads="actions",
            writes="observations",
            dispatch="key",
            needs_device=not self._simulates_on_host,
            granularities=sizes,
            num_parts=groups,
        )
        flow.stage(
            "policy",
            EmbodiedRollout.act,
            reads="observations",
            writes=("actions", "trajectories"),
            dispatch="key",
            granularities=sizes,
            num_parts=groups,
        )

    # -- settings --------------------------------------------------------------------------------------------------

    @staticmethod
    def _env_spec(config: EmbodiedConfig) -> EnvSpec:
        env = config.env
        return EnvSpec(
            kind=env.kind,
            id=env.id,
            num_envs=env.num_envs // env.num_groups,
            max_episode_steps=env.max_episode_steps,
            ignore_terminations=env.ignore_terminations,
            options=env.options,
        )

    def _environment_settings(self) -> EnvironmentSettings:
        env = self.config.env
        return EnvironmentSettings(
            spec=self._spec,
            num_groups=env.num_groups,
            num_steps=env.num_steps,
            reads=self._needs.reads,
            chunk_size=self._needs.chunk_size,
            same_start=not self.config.algorithm.has_critic,
            num_eval_episodes=env.num_eval_episodes,
            eval_seed=env.eval_seed,
        )

    def _policy_settings(self) -> PolicySettings:
        policy, interface = self.config.policy, self._interface
        return PolicySettings(
            name=policy.name,
            fields=interface.fields,
            actions=interface.actions,
            options=policy.arguments,
            seed=self.config.seed,
        )

    def _check_chunks(self) -> None:
        """A segment is whole chunks, and a chunk is one sample."""
        config, size = self.config, self._needs.chunk_size
        num_steps = config.env.num_steps
        at_once = f"policy.name={config.policy.name} answers {size} actions at once"
        if num_steps % size:
            raise UserError(
                f"env.num_steps={num_steps} is not a multiple of {size}: {at_once}",
                hint=f"use {num_steps + size - num_steps % size}, for example",
            )
        if text := config.minibatch_conflict(size):
            raise UserError(f"algorithm.num_minibatches{text}", hint=f"{at_once}, and each answer is a sample")

    def _actor_settings(self) -> EmbodiedActorSettings:
        actor = self.config.actor
        return EmbodiedActorSettings(
            policy=self._policy,
            algorithm=self.config.algorithm,
            backend=self._backend,
            optimizer=optimizer_settings(actor, epsilon=ADAM_EPSILON),
        )

    def evaluation_metrics(self, run: FlowRun) -> dict[str, float]:
        names = ("success_once", "success_at_end", "return", "episode_length")
        by_task = "env/success_at_end/"
        scores = {name: run.metrics[f"env/{name}"] for name in names if f"env/{name}" in run.metrics}
        return scores | {k.removeprefix("env/"): v for k, v in run.metrics.items() if k.startswith(by_task)}
