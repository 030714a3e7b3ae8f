"""A custom kind of environments and a custom policy, as a plug-in of RLinf describes them: without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlinf_envs import KindSpec, MachineCheck
from rlinf_sched.derive import ModelShape
from rlinf_workers.policies import ActingCost, PolicySpec


@dataclass(frozen=True, kw_only=True)
class ArmKind(KindSpec):
    def own_limit(self, env_id: str, env: Any) -> int:
        return {"reach": 40, "hold": 80}[env_id]

    def machine_check(self, version_of: Mapping[str, str]) -> MachineCheck:
        return MachineCheck("arm", "note", f"the toy arm moves here, with numpy {version_of['numpy']}")


KIND = ArmKind(
    name="arm",
    make="integration_tests.extensions.arm.env:make_arms",
    steps_after_end=True,
    expert="integration_tests.extensions.arm.env:record_expert",
    seconds_per_step=0.002,
)


@dataclass(frozen=True, kw_only=True)
class ArmPolicy(PolicySpec):
    def acting_cost(self, options: Mapping[str, Any], env_options: Mapping[str, Any]) -> ActingCost:
        shape = ModelShape(
            name="arm",
            num_layers=2,
            hidden_size=options.get("width", 32),
            intermediate_size=64,
            num_heads=2,
            num_kv_heads=2,
            head_dim=16,
            vocab_size=16,
        )
        return ActingCost(shape=shape, chunk_size=2, text_tokens=4)


POLICY = ArmPolicy(name="arm", implementation="integration_tests.extensions.policy:Pairs")
