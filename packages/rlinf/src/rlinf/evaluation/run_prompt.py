"""How the run that trained a model asked its problems, so that an evaluation asks in the same way.

A policy answers the prompt that it was trained with; asked with another template or instruction its score may be
anything. So what the command line leaves open is taken from the run's config, and what it sets otherwise is told.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from rlinf.config.evaluation import BenchmarkConfig, EvalConfig
from rlinf.config.load import load_config
from rlinf.config.reasoning import ReasoningConfig
from rlinf.config.tasks import FilesTask
from rlinf.errors import UserError
from rlinf.evaluation.model import EvaluatedModel, run_folder
from rlinf.tasks.prompts import is_chat
from rlinf.tasks.published import published_set

CHOICE = "multiple_choice"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPrompt:
    """The prompt of a training run."""

    prompt_format: Literal["plain", "chat"]
    template: str
    """Text of the prompt; the question takes the place of {question}."""
    system_prompt: str | None = None
    chat_options: dict[str, Any] = field(default_factory=dict)
    asks_for_choice: bool = False
    """Whether it learned to answer with a letter."""


def asked_as_in_run(config: EvalConfig, model: EvaluatedModel) -> tuple[EvalConfig, list[str]]:
    """The settings with what they leave open taken from the run that the model belongs to, if it belongs to one.

    Returns: the settings, and notes: what was taken, and which settings ask otherwise than the run did.
    """
    folder = run_folder(model.folder)
    if folder is None:
        return config, []
    try:
        run = load_config(str(folder / "config.yaml"))
    except UserError as error:
        why = str(error).splitlines()[0]
        return config, [f"{folder / 'config.yaml'} cannot be read, so prompts are not as in the run: {why}"]
    if not isinstance(run, ReasoningConfig):
        return config, []
    prompt = _prompt_of(run, model.tokenizer)
    given = config.model_fields_set
    changes: dict[str, Any] = {}
    if "prompt_format" not in given and not (config.system_prompt or config.chat_options):
        changes["prompt_format"] = prompt.prompt_format
    asks_chat = is_chat(changes.get("prompt_format", config.prompt_format), model.tokenizer)
    for key in ("system_prompt", "chat_options") if asks_chat else ():
        if key not in given:
            changes[key] = getattr(prompt, key)
    benchmarks = {name: _asked(name, benchmark, prompt) for name, benchmark in config.benchmarks.items()}
    asked = config.model_copy(update={**changes, "benchmarks": benchmarks})
    return asked, [
        f"asked as in the run {folder}: prompt_format={prompt.prompt_format}, template {prompt.template!r}",
        *_differences(asked, prompt, asks_chat),
    ]


def _prompt_of(run: ReasoningConfig, tokenizer: Any) -> RunPrompt:
    task = run.task
    if not isinstance(task, FilesTask):
        return RunPrompt(prompt_format="plain", template="{question}")
    return RunPrompt(
        prompt_format="chat" if is_chat(task.prompt_format, tokenizer) else "plain",
        template=task.prompt_template.replace("{" + task.prompt_field + "}", "{question}"),
        system_prompt=task.system_prompt,
        chat_options=dict(task.chat_options),
        asks_for_choice=run.reward.kind == CHOICE,
    )


def _asked(name: str, benchmark: BenchmarkConfig, prompt: RunPrompt) -> BenchmarkConfig:
    """With the run's template, unless another is given or letters are asked for on one side only."""
    if benchmark.template is not None or _is_choice(name, benchmark) != prompt.asks_for_choice:
        return benchmark
    return benchmark.model_copy(update={"template": prompt.template})


def _differences(asked: EvalConfig, prompt: RunPrompt, asks_chat: bool) -> list[str]:
    asked_format = "chat" if asks_chat else "plain"
    values: dict[str, tuple[Any, Any]] = {"prompt_format": (asked_format, prompt.prompt_format)}
    if asks_chat:
        values["system_prompt"] = asked.system_prompt, prompt.system_prompt
        values["chat_options"] = asked.chat_options, prompt.chat_options
    for name, benchmark in asked.benchmarks.items():
        known = published_set(name)
        template = benchmark.template or (known.template if known else prompt.template)
        values[f"benchmarks.{name}.template"] = template, prompt.template
    return [
        f"{key}={value!r}, but the run trained with {trained!r}: the score is that of another prompt"
        for key, (value, trained) in values.items()
        if value != trained
    ]


def _is_choice(name: str, benchmark: BenchmarkConfig) -> bool:
    known = published_set(name)
    return (benchmark.reward or (known.reward if known else "")) == CHOICE
