"""The config of a run: one model for each job, told apart by `job`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from rlinf.config.embodied import EmbodiedConfig
from rlinf.config.reasoning import ReasoningConfig

JOBS = (ReasoningConfig, EmbodiedConfig)
Config = Annotated[ReasoningConfig | EmbodiedConfig, Field(discriminator="job")]
"""Any job's config."""


def json_schema() -> dict[str, Any]:
    """The JSON schema of a recipe file, for editors.

    A recipe may leave to the one it `extends` what it likes, so no key is required here; loading checks that nothing
    is missing.
    """
    schema = _without_requirements(TypeAdapter(Config).json_schema())
    for model in JOBS:
        properties = schema["$defs"][model.__name__]["properties"]
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
