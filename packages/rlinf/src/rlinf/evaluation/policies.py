"""The models of further policies in an evaluation: those in the checkpoint of the evaluated model."""

from __future__ import annotations

from pathlib import Path

from rlinf.config.agents import AgentConfig
from rlinf.errors import UserError
from rlinf.run_folder.checkpoints import MODEL, checkpoint_of, policy_folder


def as_in_checkpoint(agent: AgentConfig, model: Path) -> AgentConfig:
    """The agents of a run with the models that their further policies have in the checkpoint of a model.

    Raises: UserError if the model is itself that of a further policy: the first one would be missing.
    """
    checkpoint = checkpoint_of(model)
    if not agent.further_policies or checkpoint is None:
        return agent
    if model.parent != checkpoint:
        raise UserError(
            f"model={model} is one of several policies that the run trained together",
            hint=f"--model {checkpoint} evaluates all of them; --agent null asks this one for completions",
        )
    paths = {policy: checkpoint / policy_folder(policy) / MODEL for policy in agent.further_policies}
    policies = {name: agent.policy_of(name) for name in agent.agents}
    agents = {
        name: one if (policy := policies[name]) is None else one.model_copy(update={"path": paths[policy]})
        for name, one in agent.agents.items()
    }
    return agent.model_copy(update={"agents": agents})


def check_policies(agent: AgentConfig) -> None:
    """Raises: UserError for a further policy without a model."""
    for name in agent.agents:
        if (policy := agent.policy_of(name)) is not None and agent.further_policies[policy] is None:
            raise UserError(
                f"agent.agents.{name}.policy={policy}: nothing says which model it is",
                hint=f"give its folder, --agent.agents.{name}.path FOLDER; that of a run is "
                f"RUN/checkpoints/step-*/{policy_folder(policy)}/{MODEL}",
            )
