"""The reasoning job: a language model learns to answer, from rewards alone.

prompts -> rollout -> samples -> [reference ->] reward -> scored -> actor;  the actor's weights go back to the
rollout, and so do those of further policies, each with an actor of its own
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rlinf.config.devices import device_kind, make_cluster
from rlinf.config.reasoning import ReasoningConfig
from rlinf.errors import UserError
from rlinf.glossary import policy_prefix
from rlinf.jobs.agreement import Arithmetic, MismatchVerdict, arithmetic_of, judge_step
from rlinf.jobs.base import Flows, Job, Score
from rlinf.jobs.models import config_of
from rlinf.jobs.reasoning.checks import CHECKS
from rlinf.jobs.reasoning.flow import (
    actor_granularities,
    check_flow,
    evaluation_flow,
    job_shape,
    num_sampled_prompts,
    sft_warm_up_flow,
    training_flow,
)
from rlinf.jobs.reasoning.late_groups import LateGroups
from rlinf.jobs.reasoning.memory import ReasoningMemory, policy_shapes, reference_shape, shape_of
from rlinf.jobs.reasoning.prompts import PromptSource
from rlinf.jobs.reasoning.reference import follow_policy, restore_reference, save_first_reference
from rlinf.jobs.reasoning.sft_warm_up import prepare_sft_warm_up
from rlinf.jobs.reasoning.workers import MODEL_FOLDER, WorkerSettings
from rlinf.jobs.rewards import JUDGES, judging_s, reward_folders
from rlinf.jobs.training import backend_settings, lora_settings
from rlinf.machine import Machine
from rlinf.run_folder.checkpoints import policy_folder
from rlinf.run_folder.fingerprints import model_fingerprint
from rlinf.tasks import TaskProblem
from rlinf.tasks.files import FileProblems
from rlinf.tasks.language import write_model_folder
from rlinf_sched import Plan
from rlinf_sched.derive import ModelShape
from rlinf_workers import Flow, FlowRun
from rlinf_workers.models import LoraSettings
from rlinf_workers.roles import RolloutSettings, ScoredGroup
from rlinf_workers.trainers import BackendSettings

if TYPE_CHECKING:
    from rlinf.loop.session import Session

NUM_CHUNKS = 8
"""Pieces in which a batch of prompts goes through a pipelined plan."""
NUM_CHECKED_COMPLETIONS, NUM_CHECKED_TOKENS = 2, 64
"""Completions of a prompt that a check compares, and the longest of them."""
ACCURACY = "accuracy"


class ReasoningJob(Job):
    """The flows of a reasoning recipe and their inputs. Its parts are created when they are first read; `checks` reads
    all of them."""

    config: ReasoningConfig
    checks = CHECKS

    def __init__(self, config: ReasoningConfig, machine: Machine) -> None:
        self.config = config
        self.machine = machine
        self.num_items = num_sampled_prompts(config)
        self.stops_on_mismatch = config.rollout.stop_on_mismatch
        self.trainers = {trainer: policy_folder(policy) for trainer, policy in config.trainers.items()}
        self.prompts = PromptSource(config)
        self._sft_warm_up: Flow | None = None
        self._late = LateGroups() if config.max_lateness else None

    # -- parts -----------------------------------------------------------------------------------------------------

    @cached_property
    def score(self) -> Score:
        return scores_of(self.config, judges=self.prompts.tried_reward.judges)[0]

    @cached_property
    def other_scores(self) -> Sequence[Score]:
        return scores_of(self.config, judges=self.prompts.tried_reward.judges)[1:]

    @cached_property
    def inputs(self) -> Mapping[str, str]:
        config, task = self.config, self.prompts.task
        folders = config.model_paths | reward_folders(config.reward)
        models = {f"{key}={path}": model_fingerprint(path) for key, path in folders.items() if path is not None}
        return models | (task.fingerprints() if isinstance(task, FileProblems) else {})

    @cached_property
    def model_config(self) -> dict[str, Any]:
        """config.json of the model, as far as sizes go."""
        if self.config.model.path is not None:
            return config_of(self.config.model.path)
        architecture = self.config.model.architecture
        assert architecture is not None, "a config has a path or an architecture"
        return {
            "model_type": architecture.family,
            "hidden_size": architecture.hidden_size,
            "intermediate_size": architecture.intermediate_size,
            "num_hidden_layers": architecture.num_layers,
            "num_attention_heads": architecture.num_heads,
            "num_key_value_heads": architecture.num_kv_heads,
            "vocab_size": len(self.prompts.tokenizer),
        }

    @cached_property
    def backend(self) -> BackendSettings:
        return backend_settings(self.config.actor, self.config.actor.resolved_shards, self.model_config)

    @cached_property
    def loras(self) -> Mapping[str | None, LoraSettings | None]:
        """Policy -> its adapter; None: the policy of model.path."""
        actor = self.config.actor
        bases = {policy: path or self.config.model.path for policy, path in self.config.policies.items()}
        return {policy: lora_settings(actor.lora, actor.backend, base) for policy, base in bases.items()}

    @cached_property
    def shape(self) -> ModelShape | None:
        """None: the architecture is unknown."""
        return shape_of(self.config, len(self.prompts.tokenizer))

    @cached_property
    def shapes(self) -> Mapping[str, ModelShape]:  # pyright: ignore[reportIncompatibleVariableOverride]
        if self.shape is None:
            return {}
        stages = {"reference": reference_shape(self.config, self.shape), **policy_shapes(self.config, self.shape)}
        if len(self.config.policies) == 1:  # of several its tokens are not told apart
            stages["rollout"] = self.shape
        return {stage: shape for stage, shape in stages.items() if shape is not None}

    @cached_property
    def memory(self) -> ReasoningMemory | None:
        if self.shape is None:
            return None
        cluster = make_cluster(self.config.cluster, self.machine)
        return ReasoningMemory(self.config, self.shape, cluster, self.machine.memory_bytes)

    @cached_property
    def arithmetics(self) -> Mapping[str | None, Arithmetic]:
        """Policy -> what its engine and its trainer compute with; None: the policy of model.path."""
        config = self.config
        dtype = config.actor.trainer_spec.compute_dtype(config.actor.backend_options, config.model.dtype)
        return {
            policy: arithmetic_of(
                self.model_config if path is None else config_of(path),
                trained_dtype=dtype,
                served_dtype=config.served_dtype,
                temperature=config.rollout.temperature,
                quantization=config.rollout.quantization,
                quantizes_activations=config.rollout.engine_spec.quantizes_activations,
            )
            for policy, path in config.policies.items()
        }

    @property
    def judging_s(self) -> float:
        num_problems = sum(map(len, self.prompts.held_out.values()))
        num_completions = max(
            self.num_items * self.config.algorithm.group_size, num_problems * self.config.evaluation.num_samples
        )
        return num_completions * judging_s(self.config.reward)

    # -- flows -----------------------------------------------------------------------------------------------------

    def chunks(self, plan: Plan) -> dict[str, int]:
        if plan.mode == "collocated":
            return {}
        size = max(1, self.num_items // NUM_CHUNKS)
        stages = [placed.stage for placed in plan.stages]
        whole = {"rollout": 0} if self.config.has_prompts_by_rank else {}
        of_trainers = dict.fromkeys(self.config.trainers, actor_granularities(self.config)[0])
        return {**dict.fromkeys(stages, size), **whole, **of_trainers}

    def build(self, folder: Path) -> Flows:
        device = make_cluster(self.config.cluster, self.machine).devices[0]
        settings = WorkerSettings(
            config=self.config,
            backend=self.backend,
            loras=self.loras,
            shape=self.shape,
            job_shape=job_shape(self.config, on_gpu=device.kind == "cuda", device_bytes=device.memory_bytes),
            max_prompt_tokens=self.prompts.max_tokens,
            judges_answers=self.prompts.tried_reward.judges,
        )
        arguments = settings.arguments(folder)
        train = training_flow(self.config, arguments)
        evaluate = evaluation_flow(train, self.config)
        if self.config.sft_warm_up is None:
            return Flows(train=train, evaluate=evaluate)
        self._sft_warm_up = sft_warm_up_flow(train, self.config)
        return Flows(train=train, evaluate=evaluate, others=[self._sft_warm_up])

    def check_flows(self, train: Flow) -> dict[str | None, Flow]:
        """Policy -> a flow of few short completions, which its actor compares; sampled as in training. None: the policy
        of model.path."""
        rollout: RolloutSettings = train.workers["rollout"].arguments[0]
        num_tokens = min(rollout.train.max_new_tokens, NUM_CHECKED_TOKENS)
        sampling = replace(rollout.train, group_size=NUM_CHECKED_COMPLETIONS, max_new_tokens=num_tokens)
        rollout = replace(rollout, train=sampling)
        return {
            policy: check_flow(train, self.config, rollout, trainer) for trainer, policy in self.config.trainers.items()
        }

    def write_inputs(self, folder: Path) -> None:
        """A small model's config and tokenizer; a user's own model is loaded from where it is."""
        model, alphabet = self.config.model, self.prompts.task.alphabet
        if model.architecture is not None and alphabet is not None:
            write_model_folder(folder / MODEL_FOLDER, model.architecture, alphabet, model.dtype)

    # -- steps -----------------------------------------------------------------------------------------------------

    def feeds(self, step: int) -> dict[str, list[Any]]:
        """The prompts of a training step; those of late groups came in before the first."""
        first = self.config.num_late_groups + step * self.num_items
        return {"prompts": self.prompts.training(first, self.num_items)}

    def agreement(self, metrics: Mapping[str, float]) -> MismatchVerdict | None:
        """The verdict on the first policy that disagrees, or else on that of model.path."""
        of_policies = (
            judge_step(arithmetic, metrics, policy_prefix(policy)) for policy, arithmetic in self.arithmetics.items()
        )
        verdicts = [verdict for verdict in of_policies if verdict is not None]
        return next((verdict for verdict in verdicts if not verdict.agrees), verdicts[0] if verdicts else None)

    def evaluation_feeds(self) -> dict[str, list[Any]]:
        return {"prompts": self.prompts.evaluation()}

    def evaluation_metrics(self, run: FlowRun) -> dict[str, float]:
        judges = self.prompts.tried_reward.judges
        return evaluation_metrics(run.collected["scored"], self.prompts.held_out, judges=judges)

    def prepare(self, session: Session) -> None:
        """The SFT warm-up, and the reference as it is before the first step."""
        config = self.config
        if self._late is not None:
            prompts = self.prompts.training(0, config.num_late_groups)
            self._late.begin(prompts, config.algorithm.group_size, config.seed, self.num_items)
            self._late.hand_out(session)
        if self._sft_warm_up is None:
            if config.reference.sync_every is not None:
                save_first_reference(session, "reference")
            return
        device = device_kind(config.cluster, self.machine)
        prepare_sft_warm_up(
            session, config, self.prompts, self._sft_warm_up, score=self.score.name, device=device, venvs=self.venvs
        )
        if config.algorithm.kl_coef and config.reference.path is None:
            save_first_reference(session, "actor")
            restore_reference(session, 0)

    def save(self, checkpoint: Path) -> None:
        if self._late is not None:
            self._late.save(checkpoint)

    def load(self, checkpoint: Path) -> None:
        if self._late is not None:
            self._late.load(checkpoint)

    def restore(self, session: Session, step: int) -> None:
        restore_reference(session, step)
        if self._late is not None:
            self._late.hand_out(session)

    def stepped(self, session: Session, step: int) -> None:
        if self._late is not None and not session.num_ahead:
            self._late.take(session)
        follow_policy(session, self.config.reference, step)


def scores_of(config: ReasoningConfig, *, judges: bool) -> tuple[Score, ...]:
    """Returns the score first, then the scores shown beside it: the reward, unless it is the accuracy itself.

    Args:
        judges: whether the reward decides if an answer is right.
    """
    evaluation = config.evaluation
    how = "of greedy answers to" if evaluation.temperature == 0 else f"(avg@{evaluation.num_samples}) on"
    reward = Score(name="reward", text=f"mean reward {how} held-out problems", is_share=False)
    if not judges:
        return (reward,)
    kind = "greedy accuracy" if evaluation.temperature == 0 else f"accuracy (avg@{evaluation.num_samples})"
    is_accuracy = config.reward.kind in JUDGES and not getattr(config.reward, "partial", False)
    return Score(name=ACCURACY, text=f"{kind} on held-out problems"), *(() if is_accuracy else (reward,))


def evaluation_metrics(
    scored: Sequence[ScoredGroup], held_out: Mapping[str, Sequence[TaskProblem]], *, judges: bool
) -> dict[str, float]:
    """Returns `reward` for the held-out problems and `reward/NAME` for each further set, and the same for `accuracy` if
    the reward judges answers: avg@k, with its standard error over problems if there are several."""
    metrics: dict[str, float] = {}
    start = 0
    for set_name, problems in held_out.items():
        name = f"/{set_name}" if set_name else ""
        groups, start = scored[start : start + len(problems)], start + len(problems)
        groups = [group for group in groups if len(group.counted_rewards)]
        measured = {"reward": [float(group.counted_rewards.double().mean()) for group in groups]}
        if judges:
            measured[ACCURACY] = [_accuracy(group) for group in groups]
        for metric, means in measured.items():
            values = torch.tensor(means or [math.nan], dtype=torch.float64)
            metrics[f"{metric}{name}"] = float(values.mean())
            if len(values) > 1:
                metrics[f"{metric}_error{name}"] = float(values.std()) / math.sqrt(len(values))
        metrics[f"num_problems{name}"] = float(len(groups))
    return metrics


def _accuracy(group: ScoredGroup) -> float:
    """Share of right answers. Raises: UserError if nothing was judged."""
    outcomes = [outcome for outcome in group.outcomes if outcome]
    if not outcomes:
        raise UserError(
            "rollout.agent.run returns rewards, so reward.kind judges nothing, and there is no accuracy",
            hint="use --reward.kind episode, or return None from the agent",
        )
    return outcomes.count("right") / len(outcomes)
