"""The embodied job: a robot learns a task in simulation by PPO.

env -> observations -> policy -> actions -> env (a cycle, pipelined by environment groups);  policy ->
trajectories -> actor -> weights -> policy
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rlinf.config.schema import EmbodiedConfig
from rlinf.errors import UserError
from rlinf.jobs.base import Flows, Score

if TYPE_CHECKING:
    from rlinf.jobs.loop import TrainingLoop
from rlinf_envs import EnvError, EnvSpec, make_env
from rlinf_sched.plan import Plan
from rlinf_workers import Flow, FlowRun
from rlinf_workers.models.actor_critic import ActorCriticSettings
from rlinf_workers.roles.environment import Environment, EnvironmentSettings
from rlinf_workers.roles.policy import Policy
from rlinf_workers.roles.policy_actor import GaeSettings, GroupSettings, PolicyActor, PolicyActorSettings

SUCCESS = Score(name="success_at_end", text="success at the end of the episode, held-out reset seeds")
SUCCESS_ONCE = Score(name="success_once", text="success at any time of the episode")
CYCLE = ("env", "policy")
"""The stages that feed each other."""
RETURN = Score(name="return", text="mean return over held-out reset seeds", is_share=False)


class EmbodiedJob:
    """Flows and evaluation of an embodied recipe; the loop does the rest."""

    trainer = "actor"

    def __init__(self, config: EmbodiedConfig) -> None:
        self.config = config
        self._spec = self._env_spec(config)
        self._shape, self.notes, knows_success = self._probe(self._spec)
        self.score = SUCCESS if knows_success else RETURN
        self.other_scores = (SUCCESS_ONCE,) if knows_success else ()
        if not knows_success and config.run.stop_at_score is not None:
            raise UserError(
                f"run.stop_at_score={config.run.stop_at_score}: {config.env.id} never says that an episode succeeded",
                hint="its score is the return; use --run.stop_at_score null",
            )

    # -- flows -----------------------------------------------------------------------------------------------------

    @property
    def num_items(self) -> int:
        return self.config.env.num_groups

    @property
    def granularities(self) -> dict[str, tuple[int, ...]]:
        groups = self.num_items
        return dict.fromkeys(CYCLE, tuple(size for size in range(1, groups + 1) if groups % size == 0))

    @property
    def num_parts(self) -> dict[str, int]:
        groups = self.config.env.num_groups
        return {"actor": self.config.actor.num_shards, "env": groups, "policy": groups}

    def chunks(self, plan: Plan) -> dict[str, int]:
        """Where env and policy share every device nothing overlaps, so all groups of a rank go over at once."""
        if plan.mode != "collocated":
            return {}
        return {stage: self.config.env.num_groups // plan.stage(stage).num_ranks for stage in CYCLE}

    def check_plan(self, plan: Plan) -> None:
        for stage in CYCLE:
            num_groups = self.config.env.num_groups // plan.stage(stage).num_ranks
            granularity = plan.stage(stage).granularity
            if num_groups % granularity:
                raise UserError(
                    f"plan.granularity.{stage}={granularity} does not divide the {num_groups} env groups of a rank",
                    hint="env and policy would wait for each other; use a divisor, or change env.num_groups",
                )

    def write_inputs(self, folder: Path) -> None:
        return

    def build(self, folder: Path) -> Flows:
        train = self._train_flow()
        evaluate = Flow("evaluate").workers_of(train, "env", "policy")
        self._join_env_and_policy(evaluate)
        return Flows(train=train, evaluate=evaluate)

    def _train_flow(self) -> Flow:
        config = self.config
        flow = Flow(config.algorithm.name)
        flow.worker("env", Environment, self._environment_settings())
        flow.worker("policy", Policy, self._model_settings())
        flow.worker("actor", PolicyActor, self._actor_settings())
        self._join_env_and_policy(flow)
        flow.stage(
            "actor",
            PolicyActor.train,
            reads="trajectories",
            dispatch="key",
            ordered=True,
            trains=True,
            whole_batch=True,
        )
        flow.weights("actor", to="policy")
        assert config.env.num_groups % config.actor.num_shards == 0, "checked by the config"
        return flow

    @staticmethod
    def _join_env_and_policy(flow: Flow) -> None:
        flow.stage("env", Environment.interact, reads="actions", writes="observations", dispatch="key")
        flow.stage("policy", Policy.act, reads="observations", writes=("actions", "trajectories"), dispatch="key")

    # -- settings --------------------------------------------------------------------------------------------------

    @staticmethod
    def _env_spec(config: EmbodiedConfig) -> EnvSpec:
        env = config.env
        options: dict[str, Any] = dict(env.options)
        for name in ("control_mode", "reward_mode"):
            if (value := getattr(env, name)) is not None:
                options[name] = value
        return EnvSpec(
            kind=env.kind,
            id=env.id,
            num_envs=env.num_envs // env.num_groups,
            max_episode_steps=env.max_episode_steps,
            ignore_terminations=env.ignore_terminations,
            options=options,
        )

    @staticmethod
    def _probe(spec: EnvSpec) -> tuple[tuple[int, int], tuple[str, ...], bool]:
        """Observation and action sizes, fall-backs, and whether episodes say that they succeeded: from one
        environment made, stepped and closed here, so that mistakes show before any process starts."""
        try:
            env = make_env(replace(spec, num_envs=1, max_episode_steps=1))
        except EnvError as error:
            raise UserError(f"env.id={spec.id!r}: {error}") from error
        try:
            fields, actions = env.observation_spec, env.action_spec
            if "state" not in fields:
                raise UserError(
                    f"env.id={spec.id!r} gives the observations {sorted(fields)}; this job's policy reads 'state'",
                    hint="choose options with state observations",
                )
            if actions.kind != "continuous":
                raise UserError(
                    f"env.id={spec.id!r} takes {actions.kind} actions; this job's policy gives continuous ones"
                )
            env.reset([0])
            (episode,) = env.step(torch.zeros(1, *actions.shape)).episodes
            return (fields["state"].shape[0], actions.shape[0]), env.notes, episode.success_once is not None
        finally:
            env.close()

    def _environment_settings(self) -> EnvironmentSettings:
        env = self.config.env
        return EnvironmentSettings(
            spec=self._spec,
            num_groups=env.num_groups,
            num_steps=self.config.algorithm.num_steps,
            same_start=self.config.algorithm.name == "grpo",
            num_eval_episodes=env.num_eval_episodes,
            eval_seed=env.eval_seed,
        )

    def _model_settings(self) -> ActorCriticSettings:
        policy, (observation_size, action_size) = self.config.policy, self._shape
        return ActorCriticSettings(
            observation_size=observation_size,
            action_size=action_size,
            hidden_sizes=tuple(policy.hidden_sizes),
            initial_log_std=policy.initial_log_std,
            normalize_observations=policy.normalize_observations,
            seed=self.config.seed,
        )

    def _actor_settings(self) -> PolicyActorSettings:
        actor, algorithm = self.config.actor, self.config.algorithm
        return PolicyActorSettings(
            model=self._model_settings(),
            num_shards=actor.num_shards,
            learning_rate=actor.learning_rate,
            max_grad_norm=actor.max_grad_norm,
            advantage=self._advantage_settings(),
            clip=algorithm.clip,
            num_epochs=algorithm.num_epochs,
            minibatch_size=algorithm.minibatch_size,
            value_coef=algorithm.value_coef or 0.0,
            entropy_coef=algorithm.entropy_coef,
            target_kl=algorithm.target_kl,
        )

    def _advantage_settings(self) -> GaeSettings | GroupSettings:
        algorithm = self.config.algorithm
        if algorithm.name == "grpo":
            assert algorithm.compares and algorithm.normalize_std is not None, "filled in and checked by the config"
            gamma = 1.0 if algorithm.gamma is None else algorithm.gamma
            return GroupSettings(compares=algorithm.compares, gamma=gamma, normalize_std=algorithm.normalize_std)
        assert algorithm.gamma is not None and algorithm.gae_lambda is not None, "filled in and checked by the config"
        return GaeSettings(
            gamma=algorithm.gamma,
            gae_lambda=algorithm.gae_lambda,
            bootstrap_at_termination=bool(algorithm.bootstrap_at_termination),
        )

    # -- what is fed, what is scored ---------------------------------------------------------------------------------

    def prepare(self, loop: TrainingLoop) -> None:
        return

    def restore(self, loop: TrainingLoop) -> None:
        return

    def feeds(self, step: int) -> dict[str, list[Any]]:
        return {}

    def evaluation_feeds(self) -> dict[str, list[Any]]:
        return {}

    def evaluation_metrics(self, run: FlowRun) -> dict[str, float]:
        names = ("success_once", "success_at_end", "return", "episode_length")
        return {name: run.metrics[f"env/{name}"] for name in names if f"env/{name}" in run.metrics}
