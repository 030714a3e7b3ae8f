"""The checks of a supervised job's inputs, in order. Each raises UserError or returns notes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rlinf.config.devices import device_kind
from rlinf.config.inputs import check_model_folder
from rlinf.errors import UserError
from rlinf.jobs.models import (
    check_architecture,
    check_end_tokens,
    code_notes,
    config_of,
    refuse_blind_trainer,
    trainer_ways,
)
from rlinf.run_folder.checkpoints import refuse_damaged_model
from rlinf.tasks.language import max_positions
from rlinf_workers.models import reads_pictures

if TYPE_CHECKING:
    from rlinf.jobs.supervised.job import SupervisedJob


def model_files(job: SupervisedJob) -> Sequence[str]:
    """The model's files are complete and undamaged, and its completions can end."""
    path = job.config.model.path
    check_model_folder(path)
    refuse_damaged_model(path, key="model.path")
    return (*code_notes(path), *check_end_tokens(path, job.source.tokenizer))


def backend(job: SupervisedJob) -> Sequence[str]:
    """The trainer accepts its options and can hold the model."""
    _ = job.backend
    on_gpu = device_kind(job.config.cluster, job.machine) == "cuda"
    return job.config.actor.trainer_spec.notes(on_gpu=on_gpu)


def pictures(job: SupervisedJob) -> None:
    """What trains a vision-language model supports pictures."""
    path = job.config.model.path
    if reads_pictures(path):
        refuse_blind_trainer(job.config.actor, str(config_of(path).get("model_type")))


def adapter(job: SupervisedJob) -> None:
    """The backend can train adapters, and the targets are layers of the model."""
    _ = job.lora


def positions(job: SupervisedJob) -> None:
    """The examples are not longer than the model supports."""
    num_tokens, path = job.config.task.max_tokens, job.config.model.path
    limit = max_positions(path)
    if limit is not None and num_tokens > limit:
        raise UserError(
            f"task.max_tokens={num_tokens}, but model.path={path} was made for {limit} positions "
            "(max_position_embeddings of its config.json)",
            hint=f"use --task.max_tokens {limit}",
        )


def architecture(job: SupervisedJob) -> None:
    """The trainer computes the same outputs as transformers."""
    actor = job.config.actor
    is_packed = actor.max_tokens_per_micro_batch is not None
    ways = trainer_ways(actor, packs=is_packed) if is_packed or job.pads_prompts else ()
    check_architecture(job.config.model.path, ways, num_tokens=job.config.task.max_tokens)


def examples(job: SupervisedJob) -> Sequence[str]:
    """The rows are examples that fit; settles the length of the run."""
    source, notes = job.source, []
    if job.config.task.prompt_format == "auto":
        notes.append(f"task.prompt_format=auto: {source.encoder.describe()}")
    _ = source.training_set, source.held_out
    if settled := job.settle_length():
        notes.append(settled)
    return (*notes, *source.notes)


CHECKS: tuple[Callable[[SupervisedJob], Sequence[str] | None], ...] = (
    model_files,
    backend,
    pictures,
    adapter,
    positions,
    architecture,
    examples,
)
