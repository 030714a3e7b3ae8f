"""The config of a run: one model for each job, told apart by `job`. Everything a recipe may say, with its meaning and
its unit."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter

from rlinf.config.common import ClusterConfig, JobConfig, Mode, PlanConfig, RunConfig
from rlinf.config.embodied import EmbodiedConfig, EnvConfig, PolicyActorConfig, PolicyConfig
from rlinf.config.reasoning import (
    ActorConfig,
    ArchitectureConfig,
    CriticConfig,
    ModelConfig,
    ReasoningConfig,
    RolloutConfig,
    WarmStartConfig,
)
from rlinf.config.rewards import RewardConfig
from rlinf.config.tasks import AddTask, FilesTask, SortTask, TaskConfig

__all__ = [
    "Config",
    "JobConfig",
    "ReasoningConfig",
    "EmbodiedConfig",
    "JOBS",
    "Mode",
    "ClusterConfig",
    "PlanConfig",
    "RunConfig",
    "TaskConfig",
    "SortTask",
    "AddTask",
    "FilesTask",
    "ModelConfig",
    "ArchitectureConfig",
    "WarmStartConfig",
    "CriticConfig",
    "RolloutConfig",
    "RewardConfig",
    "ActorConfig",
    "EnvConfig",
    "PolicyConfig",
    "PolicyActorConfig",
    "json_schema",
]

Config = ReasoningConfig | EmbodiedConfig
"""Any job's config."""

JOBS: dict[str, type[ReasoningConfig] | type[EmbodiedConfig]] = {
    "reasoning": ReasoningConfig,
    "embodied": EmbodiedConfig,
}
"""Value of the key `job` -> its config."""


def json_schema() -> dict[str, Any]:
    """The JSON schema of a recipe file, for editors.

    A recipe may leave to the one it `extends` what it likes, so no key is required here; loading checks that nothing
    is missing.
    """
    schema = TypeAdapter(Config).json_schema()
    schema = _without_requirements(schema)
    for name in (model.__name__ for model in JOBS.values()):
        properties = schema["$defs"][name]["properties"]
        properties["extends"] = {
            "type": "string",
            "description": "Recipe to start from: a shipped name, or a path relative to this file.",
        }
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "RLinf recipe", **schema}


def _without_requirements(node: Any) -> Any:
    if isinstance(node, list):
        return [_without_requirements(entry) for entry in node]
    if not isinstance(node, dict):
        return node
    kept = {
        key: _without_requirements(value) for key, value in node.items() if key not in ("required", "discriminator")
    }
    if isinstance(kept.get("oneOf"), list):
        kept["anyOf"] = kept.pop("oneOf")  # without required keys, more than one may fit
    return kept
