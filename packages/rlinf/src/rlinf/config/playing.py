"""What a trained robot policy acts with: of a run's config the environments and the policy, and where it is to act."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from rlinf.config.base import Conflict, Section, Seed
from rlinf.config.common import ClusterConfig
from rlinf.config.embodied import EnvConfig, PolicyConfig
from rlinf.config.venvs import VENVS, Python, venv_conflicts

ROLES = ("env", "policy")
"""Those of a run's roles that act."""
FROM_RUN = ("name", "seed", "env", "policy", "venvs")
"""Keys of a run's config that are taken over."""


class TrainedConfig(Section):
    """Environments and policy as the run had them. Devices are those of the machine at hand, and training has no part
    in it."""

    name: str = Field(description="Name of the run.")
    seed: Seed = Field(default=0, description="Seed of the run, by which a policy was made.")
    env: EnvConfig = Field(description="The environments.")
    policy: PolicyConfig = Field(default=PolicyConfig(), description="The network.")
    cluster: ClusterConfig = Field(default=ClusterConfig(), description="The devices.")
    venvs: dict[str, Python] = Field(default={}, description=VENVS)

    def conflicts(self) -> Iterator[Conflict]:
        yield from super().conflicts()
        yield from venv_conflicts(self.venvs, ROLES)
