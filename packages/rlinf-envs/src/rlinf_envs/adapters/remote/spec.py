"""The spec of remote simulators. The id is the address of their server, host:port, or several with commas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlinf_envs.core.kind_spec import KindSpec


@dataclass(frozen=True, kw_only=True)
class RemoteSpec(KindSpec):
    def evaluation_facts(self, env_id: str, options: Mapping[str, Any]) -> Mapping[str, str]:
        """Also has the name and the versions that the server reports."""
        from rlinf_envs.adapters.remote.connection import served_at

        facts = {name: value for name, value in options.items() if name != "secret_file"}
        return {**super().evaluation_facts(env_id, facts), **served_at(env_id, options.get("secret_file"))}


SPEC = RemoteSpec(
    name="remote",
    make="rlinf_envs.adapters.remote.opening:make_remote",
    simulator="rlinf_envs.adapters.remote.simulator:RemoteSimulator",
)
