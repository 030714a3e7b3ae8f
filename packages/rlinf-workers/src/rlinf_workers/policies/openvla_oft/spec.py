"""The spec of OpenVLA-OFT: OpenVLA's decoder with several actions from one forward pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlinf_workers.policies.openvla.spec import OpenVLASpec
from rlinf_workers.policies.spec import ActingCost, num_cameras

CHUNK_SIZE = 8
"""Number of actions in an answer (arXiv:2502.19645)."""


@dataclass(frozen=True, kw_only=True)
class OpenVLAOFTSpec(OpenVLASpec):
    def acting_cost(self, options: Mapping[str, Any], env_options: Mapping[str, Any]) -> ActingCost:
        return ActingCost(
            shape=self.shape(options),
            chunk_size=int(options.get("chunk_size") or CHUNK_SIZE),
            text_tokens=40,
            num_cameras=num_cameras(options, env_options),
            parallel_decoding=True,
        )


SPEC = OpenVLAOFTSpec(
    name="openvla_oft",
    implementation="rlinf_workers.policies.openvla_oft.policy:OpenVLAOFT",
    published_model="OpenVLA-OFT",
)
