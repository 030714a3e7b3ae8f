"""The spec of Meta-World, without importing it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlinf_envs.core.kind_spec import KindSpec


@dataclass(frozen=True, kw_only=True)
class MetaworldSpec(KindSpec):
    def drawing_options(self, env_id: str) -> Mapping[str, Any]:
        return {"render": True}


SPEC = MetaworldSpec(
    name="metaworld",
    make="rlinf_envs.adapters.metaworld.env:make_metaworld",
    steps_after_end=True,
    expert="rlinf_envs.adapters.metaworld.experts:record_expert",
    picture_size=64,
    packages=("metaworld", "mujoco"),
)
