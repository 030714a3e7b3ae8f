"""Config of the supervised jobs: a language model is trained on demonstrations (sft) or preferences
(dpo, reward_model)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from rlinf.config.base import Conflict, ModelPath, Section, either
from rlinf.config.common import JobConfig, Mode, RunConfig, ShardedTrainerConfig
from rlinf.config.lora import LoraConfig
from rlinf.config.tasks import Files, PictureColumnConfig, PictureConfig, chat_conflicts, template_conflicts
from rlinf_workers.plugins import TRAINERS


class SupervisedModelConfig(Section):
    """The model to train."""

    path: ModelPath = Field(
        description="Model folder (config.json, weights, tokenizer), or the name of a model on the Hugging Face Hub, "
        "ORG/NAME[@REVISION].",
    )
    dtype: Literal["float32", "bfloat16"] = Field(default="float32", description="Type of weights and computation.")


class PromptColumnConfig(PictureColumnConfig):
    """Names of columns; `outer.inner` for one inside another. null: the usual names, the first that a row has."""

    prompt: str | None = Field(
        default=None,
        min_length=1,
        description="Column of the prompt: text, or the turns of a chat. null: prompt, question, problem, query, "
        "instruction or input.",
    )


class ExampleColumnsConfig(PromptColumnConfig):
    """Columns of demonstrations."""

    messages: str | None = Field(
        default=None, min_length=1, description="Column of a whole chat. null: messages or conversations."
    )
    completion: str | None = Field(
        default=None,
        min_length=1,
        description="Column of what the model is to say: text, or turns. null: completion, response, output, answer or "
        "solution.",
    )
    text: str | None = Field(
        default=None, min_length=1, description="Column of plain text without a prompt. null: text."
    )


class PreferenceColumnsConfig(PromptColumnConfig):
    """Columns of pairs. Without a prompt, the answers are chats that begin with it."""

    chosen: str | None = Field(
        default=None, min_length=1, description="Column of the preferred answer: text, or turns. null: chosen."
    )
    rejected: str | None = Field(
        default=None, min_length=1, description="Column of the other answer: text, or turns. null: rejected."
    )


class ExamplesConfig(PictureConfig):
    """Where the examples come from, and how they become tokens."""

    HUB_USE = "rows"

    train_files: Files = Field(
        min_length=1,
        description="Examples to train on: files, folders, patterns (data/train-*.parquet) or names on the Hub "
        "(org/name:subset[train]); docs/data.md.",
    )
    eval_files: Files = Field(
        default=(),
        description="Examples to evaluate on, named the same way. Empty: num_held_out random rows of train_files, "
        "which are not trained on.",
    )
    num_held_out: int = Field(
        default=100,
        ge=1,
        description="Examples that an evaluation uses: the first of eval_files, or without such files random rows of "
        "train_files, which are then not trained on.",
    )
    columns: PromptColumnConfig = Field(default=PromptColumnConfig(), description="Where a row has what.")
    prompt_template: str = Field(
        default="{question}",
        description="Prompt made of a row's text, with {question}, or columns.prompt in braces, where the text goes. "
        "Not used for chats.",
    )
    prompt_format: Literal["auto", "plain", "chat"] = Field(
        default="auto",
        description="How text with a completion is written. plain: one after the other. chat: as turns of user and "
        "assistant in the tokenizer's chat template. auto: chat if the tokenizer has a template.",
    )
    system_prompt: str | None = Field(default=None, description="System message of chats that have none.")
    chat_options: dict[str, bool | int | float | str] = Field(
        default={}, description="Arguments of the chat template, for example {enable_thinking: false}."
    )
    max_tokens: int = Field(default=1024, ge=2, description="Maximum length of an example in tokens.")
    long_examples: Literal["stop", "cut", "drop"] = Field(
        default="stop",
        description="How to treat longer examples. stop: raise an error before anything starts. cut: leave out the "
        "tokens at the end. drop: leave the example out. The last two are counted in the run's notes.",
    )
    on_bad_row: Literal["stop", "skip"] = Field(
        default="stop",
        description="How to treat a row that is no valid example. stop: raise an error with file and line. skip: leave "
        "it out and count it in the run's notes.",
    )

    def conflicts(self) -> Iterator[Conflict]:
        yield from template_conflicts(
            self.prompt_template, self.columns.prompt or "question", "task.prompt_template", "columns.prompt"
        )
        if self.prompt_format == "plain":
            yield from chat_conflicts(self.system_prompt, self.chat_options, "task.")


class SftTask(ExamplesConfig):
    """Demonstrations from data files or from data sets on the Hugging Face Hub."""

    columns: ExampleColumnsConfig = Field(default=ExampleColumnsConfig(), description="Where a row has what.")
    loss_on: Literal["completion", "all"] = Field(
        default="completion",
        description="Tokens with a loss. completion: every turn of the assistant in a chat, the completion of a "
        "prompt, all of a plain text. all: prompts and the other turns too.",
    )


class PreferencesTask(ExamplesConfig):
    """Pairs of answers from data files or from data sets on the Hugging Face Hub."""

    columns: PreferenceColumnsConfig = Field(default=PreferenceColumnsConfig(), description="Where a row has what.")


class SupervisedActorConfig(ShardedTrainerConfig):
    """The optimizer (AdamW) and how a batch is split."""

    learning_rate: float = Field(default=1e-5, gt=0, description="Learning rate at the first step.")
    lora: LoraConfig | None = Field(
        default=None,
        description="Train only low-rank updates of model.path (docs/backends.md); null: the whole model.",
    )
    batch_size: int = Field(default=32, ge=1, description="Examples of an optimizer step.")
    micro_batch_examples: int = Field(
        default=8,
        ge=1,
        description="Examples per forward and backward pass, padded to one length. Ignored if "
        "actor.max_tokens_per_micro_batch is set.",
    )
    max_tokens_per_micro_batch: int | None = Field(
        default=None,
        ge=1,
        description="Tokens per forward and backward pass, packed without padding: several examples in one row, each "
        "of which attends to itself alone (docs/batches.md). At least task.max_tokens. null: padded passes of "
        "actor.micro_batch_examples.",
    )

    @property
    def token_budget(self) -> int | None:
        """`max_tokens_per_micro_batch`."""
        return self.max_tokens_per_micro_batch


class SupervisedRunConfig(RunConfig):
    """`RunConfig` whose length may be a number of epochs."""

    num_steps: int = Field(default=0, ge=0, description="Training steps; 0: run.num_epochs decides.")
    num_epochs: float | None = Field(
        default=None,
        gt=0,
        description="Passes over the training examples, if run.num_steps is 0. The run's config.yaml states the steps "
        "that they are.",
    )
    stop_at_score: float | None = Field(
        default=None, description="Stop once an evaluation's loss is at most this value."
    )

    def conflicts(self) -> Iterator[Conflict]:
        if not self.num_steps and self.num_epochs is None:
            yield Conflict(
                keys=("run.num_steps", "run.num_epochs"), text=" is 0 and run.num_epochs is not set; set one of them"
            )


class SupervisedConfig(JobConfig):
    """What supervised jobs have in common."""

    mode: Mode = Field(
        default="collocated",
        description="collocated: the trainer has all devices; a supervised job has no other worker.",
    )
    task: ExamplesConfig = Field(description="Source of the examples.")
    model: SupervisedModelConfig = Field(description="The model to train.")
    actor: SupervisedActorConfig = Field(
        default=SupervisedActorConfig(), description="The optimizer and how a batch is split."
    )
    run: SupervisedRunConfig = Field(description="Length of the run, evaluations, checkpoints, logs and failures.")

    @property
    def roles(self) -> tuple[str, ...]:
        return ("actor",)

    @property
    def replica_sizes(self) -> dict[str, int]:
        """Includes the actor's replica size that the backend's options determine."""
        size = self.actor.ranks_per_replica
        return super().replica_sizes | ({"actor": size} if size is not None and size > 1 else {})

    def conflicts(self) -> Iterator[Conflict]:
        yield from super().conflicts()
        if self.mode != "collocated":
            yield Conflict(
                keys=("mode",), text=f"={self.mode}: a supervised job has one worker, the trainer; leave it out"
            )
        yield from self.backend_conflicts(self.actor, self.model.dtype)
        yield from self._cut_conflicts(self.actor)
        yield from self._batch_conflicts()

    def _batch_conflicts(self) -> Iterator[Conflict]:
        actor, budget = self.actor, self.actor.max_tokens_per_micro_batch
        if actor.num_shards != "auto":
            yield from self._shard_conflicts(actor.num_shards)
            if actor.batch_size < actor.num_shards:
                yield Conflict(
                    keys=("actor.num_shards", "actor.batch_size"),
                    text=f"={actor.num_shards} is more than the {actor.batch_size} examples of an optimizer step; use "
                    f"at most {actor.batch_size}",
                )
        if budget is None:
            return
        if not actor.trainer_spec.packs_sequences:
            yield Conflict(
                keys=("actor.max_tokens_per_micro_batch", "actor.backend"),
                text=f"={budget} packs sequences, and actor.backend={actor.backend} computes padded ones alone; "
                f"leave it out, or use {either(TRAINERS, lambda spec: spec.packs_sequences)}",
            )
        if budget < self.task.max_tokens:
            yield Conflict(
                keys=("actor.max_tokens_per_micro_batch", "task.max_tokens"),
                text=f"={budget} is less than task.max_tokens={self.task.max_tokens}, and an example is not cut; use "
                f"at least {self.task.max_tokens}",
            )


class SftConfig(SupervisedConfig):
    """A language model is trained on demonstrations (supervised fine-tuning)."""

    job: Literal["sft"] = Field(description="Name of the job.")
    task: SftTask = Field(description="Source of the demonstrations.")


class DpoLossConfig(Section):
    """The loss of a pair (docs/dpo.md)."""

    beta: float = Field(default=0.1, gt=0, description="The smaller, the farther the policy may go from the reference.")
    loss: Literal["sigmoid", "ipo"] = Field(
        default="sigmoid", description="sigmoid: DPO (arXiv:2305.18290). ipo: IPO (arXiv:2310.12036)."
    )
    label_smoothing: float = Field(
        default=0.0, ge=0, lt=0.5, description="Share of the pairs taken to be labelled the wrong way round."
    )

    def conflicts(self) -> Iterator[Conflict]:
        if self.label_smoothing and self.loss == "ipo":
            yield Conflict(
                keys=("dpo.label_smoothing", "dpo.loss"),
                text=f"={self.label_smoothing:g} is not used by dpo.loss=ipo; leave it out",
            )


class DpoActorConfig(SupervisedActorConfig):
    """The optimizer (AdamW) and how a batch of pairs is split."""

    learning_rate: float = Field(default=1e-6, gt=0, description="Learning rate at the first step.")


class DpoConfig(SupervisedConfig):
    """A language model learns to prefer one of two answers (DPO)."""

    job: Literal["dpo"] = Field(description="Name of the job.")
    task: PreferencesTask = Field(description="Source of the pairs.")
    dpo: DpoLossConfig = Field(default=DpoLossConfig(), description="The loss of a pair.")
    actor: DpoActorConfig = Field(
        default=DpoActorConfig(), description="The optimizer and how a batch of pairs is split."
    )


class RewardModelConfig(SupervisedConfig):
    """A reward model learns which of two answers is preferred (Bradley and Terry)."""

    job: Literal["reward_model"] = Field(description="Name of the job.")
    task: PreferencesTask = Field(description="Source of the pairs.")

    def conflicts(self) -> Iterator[Conflict]:
        yield from super().conflicts()
        if self.actor.lora is not None:
            yield Conflict(
                keys=("actor.lora",),
                text=": a reward model is trained whole, so that reward.kind=model can load its folder; leave it out",
            )
        if not self.actor.trainer_spec.trains_policies:
            others = either(TRAINERS, lambda spec: spec.trains_policies)
            yield Conflict(
                keys=("actor.backend",),
                text=f"={self.actor.backend} holds language models alone, and a reward model has a head of its own; "
                f"use {others}",
            )
