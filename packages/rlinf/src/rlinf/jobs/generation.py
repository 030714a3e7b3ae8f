"""What training and evaluation tell the rollout alike: prompts as tokens, how completions are sampled, the engine."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from rlinf.config.engine import EngineConfig
from rlinf.config.evaluation import EvalConfig
from rlinf.config.reasoning import EvaluationConfig, RolloutConfig
from rlinf.config.supervised import ExamplesConfig
from rlinf.config.tasks import FilesTask
from rlinf.errors import UserError
from rlinf.plugin_checks import named_class
from rlinf.tasks import TaskProblem
from rlinf.tasks.prompts import PromptEncoder, is_chat
from rlinf_sched.derive import JobShape, ModelShape
from rlinf_workers.engines import SamplingSettings
from rlinf_workers.launchers import Interpreter
from rlinf_workers.plugins import ENGINES
from rlinf_workers.roles import Prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptMaker:
    """Turns a problem into what the rollout is given."""

    encoder: PromptEncoder
    max_tokens: int | None
    """Longest prompt in tokens. A longer one loses its beginning, because its end asks the question. None: all prompts
    have one length."""
    sends_rows: bool
    """Whether the reward reads the columns of the data row."""

    def all(self, problems: Iterable[TaskProblem]) -> list[Prompt]:
        """Their prompts, numbered from 0."""
        return [self(index, problem) for index, problem in enumerate(problems)]

    def __call__(self, index: int, problem: TaskProblem) -> Prompt:
        return Prompt(
            index=index,
            token_ids=torch.tensor(self.encoder.encode(problem.content, self.max_tokens)),
            reference_answer=problem.answer,
            text=problem.prompt,
            opening=self.encoder.opening(problem.content),
            row_json=problem.row_json if self.sends_rows else None,
        )


def make_encoder(
    settings: FilesTask | EvalConfig | ExamplesConfig, tokenizer: Any, model: Path | None, prefix: str = ""
) -> PromptEncoder:
    """The encoder of prompts in the format that the settings ask for.

    Args:
        model: folder of the tokenizer, for messages.
        prefix: what the settings' keys begin with in messages: "task.".
    Raises: UserError where a chat is asked for, and the tokenizer has no template.
    """
    chat = is_chat(settings.prompt_format, tokenizer)
    if not chat and (settings.system_prompt is not None or settings.chat_options):
        key = "chat_options" if settings.system_prompt is None else "system_prompt"
        raise UserError(
            f"{prefix}{key} is set, but the tokenizer of {model} has no chat template",
            hint="leave it out, or put a chat_template into the tokenizer's files",
        )
    return PromptEncoder(
        tokenizer,
        chat=chat,
        system_prompt=settings.system_prompt,
        options=settings.chat_options,
        key=f"{prefix}prompt_format",
    )


def sampling_settings(
    settings: RolloutConfig | EvaluationConfig | EvalConfig,
    *,
    group_size: int,
    max_new_tokens: int,
    stop: tuple[str, ...],
) -> SamplingSettings:
    """How the engine samples."""
    return SamplingSettings(
        group_size=group_size,
        max_new_tokens=max_new_tokens,
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        min_p=settings.min_p,
        stop=stop,
    )


def check_engine(settings: EngineConfig, key: str = "engine") -> None:
    """Whether there is such an engine, and its constructor takes the options.

    Args:
        key: the engine's, for messages.
    Raises: UserError.
    """
    name, arguments = settings.engine, {"max_prompt_tokens": None, "max_batch_sequences": 1}
    named_class(ENGINES, name, settings.engine_options, None, None, at=f"{key}={name}", **arguments)


def check_installed(settings: EngineConfig, where: Interpreter | None) -> None:
    """Whether what the engine needs is installed where the rollout runs, in a version that is known.

    Args:
        where: the rollout's environment; None: this process's own.
    Raises: UserError.
    """
    spec = settings.engine_spec
    if spec.package is None:
        return
    installed = _version_here(spec.package) if where is None else where.packages.get(spec.package)
    place = sys.executable if where is None else where.path
    key, name = f"{settings.AT}engine={settings.engine}", spec.name
    if installed is None:
        if where is None:
            hint = f"rlinf venv create {name} (--cpu on CPU slots), then --venvs.rollout {name}"
        else:
            hint = f"rlinf venv create {name} (--cpu on CPU slots) makes one; rlinf venv list shows what there is"
        raise UserError(f"{key}: {spec.package} is not installed in the environment of {place}", hint=hint)
    if installed not in spec.known_versions and not settings.engine_options.get("any_version"):
        raise UserError(
            f"{key}: the environment of {place} has {spec.package} {installed}; known to work: "
            f"{', '.join(spec.known_versions)}",
            hint=f"rlinf venv create {name}, or --{settings.AT}engine_options.any_version true to take it as it is",
        )


def _version_here(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def engine_options(settings: EngineConfig, shape: ModelShape | None, job: JobShape) -> dict[str, Any]:
    """Arguments of the engine's constructor, with those that follow from the model where the settings leave them open.

    Args:
        shape: the model's; None where we cannot count its parts, and the engine decides by itself.
        job: what is asked of a rank.
    """
    return dict(settings.engine_options) if shape is None else settings.engine_spec.filled_options(shape, job)
