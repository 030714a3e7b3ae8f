"""Takes prompt settings from the run that trained a model, so that an evaluation uses the same prompts.

A policy answers the prompt that it was trained with; with another template or instruction, scores are not meaningful.
So settings that the command line does not set come from the run's config, and different ones are noted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from rlinf.config.evaluation import BenchmarkConfig, EvalConfig
from rlinf.config.load import load_config
from rlinf.config.reasoning import ReasoningConfig
from rlinf.config.tasks import FilesTask
from rlinf.errors import UserError
from rlinf.evaluation.model import EvaluatedModel, run_folder
from rlinf.evaluation.policies import as_in_checkpoint
from rlinf.jobs.spec import job_spec
from rlinf.tasks.prompts import PICTURE_SETTINGS, is_chat
from rlinf.tasks.published import published_set

CHOICE = "multiple_choice"


def prompted_as_in_run(config: EvalConfig, model: EvaluatedModel) -> tuple[EvalConfig, list[str]]:
    """Fills in settings that are not set from the run that trained the model, if there is one.

    Returns: the settings, and notes: which settings were taken, and which differ from the run's.
    """
    folder = run_folder(model.folder)
    if folder is None:
        return config, []
    try:
        run = load_config(str(folder / "config.yaml"))
    except UserError as error:
        why = str(error).splitlines()[0]
        return config, [f"{folder / 'config.yaml'} cannot be read, so prompts are not as in the run: {why}"]
    if not job_spec(run).samples_text:
        return config, []
    run = cast(ReasoningConfig, run)
    template, trained = _prompt_of(run, model.tokenizer)
    taken = {key: value for key, value in trained.items() if key not in config.model_fields_set}
    if config.system_prompt or config.chat_options:
        taken.pop("prompt_format", None)
    asks_chat = is_chat(taken.get("prompt_format", config.prompt_format), model.tokenizer)
    if not asks_chat:
        taken = {key: value for key, value in taken.items() if key in ("prompt_format", *PICTURE_SETTINGS)}
    benchmarks = dict(config.benchmarks)
    for name, benchmark in benchmarks.items():
        # If only one side requires a letter as the answer, the benchmark's template is needed.
        if benchmark.prompt_template is None and _is_choice(name, benchmark) == (run.reward.kind == CHOICE):
            benchmarks[name] = benchmark.model_copy(update={"prompt_template": template})
    stop = run.rollout.stop if config.stop is None else config.stop
    agent, agent_notes = _agent_of(config, run, folder, model.folder)
    settings = config.model_copy(update={**taken, "benchmarks": benchmarks, "stop": stop, **agent})

    compared = {key: value for key, value in trained.items() if asks_chat or key in PICTURE_SETTINGS}
    values = {key: (getattr(settings, key), value) for key, value in compared.items()}
    values["prompt_format"] = "chat" if asks_chat else "plain", trained["prompt_format"]
    for name, benchmark in benchmarks.items():
        published = published_set(name)
        own = benchmark.prompt_template or (published.template if published else template)
        values[f"benchmarks.{name}.prompt_template"] = own, template
    return settings, [
        *agent_notes,
        f"asked as in the run {folder}: prompt_format={trained['prompt_format']}, template {template!r}",
        *(
            f"{key}={value!r}, but the run trained with {other!r}: the score is that of another prompt"
            for key, (value, other) in values.items()
            if value != other
        ),
    ]


def _agent_of(config: EvalConfig, run: ReasoningConfig, folder: Path, model: Path) -> tuple[dict[str, Any], list[str]]:
    """Returns the settings of the run's episodes that the command line does not set, and a note about them."""
    rollout = run.rollout
    if rollout.agent is None:
        return {}, []
    if "agent" in config.model_fields_set and config.agent is None:
        return {}, [f"agent=null: completions, but the run {folder} trained episodes"]
    offered: dict[str, Any] = {"agent": rollout.agent, "max_new_tokens": rollout.max_new_tokens}
    if config.engine == rollout.engine:
        offered["engine_options"] = rollout.engine_options
    taken = {key: value for key, value in offered.items() if key not in config.model_fields_set}
    if "agent" in taken:
        taken["agent"] = as_in_checkpoint(rollout.agent, model)
    settings = config.model_copy(update=taken)
    if problem := settings.engine_spec.episodes_problem(settings.engine_options):
        raise UserError(f"engine={settings.engine} cannot run the episodes of {folder}: {problem}")
    assert settings.agent is not None, "the run's, or one's own"
    return taken, [f"episodes of the agent {settings.agent.run}, turns of up to {settings.max_new_tokens} tokens"]


def _prompt_of(run: ReasoningConfig, tokenizer: Any) -> tuple[str, dict[str, Any]]:
    """Returns the run's template, with {question}, and its other settings under their names in an evaluation."""
    task = run.task
    if not isinstance(task, FilesTask):
        return "{question}", {"prompt_format": "plain", "system_prompt": None, "chat_options": {}}
    template = task.prompt_template.replace("{" + (task.columns.prompt or "question") + "}", "{question}")
    prompt_format = "chat" if is_chat(task.prompt_format, tokenizer) else "plain"
    settings = {"system_prompt": task.system_prompt, "chat_options": dict(task.chat_options)}
    settings |= {key: getattr(task, key) for key in PICTURE_SETTINGS}
    return template, {"prompt_format": prompt_format, **settings}


def _is_choice(name: str, benchmark: BenchmarkConfig) -> bool:
    published = published_set(name)
    return (benchmark.reward or (published.reward if published else "")) == CHOICE
