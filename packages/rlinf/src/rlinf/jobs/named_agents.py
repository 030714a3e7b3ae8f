"""Agents by name, and the checks of their models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlinf.config.agents import AgentConfig, trainer_of
from rlinf.config.inputs import check_model_folder
from rlinf.errors import UserError
from rlinf.jobs.models import check_architecture, check_end_tokens, code_notes
from rlinf.run_folder.checkpoints import refuse_damaged_model
from rlinf.tasks.language import load_checkpoint_tokenizer, max_positions
from rlinf_workers.agents import NamedAgent, TemplateRefused, template_of_folder


def named_agents(agent: AgentConfig) -> dict[str, NamedAgent]:
    """The agents by name."""
    policies = {name: agent.policy_of(name) or "" for name in agent.agents}
    folders = {name: str(path) for name, path in agent.models.items()}
    return {
        name: NamedAgent(
            trains=one.trains,
            folder=folders.get(name),
            trainer=policies[name] and trainer_of(policies[name]),
            policy=policies[name],
        )
        for name, one in agent.agents.items()
    }


def check_partners(agent: AgentConfig, chat_options: Mapping[str, Any], ways: Sequence[str], at: str) -> list[str]:
    """Whether the models that agents have beside model.path are complete, can end their turns, have a chat template
    that can be continued token by token, and are computed as transformers does. Returns notes.

    Args:
        ways: of the engine, see `jobs.models.engine_ways`.
        at: before `agent`, for messages.

    Raises: UserError.
    """
    notes: list[str] = []
    for name, path in ((name, one.path) for name, one in agent.agents.items() if one.path is not None):
        key = f"{at}agent.agents.{name}.path"
        check_model_folder(path, key=key)
        refuse_damaged_model(path, key=key)
        notes += [*code_notes(path), *check_end_tokens(path, load_checkpoint_tokenizer(path, key))]
        check_template(path, chat_options, f"{at}agent: {key}")
        limit = max_positions(path)
        if limit is not None and agent.max_context_tokens > limit:
            raise UserError(
                f"{at}agent.max_context_tokens={agent.max_context_tokens}, but {key}={path} was made for {limit} "
                "positions (max_position_embeddings of its config.json)",
                hint=f"use --{at}agent.max_context_tokens {limit} or less, or another model",
            )
        check_architecture(path, ways, num_tokens=agent.max_context_tokens, key=key)
    return notes


def check_template(folder: Path, chat_options: Mapping[str, Any], key: str) -> None:
    """Whether a model's chat template can be continued token by token. Raises: UserError."""
    try:
        template_of_folder(folder, dict(chat_options))
    except TemplateRefused as error:
        raise UserError(
            f"{key}={folder}: {error}",
            hint="docs/agents.md says which templates are known; a model without a template reads plain texts",
        ) from error
