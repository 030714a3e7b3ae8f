"""Config for using a trained robot policy: the run's environments and policy, and the devices to use now."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from rlinf.config.base import Conflict, Section, Seed
from rlinf.config.common import VENVS, ClusterConfig, Python, venv_conflicts
from rlinf.config.embodied import EnvConfig, PolicyConfig

ROLES = ("env", "policy")
"""Roles of a run that are used."""
FROM_RUN = ("name", "seed", "env", "policy", "venvs")
"""Keys copied from the run's config."""


class TrainedConfig(Section):
    """The run's environments and policy, without its training settings, on the devices of the current machine."""

    name: str = Field(description="Name of the run.")
    seed: Seed = Field(default=0, description="Seed of the run, which also seeds the policy's initialization.")
    env: EnvConfig = Field(description="The environments.")
    policy: PolicyConfig = Field(default=PolicyConfig(), description="The policy.")
    cluster: ClusterConfig = Field(default=ClusterConfig(), description="The devices.")
    venvs: dict[str, Python] = Field(default={}, description=VENVS)

    def conflicts(self) -> Iterator[Conflict]:
        yield from super().conflicts()
        yield from venv_conflicts(self.venvs, ROLES)
