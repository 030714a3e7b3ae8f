"""The spec of Gymnasium's environments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlinf_envs.core.kind_spec import KindSpec


@dataclass(frozen=True, kw_only=True)
class GymnasiumSpec(KindSpec):
    def drawing_options(self, env_id: str) -> Mapping[str, Any]:
        return {"render": True}

    def own_limit(self, env_id: str, env: Any) -> int | None:
        from rlinf_envs.adapters.gymnasium.env import registered_limit

        return registered_limit(env_id)


SPEC = GymnasiumSpec(
    name="gymnasium",
    make="rlinf_envs.adapters.gymnasium.env:make_gymnasium",
    packages=("gymnasium", "mujoco", "gymnasium-robotics"),
)
