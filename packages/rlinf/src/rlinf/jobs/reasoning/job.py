"""The reasoning job: a language model learns to answer, from rewards alone.

prompts -> rollout -> samples -> [reference ->] reward -> scored -> actor;  the actor's weights go back to the
rollout
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils.rnn import pad_sequence

from rlinf.config.devices import device_kind
from rlinf.config.inputs import check_model_folder
from rlinf.config.reasoning import ReasoningConfig, SftWarmUpConfig
from rlinf.config.tasks import FilesTask
from rlinf.errors import UserError
from rlinf.jobs.agreement import Arithmetic, MismatchVerdict, arithmetic_of, judge_step
from rlinf.jobs.algorithms import idle_notes, try_algorithm
from rlinf.jobs.base import Flows, Job, Score
from rlinf.jobs.generation import (
    PromptMaker,
    check_engine,
    check_installed,
    engine_options,
    make_encoder,
    sampling_settings,
)
from rlinf.jobs.lora import lora_settings, with_base
from rlinf.jobs.models import check_architecture, check_end_tokens, code_notes, engine_ways, trainer_ways
from rlinf.jobs.reasoning.flow import check_flow, evaluation_flow, sft_warm_up_flow, training_flow
from rlinf.jobs.reasoning.memory import all_fit_at_once, check_memory, fullest_place
from rlinf.jobs.reasoning.planning import actor_granularities, num_sampled_prompts
from rlinf.jobs.reasoning.shapes import job_shape, shape_of
from rlinf.jobs.reasoning.smaller import cut_refusal
from rlinf.jobs.rewards import JUDGES, check_reward, judging_s, reward_folders, reward_spec, try_rewards
from rlinf.jobs.sft_warm_ups import SftWarmUps, cache_folder
from rlinf.jobs.training import backend_settings, optimizer_settings
from rlinf.machine import Machine
from rlinf.planning.cluster import make_cluster
from rlinf.planning.memory_table import memory_lines
from rlinf.run_folder.checkpoints import (
    CHECKPOINTS,
    checkpoint_name,
    checkpoint_steps,
    refuse_damaged_model,
    writing_whole,
)
from rlinf.run_folder.fingerprints import model_fingerprint
from rlinf.tasks import TaskProblem, make_task
from rlinf.tasks.files import FileProblems
from rlinf.tasks.language import (
    character_tokenizer,
    load_checkpoint_tokenizer,
    max_positions,
    write_model_folder,
)
from rlinf.tasks.prompts import PromptEncoder
from rlinf_sched import Cluster, Plan
from rlinf_sched.derive import JobShape, ModelShape
from rlinf_workers import Flow, FlowRun
from rlinf_workers.models import ModelSettings, has_balanced_routers
from rlinf_workers.roles import ActorSettings, ExampleBatch, RewardSettings, RolloutSettings, ScoredGroup
from rlinf_workers.trainers import OptimizerSettings

if TYPE_CHECKING:
    from rlinf.loop.session import Session

WARM_START_OFFSET = 1 << 40
"""Where the SFT warm-up's problems begin in the training stream: farther than any run trains."""
WARMUP_STEPS = 30
"""Optimizer steps over which the SFT warm-up's learning rate rises to its full value."""

NUM_CHUNKS = 8
"""Pieces in which a batch of prompts goes through a pipelined plan."""
NUM_CHECKED_COMPLETIONS, NUM_CHECKED_TOKENS = 2, 64
"""Completions of a prompt that a check compares, and the longest of them."""
ACCURACY = "accuracy"
MODEL_FOLDER = "initial_model"
REFERENCE_FOLDER = "reference_model"
REFERENCES = "reference_models"
"""Folder of a run with the references that followed the policy, by the step after which they did."""


class ReasoningJob(Job):
    """Flows, feeds and evaluation of a reasoning recipe."""

    config: ReasoningConfig

    def __init__(self, config: ReasoningConfig, machine: Machine) -> None:
        self.config = config
        self.machine = machine
        self.num_items = num_sampled_prompts(config)
        self.stops_on_mismatch = config.rollout.stop_on_mismatch
        if config.model.path is not None:
            check_model_folder(config.model.path)
            refuse_damaged_model(config.model.path, key="model.path")
        check_engine(config.rollout, "rollout.engine")
        reward_notes = check_reward(config.reward)
        self._task = make_task(config.task, config.seed)
        if config.model.path is not None:
            self._tokenizer = load_checkpoint_tokenizer(config.model.path)
            model_notes = (*code_notes(config.model.path), *check_end_tokens(config.model.path, self._tokenizer))
        elif self._task.alphabet is not None:
            self._tokenizer, model_notes = character_tokenizer(self._task.alphabet), ()
        else:
            raise UserError(
                "model.architecture makes a tokenizer of single characters, but this task is natural language",
                hint="give a Hugging Face folder with model.path",
            )
        self._algorithm = config.algorithm
        reward = config.reward
        try_algorithm(self._algorithm, num_parts=len(reward.terms) if reward.kind == "weighted" else 0)
        self._backend = backend_settings(config.actor, config.actor.resolved_shards, self._model_config())
        self._check_routers()
        self._lora = lora_settings(config)
        if config.reference.path is not None:
            self._check_teacher(config.reference.path)
        self._encoder, prompt_notes = self._make_encoder()
        if isinstance(self._task, FileProblems):
            self._task.fit(self._encoder, config.rollout.max_prompt_tokens)
            prompt_notes += self._repetitions(self._task.num_train_problems)
        self.notes = [*reward_notes, *model_notes, *prompt_notes, *self._task.notes, *idle_notes(self._algorithm)]
        self.notes += config.actor.trainer_spec.notes(on_gpu=device_kind(config.cluster, machine) == "cuda")
        self._held_out = self._task.held_out()
        if config.model.path is not None:
            self._check_positions(config.model.path)
            if not isinstance(self._task, FileProblems):
                self._check_prompts(self._held_out[""])
            self._check_architectures(config.model.path)
        tried = try_rewards(config.reward, self._task.train_problem(0))
        self.score, self.other_scores = _scores(config, judges=tried.judges)
        if config.run.stop_at_score is not None and not tried.judges:
            limit = f"run.stop_at_score={config.run.stop_at_score:g}"
            self.notes.append(f"{limit} is compared with the mean reward, which is the score of this run")
        # A tokenizer made for the task gives every prompt the same number of tokens; of a user's own nobody knows it.
        self._make_prompt = PromptMaker(
            encoder=self._encoder,
            max_tokens=config.rollout.max_prompt_tokens if config.model.path else None,
            sends_rows=tried.reads_rows,
        )
        self.inputs = self._fingerprints()
        self._sft_warm_up: Flow | None = None
        if self._shape is not None and (refusal := cut_refusal(config, self._shape)):
            raise refusal

    def _fingerprints(self) -> dict[str, str]:
        """Of the models and the problems."""
        config = self.config
        folders = {"model.path": config.model.path, "reference.path": config.reference.path}
        folders |= reward_folders(config.reward)
        models = {f"{key}={path}": model_fingerprint(path) for key, path in folders.items() if path is not None}
        return models | (self._task.fingerprints() if isinstance(self._task, FileProblems) else {})

    def _model_config(self) -> dict[str, Any]:
        """config.json of the model, as far as sizes go."""
        if self.config.model.path is not None:
            return json.loads((self.config.model.path / "config.json").read_text(encoding="utf-8"))
        architecture = self.config.model.architecture
        assert architecture is not None, "a config has a path or an architecture"
        return {
            "model_type": architecture.family,
            "hidden_size": architecture.hidden_size,
            "intermediate_size": architecture.intermediate_size,
            "num_hidden_layers": architecture.num_layers,
            "num_attention_heads": architecture.num_heads,
            "num_key_value_heads": architecture.num_kv_heads,
            "vocab_size": len(self._tokenizer),
        }

    def _repetitions(self, num_problems: int) -> list[str]:
        """A note where a step asks a problem more than once."""
        if self.num_items <= num_problems:
            return []
        return [
            f"a step asks {self.num_items} prompts, and task.train_files hold {num_problems} problems: each is asked "
            f"{self.num_items / num_problems:.3g} times a step; use --rollout.num_prompts {num_problems} or less to "
            "ask each once"
        ]

    def _check_prompts(self, problems: Sequence[TaskProblem]) -> None:
        """A generated task's prompts in the tokens of a tokenizer that was not made for it."""
        limit = self.config.rollout.max_prompt_tokens
        longest = max(self._encoder.num_tokens([problem.prompt for problem in problems]))
        if longest > limit:
            raise UserError(
                f"rollout.max_prompt_tokens={limit}, and prompts of task.kind={self.config.task.kind} have up to "
                f"{longest} tokens of this model",
                hint=f"use --rollout.max_prompt_tokens {longest} or more",
            )

    def _check_routers(self) -> None:
        """The load-balancing loss is of a mixture of experts."""
        kind, coef = str(self._model_config().get("model_type")), self.config.algorithm.router_aux_coef
        if coef and not has_balanced_routers(kind):
            raise UserError(
                f"algorithm.router_aux_coef={coef:g}: {kind} is no mixture of experts whose routers have a "
                "load-balancing loss",
                hint="leave it out",
            )

    def _check_positions(self, folder: Path) -> None:
        """Beyond the positions that it was made for, a model writes without sense, or fails."""
        rollout, limit = self.config.rollout, max_positions(folder)
        num_tokens = rollout.max_prompt_tokens + rollout.max_new_tokens
        if limit is not None and num_tokens > limit:
            raise UserError(
                f"rollout.max_prompt_tokens + rollout.max_new_tokens = {num_tokens}, but model.path={folder} was made "
                f"for {limit} positions (max_position_embeddings of its config.json)",
                hint=f"use --rollout.max_new_tokens {max(1, limit - rollout.max_prompt_tokens)}, for example",
            )

    def _check_architectures(self, folder: Path) -> None:
        """Whether rollout, actor and reference compute their models as transformers does."""
        config = self.config
        num_tokens = config.rollout.max_prompt_tokens + config.rollout.max_new_tokens
        on_gpu = device_kind(config.cluster, self.machine) == "cuda"
        trained = trainer_ways(config.actor, packs=config.actor.max_tokens_per_micro_batch is not None)
        check_architecture(folder, (*engine_ways(config.rollout, on_gpu=on_gpu), *trained), num_tokens=num_tokens)
        if config.reference.path is not None and config.has_reference_worker:
            check_architecture(config.reference.path, trained, num_tokens=num_tokens, key="reference.path")

    @property
    def judging_s(self) -> float:
        num_problems = sum(map(len, self._held_out.values()))
        num_completions = max(
            self.num_items * self.config.algorithm.group_size, num_problems * self.config.evaluation.num_samples
        )
        return num_completions * judging_s(self.config.reward)

    # -- flows -----------------------------------------------------------------------------------------------------

    def chunks(self, plan: Plan) -> dict[str, int]:
        if plan.mode == "collocated":
            return {}
        size = max(1, self.num_items // NUM_CHUNKS)
        stages = [placed.stage for placed in plan.stages if placed.stage != "actor"]
        return {**dict.fromkeys(stages, size), "actor": actor_granularities(self.config)[0]}

    def check_environments(self) -> None:
        check_installed(self.config.rollout, self.venvs.get("rollout"))

    def check_memory(self, plan: Plan) -> None:
        if self._shape is not None:
            check_memory(self.config, self._shape, plan, self._cluster, self.machine.memory_bytes)

    def all_fit_at_once(self, plan: Plan) -> bool:
        is_gpu = self._cluster.devices[0].kind == "cuda"
        return is_gpu and self._shape is not None and all_fit_at_once(self.config, self._shape, plan, self._cluster)

    def memory_lines(self, plan: Plan) -> list[str]:
        if self._shape is None:
            return []
        return memory_lines(fullest_place(self.config, self._shape, plan, self._cluster, self.machine.memory_bytes))

    @cached_property
    def _shape(self) -> ModelShape | None:
        return shape_of(self.config, len(self._tokenizer))

    @cached_property
    def _job_shape(self) -> JobShape:
        device = self._cluster.devices[0]
        return job_shape(self.config, on_gpu=device.kind == "cuda", device_bytes=device.memory_bytes)

    @cached_property
    def _cluster(self) -> Cluster:
        return make_cluster(self.config.cluster, self.machine)

    def build(self, folder: Path) -> Flows:
        train = self._train_flow(folder)
        evaluate = evaluation_flow(train, self.config)
        if self.config.sft_warm_up is None:
            return Flows(train=train, evaluate=evaluate)
        self._sft_warm_up = sft_warm_up_flow(train)
        return Flows(train=train, evaluate=evaluate, others=[self._sft_warm_up])

    def _train_flow(self, folder: Path) -> Flow:
        config, model = self.config, self._model_settings(folder)
        arguments: dict[str, tuple[Any, ...]] = {
            "rollout": (self._rollout_settings(model),),
            "reward": (self._reward_settings(model),),
            "actor": (self._actor_settings(model, folder),),
        }
        if config.has_reference_worker:
            teacher = config.reference.path
            judge = model if teacher is None else replace(model, folder=str(teacher), has_weights=True)
            budget = config.actor.max_tokens_per_micro_batch
            arguments["reference"] = (judge, config.rollout.temperature, self._backend, budget)
        return training_flow(config, arguments, granularities=actor_granularities(config))

    # -- settings --------------------------------------------------------------------------------------------------

    def _check_teacher(self, path: Path) -> None:
        """The reference reads the actor's token ids, so the two must mean the same by them."""
        check_model_folder(path, key="reference.path")
        own, theirs = self._tokenizer.get_vocab(), load_checkpoint_tokenizer(path, "reference.path").get_vocab()
        if own != theirs:
            differing = sorted(own.items() ^ theirs.items(), key=lambda item: (item[1], item[0]))
            raise UserError(
                f"reference.path={path}: its tokenizer is not the actor's: {len(theirs)} tokens against {len(own)}, "
                f"and the first that differs is {differing[0][0]!r} with the id {differing[0][1]}",
                hint="a teacher judges the actor's token ids; use one of the same family",
            )

    def _make_encoder(self) -> tuple[PromptEncoder, list[str]]:
        """The encoder, and notes on what it chose."""
        task = self.config.task
        if not isinstance(task, FilesTask):
            return PromptEncoder(self._tokenizer), []
        encoder = make_encoder(task, self._tokenizer, self.config.model.path, "task.")
        return encoder, [f"task.prompt_format=auto: {encoder.describe()}"] if task.prompt_format == "auto" else []

    def write_inputs(self, folder: Path) -> None:
        """A small model's config and tokenizer; a user's own model is loaded from where it is."""
        model = self.config.model
        if model.architecture is not None and self._task.alphabet is not None:
            write_model_folder(folder / MODEL_FOLDER, model.architecture, self._task.alphabet, model.dtype)

    def _model_settings(self, folder: Path) -> ModelSettings:
        model = self.config.model
        return ModelSettings(
            folder=str(model.path or folder / MODEL_FOLDER),
            has_weights=model.path is not None,
            dtype=model.dtype,
            seed=self.config.seed,
        )

    def _rollout_settings(self, model: ModelSettings) -> RolloutSettings:
        rollout, evaluation = self.config.rollout, self.config.evaluation
        num_tokens, size = rollout.max_new_tokens, self.config.algorithm.group_size
        stop = rollout.stop if evaluation.stop is None else evaluation.stop
        fills_its_memory = rollout.engine_spec.fills_its_memory(rollout.engine_options)
        return RolloutSettings(
            model=replace(model, dtype=self.config.served_dtype),
            train=sampling_settings(rollout, group_size=size, max_new_tokens=num_tokens, stop=rollout.stop),
            evaluate=sampling_settings(
                evaluation, group_size=evaluation.num_samples, max_new_tokens=num_tokens, stop=stop
            ),
            max_prompt_tokens=self._make_prompt.max_tokens,
            max_batch_sequences=None if fills_its_memory else self._job_shape.max_sequences,
            engine=rollout.engine,
            engine_options=engine_options(rollout, self._shape, self._job_shape),
        )

    def _reward_settings(self, model: ModelSettings) -> RewardSettings:
        reward = self.config.reward
        numeric = isinstance(self.config.task, FilesTask) and self.config.task.answer_format == "gsm8k"
        return RewardSettings(
            rule=reward_spec(reward, random_stands_for="numeric" if numeric else "exact"),
            random_in_training=reward.kind == "random",
            judges=self.score.name == ACCURACY,
            tokenizer_folder=model.folder,
            seed=self.config.seed,
            num_shown=self.config.run.num_samples_logged,
            max_judge_failures=self.config.run.max_judge_failures,
        )

    def _actor_settings(self, model: ModelSettings, folder: Path) -> ActorSettings:
        actor, algorithm, sft_warm_up = self.config.actor, self._algorithm, self.config.sft_warm_up
        return ActorSettings(
            model=model,
            algorithm=algorithm,
            optimizer=optimizer_settings(actor),
            sft_warm_up=sft_warm_up
            and OptimizerSettings(learning_rate=sft_warm_up.learning_rate, lr_warmup_steps=WARMUP_STEPS),
            critic=optimizer_settings(self.config.critic) if algorithm.has_critic else None,
            backend=self._backend,
            lora=with_base(self._lora, Path(model.folder), folder),
            knows_reference=self.config.knows_reference,
            micro_batch_groups=actor.micro_batch_groups,
            max_tokens_per_micro_batch=actor.max_tokens_per_micro_batch,
            balance_shards=actor.balance_shards,
            num_prompts=self.config.rollout.num_prompts,
            max_completion_tokens=self.config.rollout.max_new_tokens,
            temperature=self.config.rollout.temperature,
        )

    # -- what is fed -----------------------------------------------------------------------------------------------

    def feeds(self, step: int) -> dict[str, list[Any]]:
        """The prompts of a training step."""
        first = step * self.num_items
        return {"prompts": self._make_prompt.all(map(self._task.train_problem, range(first, first + self.num_items)))}

    def evaluation_feeds(self) -> dict[str, list[Any]]:
        problems = [problem for held_out in self._evaluation_sets().values() for problem in held_out]
        return {"prompts": self._make_prompt.all(problems)}

    def evaluation_metrics(self, run: FlowRun) -> dict[str, float]:
        """`reward` of the held-out problems and `reward/NAME` of each further set, and the same of `accuracy` where the
        reward judges answers: avg@k, with its standard error over problems where there are several."""
        scored: list[ScoredGroup] = run.collected["scored"]
        metrics: dict[str, float] = {}
        start = 0
        for name, held_out in self._evaluation_sets().items():
            groups, start = scored[start : start + len(held_out)], start + len(held_out)
            measured = {"reward": [float(group.rewards.double().mean()) for group in groups]}
            if self.score.name == ACCURACY:
                measured[ACCURACY] = [_num_right(group) / len(group.outcomes) for group in groups]
            for metric, means in measured.items():
                values = torch.tensor(means, dtype=torch.float64)
                metrics[f"{metric}{name}"] = float(values.mean())
                if len(values) > 1:
                    metrics[f"{metric}_error{name}"] = float(values.std()) / math.sqrt(len(values))
            metrics[f"num_problems{name}"] = float(len(groups))
        return metrics

    def _evaluation_sets(self) -> dict[str, list[TaskProblem]]:
        """End of the metrics' names -> problems; the set that the score is about comes first, under no name."""
        return {f"/{name}" if name else "": problems for name, problems in self._held_out.items()}

    def check_flow(self, train: Flow) -> Flow:
        """Few short completions, which the actor compares; sampled as in training."""
        rollout: RolloutSettings = train.workers["rollout"].arguments[0]
        num_tokens = min(rollout.train.max_new_tokens, NUM_CHECKED_TOKENS)
        sampling = replace(rollout.train, group_size=NUM_CHECKED_COMPLETIONS, max_new_tokens=num_tokens)
        return check_flow(train, self.config, replace(rollout, train=sampling))

    def token_text(self, token_ids: Sequence[int]) -> str:
        """The tokens as people read them."""
        return self._tokenizer.decode(token_ids)

    # -- engine and trainer ------------------------------------------------------------------------------------------

    def agreement(self, metrics: Mapping[str, float]) -> MismatchVerdict | None:
        return judge_step(self.arithmetic, metrics)

    @cached_property
    def arithmetic(self) -> Arithmetic:
        """What engine and trainer compute with."""
        config = self.config
        return arithmetic_of(
            self._model_config(),
            trained_dtype=config.actor.trainer_spec.compute_dtype(config.actor.backend_options, config.model.dtype),
            served_dtype=config.served_dtype,
            temperature=config.rollout.temperature,
        )

    # -- before the first step -------------------------------------------------------------------------------------

    def prepare(self, session: Session) -> None:
        """The SFT warm-up, and the reference as it is before the first step."""
        settings, flow = self.config.sft_warm_up, self._sft_warm_up
        if settings is not None and flow is not None:
            self._prepare_sft_warm_up(session, settings, flow)
        elif self.config.reference.sync_every is not None:
            session.group("reference").call("save_model", str(session.folder / REFERENCE_FOLDER))

    def _prepare_sft_warm_up(self, session: Session, settings: SftWarmUpConfig, flow: Flow) -> None:
        """Supervised training until the model answers some problems right; or that of an earlier run, where it would be
        the same."""
        device = device_kind(self.config.cluster, self.machine)
        num_ranks = session.group("actor").num_ranks
        sft_warm_ups = SftWarmUps(self.config, num_ranks=num_ranks, device=device, venvs=self.venvs)
        if (entry := sft_warm_ups.find()) is not None:
            folder, text = entry
            session.group("actor").call("load_checkpoint", str(folder))
            session.sync_weights()
            session.note(text)
        else:
            accuracy = self._warm_up(session, settings, flow)
            self._keep_sft_warm_up(session, sft_warm_ups, accuracy)
        if self.config.algorithm.kl_coef and self.config.reference.path is None:
            session.group("actor").call("save_model", str(session.folder / REFERENCE_FOLDER))
            self.restore(session, 0)

    def _warm_up(self, session: Session, settings: SftWarmUpConfig, flow: Flow) -> float:
        """Returns the score that it ends with."""
        accuracy, step = 0.0, 0
        while step < settings.max_steps and accuracy < settings.target_accuracy:
            steps = range(step, min(step + settings.check_every, settings.max_steps))
            feeds = {"examples": [batch for s in steps for batch in self.examples(settings, s)]}
            run = session.run_flow(flow, step=0, feeds=feeds)
            step = steps.stop
            name = self.score.name
            accuracy = session.evaluate(0)[name]
            session.message(f"SFT warm-up {step}: loss {run.metrics['sft_warm_up/loss']:.3f}, {name} {accuracy:.3f}")
        return accuracy

    def _keep_sft_warm_up(self, session: Session, sft_warm_ups: SftWarmUps, accuracy: float) -> None:
        if sft_warm_ups.why_not is not None:
            session.note(f"SFT warm-up: made anew and not kept: {sft_warm_ups.why_not}")
            return
        try:
            digests: dict[str, str] = {}
            with sft_warm_ups.keeping(self.config.name, accuracy, digests) as folder:
                for of_rank in session.group("actor").call("save_checkpoint", str(folder)):
                    digests.update(of_rank)
        except (OSError, UserError) as error:
            session.note(f"SFT warm-up: not kept for the next run: {error}")
        else:
            session.note(f"SFT warm-up: kept for the next run in {cache_folder()}")

    def restore(self, session: Session, step: int) -> None:
        """The reference is a teacher, or the policy as the SFT warm-up left it; without one it is the model that every
        worker starts from. One that follows the policy is as it was after its last change up to the step."""
        followed = [path for number, path in checkpoint_steps(session.folder / REFERENCES) if number <= step]
        folder = followed[-1] if followed else session.folder / REFERENCE_FOLDER
        if folder.is_dir():
            session.group("reference").call("load_model", str(folder))

    def stepped(self, session: Session, step: int) -> None:
        """Every `reference.sync_every` steps the reference takes a share of the policy."""
        settings, folder = self.config.reference, session.folder / REFERENCES
        if settings.sync_every is None or step % settings.sync_every:
            return
        policy, mixed = folder / "policy", folder / checkpoint_name(step)
        for path in (policy, mixed):  # of a run that went back to an earlier checkpoint
            shutil.rmtree(path, ignore_errors=True)
        session.group("actor").call("save_model", str(policy))
        with writing_whole(mixed) as partial:
            session.group("reference").call("write_mixed", str(policy), str(partial), settings.sync_weight)
        shutil.rmtree(policy)
        self.restore(session, step)
        oldest = min((number for number, _ in checkpoint_steps(session.folder / CHECKPOINTS)), default=0)
        needed = [path for number, path in checkpoint_steps(folder) if number <= oldest]
        for path in needed[:-1]:
            shutil.rmtree(path)

    def examples(self, settings: SftWarmUpConfig, step: int) -> list[ExampleBatch]:
        """One batch as one item a shard, from a stretch of the problem stream that the training steps do not reach."""
        first = WARM_START_OFFSET + step * settings.batch_size
        rows, masks = [], []
        for index in range(first, first + settings.batch_size):
            problem = self._task.train_problem(index)
            prompt = self._encoder.encode(problem.prompt)
            answer = self._tokenizer(problem.answer, add_special_tokens=False)["input_ids"]
            rows.append(torch.tensor([*prompt, *answer, self._tokenizer.eos_token_id]))
            masks.append((torch.arange(len(rows[-1])) >= len(prompt)).float())
        token_ids = pad_sequence(rows, batch_first=True, padding_value=self._tokenizer.pad_token_id)
        loss_mask = pad_sequence(masks, batch_first=True)
        num_shards = self.config.actor.resolved_shards
        return [
            ExampleBatch(shard=shard, token_ids=token_ids[shard::num_shards], loss_mask=loss_mask[shard::num_shards])
            for shard in range(num_shards)
        ]


def _scores(config: ReasoningConfig, *, judges: bool) -> tuple[Score, tuple[Score, ...]]:
    """The score, and what is shown beside it: the reward, where it is not the accuracy itself."""
    evaluation = config.evaluation
    how = "of greedy answers to" if evaluation.temperature == 0 else f"(avg@{evaluation.num_samples}) on"
    reward = Score(name="reward", text=f"mean reward {how} held-out problems", is_share=False)
    if not judges:
        return reward, ()
    kind = "greedy accuracy" if evaluation.temperature == 0 else f"accuracy (avg@{evaluation.num_samples})"
    is_accuracy = config.reward.kind in JUDGES and not getattr(config.reward, "partial", False)
    return Score(name=ACCURACY, text=f"{kind} on held-out problems"), () if is_accuracy else (reward,)


def _num_right(group: ScoredGroup) -> int:
    return sum(outcome == "right" for outcome in group.outcomes)
