"""The checks of what an agent is made of: harness, tools, text environment, chat template."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlinf.config.agents import AgentConfig
from rlinf.errors import UserError
from rlinf.jobs.named_agents import check_template
from rlinf_workers.agents import LOOP, import_problem
from rlinf_workers.agents.tools import check_environment, check_tools


def check_agent(
    agent: AgentConfig, chat_options: Mapping[str, Any], model: Path | None, *, at: str, model_key: str
) -> None:
    """The harness can be imported, tools and environment exist and take their options, and the model's chat template
    can be continued token by token.

    Args:
        model: the policy's folder; None: a new model.
        at, model_key: before `agent`, and the key of the model, for messages.

    Raises: UserError.
    """
    key = f"{at}agent"
    if missing := [name for name in ("aiohttp", "jsonschema") if importlib.util.find_spec(name) is None]:
        raise UserError(f"{key} needs {' and '.join(missing)}", hint="pip install 'rlinf[agents]'")
    for index, option, text in check_tools(agent.tools):
        raise _plugin_error(f"{key}.tools[{index}]", option, text)
    for option, text in () if agent.environment is None else check_environment(agent.environment):
        raise _plugin_error(f"{key}.environment", option, text)
    for part, path, python in _custom_code(agent):
        if problem := import_problem(path, python):
            raise UserError(f"{key}.{part}={path}: {problem}")
    if agent.tools and agent.run != LOOP and (problem := import_problem(agent.run, agent.python, first="session")):
        raise UserError(f"{key}.tools: {problem}", hint="a harness brings its own tools; leave them out")
    if model is not None:
        check_template(model, chat_options, f"{key}: {model_key}")


def refuse_other_models(agent: AgentConfig, kind: str, at: str) -> None:
    """Pictures are processed once, for one model.

    Args:
        kind: of that model, which reads them.
        at: before `agent`, for messages.

    Raises: UserError for an agent with a model of its own.
    """
    if (name := next(iter(agent.models), None)) is not None:
        raise UserError(
            f"{at}agent.agents.{name}.path: pictures are processed for one model, and {kind} reads them",
            hint="leave the path out, so that all agents speak with the policy",
        )


def _plugin_error(key: str, option: str, text: str) -> UserError:
    return UserError(f"{key}.{option}{text}" if option else f"{key}: {text}")


def _custom_code(agent: AgentConfig) -> Iterator[tuple[str, str, str | None]]:
    """The parts that are not RLinf's: key, import path, and the interpreter."""
    parts = [("run", agent.run, agent.python)] if agent.run != LOOP else []
    for index, entry in enumerate(agent.tools):
        parts.append((f"tools[{index}]", entry if isinstance(entry, str) else str(entry["tool"]), None))
    if agent.environment is not None:
        parts.append(("environment", str(agent.environment["name"]), None))
    for part, path, python in parts:
        if ":" in path and not path.startswith("rlinf."):
            yield part, path, python
