from __future__ import annotations

from dataclasses import dataclass

from rlinf_workers.launchers.spec import LauncherSpec


@dataclass(frozen=True, kw_only=True)
class LocalSpec(LauncherSpec):
    """Processes of this machine."""

    @property
    def has_nodes(self) -> bool:
        return False


SPEC = LocalSpec(name="local", implementation="rlinf_workers.launchers.local.launcher:LocalLauncher")
