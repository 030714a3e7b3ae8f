"""The config of a run: one pydantic model per job, selected by the key `job`."""

from __future__ import annotations

from typing import Annotated, Any, Union

from pydantic import Field, TypeAdapter

from rlinf.config.common import JobConfig
from rlinf.jobs.spec import JOBS

SHIPPED: tuple[type[JobConfig], ...] = tuple(spec.config_model() for spec in JOBS.specs())
"""The config models of the shipped jobs."""
Shipped: Any = Annotated[Union[SHIPPED], Field(discriminator="job")]  # noqa: UP007 - the members are a tuple
"""Their union, discriminated by the key `job`."""


def json_schema() -> dict[str, Any]:
    """Returns the JSON schema of a recipe file, for editors.

    No key is required, because a recipe may inherit any key from the one it `extends`; loading checks that nothing is
    missing.
    """
    schema = _without_requirements(TypeAdapter(Shipped).json_schema())
    for model in SHIPPED:
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
    relaxed = {
        key: _without_requirements(value) for key, value in node.items() if key not in ("required", "discriminator")
    }
    if isinstance(relaxed.get("oneOf"), list):
        relaxed["anyOf"] = relaxed.pop("oneOf")  # without required keys, several may match
    return relaxed
