"""The embodied job: a robot learns a task in simulation.

env -> observations -> policy -> actions -> env (a cycle, pipelined by environment groups);  policy ->
trajectories -> actor -> weights -> policy
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlinf.config.embodied import EmbodiedConfig
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
from rlinf.jobs.base import Flows, Job, Score
from rlinf.jobs.demonstrations import SftWarmUp
from rlinf.jobs.embodied.demonstrated_transitions import DemonstratedTransitions
from rlinf.jobs.embodied.flow import join_env_and_policy, training_flow, waiting_notes
from rlinf.jobs.embodied.kept_episodes import KeptEpisodes
from rlinf.jobs.embodied.learning import episode_batch, learning_of
from rlinf.jobs.embodied.running_episodes import RunningEpisodes
from rlinf.jobs.embodied.success_classifier import RewardFromPictures
from rlinf.jobs.env_interface import needs_of, probe
from rlinf.jobs.films import check_draws, check_video, write_film
from rlinf.jobs.training import (
    backend_settings,
    check_policy_module,
    epsilon_notes,
    policy_digest,
    policy_lora,
    with_base,
)
from rlinf.machine import Machine
from rlinf.run_folder.fingerprints import path_fingerprint
from rlinf_envs import EXPERTS, kinds_with
from rlinf_sched import Plan
from rlinf_workers import Flow, FlowRun
from rlinf_workers.policies import FOLDER_OPTIONS
from rlinf_workers.roles import EnvironmentSettings

if TYPE_CHECKING:
    from rlinf.loop.session import Session

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
        self._learning = learning_of(config)
        self._simulates_on_host = simulates_on_host(config.env, config.cluster, machine)
        self._backend = backend_settings(config.actor, config.actor.num_shards)
        self._spec = env_spec(config.env)
        self._interface = probe(self._spec, env_python)
        policy, policy_notes = chosen_policy(config.policy, self._interface, config.env.id, algorithm=config.algorithm)
        config = self.config = config.model_copy(update={"policy": policy})
        self._policy = policy_settings(policy, self._interface, config.seed)
        self._needs = needs_of(self._policy, config.env.id)
        self._learning.check(self._policy, self._needs, machine.memory_bytes)
        self._check_chunks()
        self._check_expert()
        check_policy_module(config.actor, self._policy)
        self._lora = policy_lora(config.actor.lora, config.actor.backend, self._policy)
        self._policy = replace(self._policy, wide_heads=self._lora is not None)
        self._sft_warm_up = config.sft_warm_up and SftWarmUp(
            config.sft_warm_up, config, self._interface, self._needs, is_kept=self._learning.keeps_demonstrations
        )
        self._demonstrations = config.demonstrations and DemonstratedTransitions(
            config.demonstrations, config, self._interface, self._needs
        )
        self._rewarding = config.success_classifier and RewardFromPictures(
            config.success_classifier, config, self._interface
        )
        self._check_films(env_python)
        self._check_segments()
        self._episodes = RunningEpisodes()
        self._kept = KeptEpisodes(config.env) if config.env.episodes_megabytes else None
        self.notes = (
            *self._interface.notes,
            *policy_notes,
            *termination_notes(config.env),
            *limit_notes(config.env, self._interface),
            *picture_notes(config.env, config.policy),
            *epsilon_notes(config.actor, config.policy),
            *waiting_notes(config),
            *self._learning.notes,
            *self._needs.notes,
        )
        self.score = SUCCESS if self._interface.knows_success else RETURN
        self.other_scores = (SUCCESS_ONCE,) if self._interface.knows_success else ()
        if not self._interface.knows_success and config.run.stop_at_score is not None:
            raise UserError(
                f"run.stop_at_score={config.run.stop_at_score}: {config.env.id} never says that an episode succeeded",
                hint="its score is the return; use --run.stop_at_score null",
            )

        folders = {
            "sft_warm_up.path": config.sft_warm_up and config.sft_warm_up.path,
            "demonstrations.path": config.demonstrations and config.demonstrations.path,
            "success_classifier.path": config.success_classifier and config.success_classifier.path,
            **{f"policy.options.{name}": config.policy.options.get(name) for name in FOLDER_OPTIONS},
        }
        self.inputs = {
            f"{key}={path}": path_fingerprint(Path(str(path)))
            for key, path in folders.items()
            if path is not None and Path(str(path)).exists()
        }

    # -- flows -----------------------------------------------------------------------------------------------------

    def chunks(self, plan: Plan) -> dict[str, int]:
        """Where env and policy share every device nothing overlaps, so all groups of a rank go over at once."""
        if plan.mode != "collocated" or self._simulates_on_host:
            return {}
        return {stage: self.config.env.num_groups // plan.stage(stage).num_replicas for stage in CYCLE}

    def build(self, folder: Path) -> Flows:
        base = Path(str(self.config.policy.options.get("folder") or "the policy's first weights"))
        digest = policy_digest(self._policy) if self._lora is not None else None
        self._lora = with_base(self._lora, base, folder, digest=digest, key="policy.options")
        train = self._train_flow()
        evaluate = Flow("evaluate").workers_of(train, "env", "policy")
        join_env_and_policy(evaluate, self.num_items, on_host=self._simulates_on_host)
        parts = [part for part in (self._sft_warm_up, self._demonstrations) if part is not None]
        others = [flow for part in parts for flow in part.flows_of(train)]
        return Flows(train=train, evaluate=evaluate, others=others)

    def _train_flow(self) -> Flow:
        config = self.config
        actor = self._learning.actor(
            self._policy,
            self._needs,
            self._backend,
            sft_warm_up=self._sft_warm_up and self._sft_warm_up.optimizer,
            lora=self._lora,
        )
        rollout = self._learning.rollout(self._policy, self._needs)
        return training_flow(
            config,
            {"env": (self._environment_settings(),), "policy": rollout, "actor": (actor,)},
            on_host=self._simulates_on_host,
            reports=config.segments_continue or self._kept is not None,
        )

    # -- settings --------------------------------------------------------------------------------------------------

    def _environment_settings(self) -> EnvironmentSettings:
        env = self.config.env
        return EnvironmentSettings(
            spec=self._spec,
            num_groups=env.num_groups,
            num_steps=env.num_steps,
            continues=self.config.segments_continue,
            episodes=episode_batch(self.config),
            reads=self._needs.reads,
            chunk_size=self._needs.chunk_size,
            same_start=self.config.compares_episodes,
            expert=self._learning.queries(self._needs),
            num_eval_episodes=env.num_eval_episodes,
            eval_ignores_terminations=env.eval_ignore_terminations,
            eval_seed=env.eval_seed,
            keeps_episodes=self._kept is not None,
            num_recorded=env.num_eval_videos,
        )

    def _check_chunks(self) -> None:
        """A segment is whole chunks, and a chunk is one sample."""
        config, size = self.config, self._needs.chunk_size
        if config.env.episodes_per_step is not None:
            return  # an episode may end within a chunk, and samples are split evenly whatever their number
        num_steps = config.env.num_steps
        at_once = f"policy.name={config.policy.name} answers {size} actions at once"
        if num_steps % size:
            raise UserError(
                f"env.num_steps={num_steps} is not a multiple of {size}: {at_once}",
                hint=f"use {num_steps + size - num_steps % size}, for example",
            )
        if conflict := config.sample_conflict(size):
            raise UserError(str(conflict), hint=f"{at_once}, and each answer is a sample")

    def _check_expert(self) -> None:
        """Only an environment with an expert can be asked."""
        env = self.config.env
        if self._learning.queries(self._needs) is None or self._interface.has_expert:
            return
        raise UserError(
            f"algorithm.name={self.config.algorithm.name} asks an expert what it would do in the states of the policy, "
            f"and env.kind={env.kind}, env.id={env.id!r} has none that answers; {', '.join(kinds_with(EXPERTS))} has",
            hint="a custom environment has one if it defines expert_actions (rlinf_envs.SupportsExpert); sft_warm_up "
            "imitates demonstrations alone",
        )

    def _check_segments(self) -> None:
        """A segment goes on with the episodes of the one before only where these can be replayed."""
        env = self.config.env
        if env.episodes_per_step is not None and not self._interface.begins_rows:
            raise UserError(
                f"env.episodes_per_step={env.episodes_per_step}: the rows of env.id={env.id!r} cannot begin episodes "
                "one by one (rlinf_envs.SupportsBegin)",
                hint="leave it out, or give the environment a method begin(seeds, alone=...)",
            )
        if self.config.segments_continue and not self._interface.is_replayable:
            raise UserError(
                f"env.num_steps={env.num_steps} is below env.max_episode_steps={env.max_episode_steps}, and env.id="
                f"{env.id!r} cannot return to the middle of an episode (rlinf_envs.Replayable): each training step "
                "would begin with a reset, and only beginnings of episodes would be trained on",
                hint=f"use --env.num_steps {env.max_episode_steps}, or shorter episodes",
            )

    def _check_films(self, env_python: str | None) -> None:
        if not self.config.env.num_eval_videos:
            return
        check_video("or use --env.num_eval_videos 0")
        if env_python is None and not any(name.startswith("image.") for name in self._needs.reads):
            check_draws(self._spec)

    def prepare(self, session: Session) -> None:
        """The success classifier, the SFT warm-up, or the demonstrations of an off-policy algorithm, where there are
        any."""
        for part in (self._rewarding, self._sft_warm_up, self._demonstrations):
            if part is not None:
                part.run(session)

    def trained(self, run: FlowRun) -> None:
        if self.config.segments_continue:
            self._episodes.take(run)
        if self._kept is not None:
            self._kept.take(run)

    def stepped(self, session: Session, step: int) -> None:
        if self._kept is not None:
            self._kept.write(session, step)

    def save(self, checkpoint: Path) -> None:
        self._episodes.save(checkpoint)

    def load(self, checkpoint: Path) -> None:
        self._episodes.load(checkpoint)

    def restore(self, session: Session, step: int) -> None:
        if self._rewarding is not None:
            self._rewarding.restore(session)
        if self.config.segments_continue:
            self._episodes.hand_out(session)

    def evaluated(self, session: Session, step: int) -> None:
        if self.config.env.num_eval_videos:
            for problem in write_film(session.group("env"), session.folder, step, self._needs):
                session.note(f"env.num_eval_videos: {problem}")

    def before_training(self, session: Session, score: float) -> None:
        policy, env = self.config.policy, self.config.env
        is_asked = self._learning.queries(self._needs) is not None  # an expert, who helps where nothing succeeds
        folder = policy.options.get("folder") or policy.options.get("flow_folder")
        has_learned = self._sft_warm_up or folder
        if score > 0 or self.score is not SUCCESS or is_asked or not has_learned:
            return
        origin = "the SFT warm-up" if self._sft_warm_up else f"the checkpoint {folder}"
        session.note(
            f"no success: the policy of {origin} solves none of {env.num_eval_episodes} episodes before the first "
            "step, and where nothing succeeds there is little to reinforce. A convention may be wrong (rotated "
            f"pictures, gripper, statistics, ...): rlinf check {session.folder} names it"
        )

    def evaluation_metrics(self, run: FlowRun) -> dict[str, float]:
        names = ("success_once", "success_at_end", "return", "episode_length")
        by_task = "env/success_at_end/"
        scores = {name: run.metrics[f"env/{name}"] for name in names if f"env/{name}" in run.metrics}
        return scores | {k.removeprefix("env/"): v for k, v in run.metrics.items() if k.startswith(by_task)}
