"""The spec of custom environments, which `id` names by import path: their `kind_spec`, else the defaults."""

from __future__ import annotations

from dataclasses import dataclass

from rlinf_envs.core.importing import object_at
from rlinf_envs.core.kind_spec import KindSpec


@dataclass(frozen=True, kw_only=True)
class ImportedSpec(KindSpec):
    def of(self, env_id: str) -> KindSpec:
        try:
            own = getattr(object_at(env_id), "kind_spec", None)
        except Exception:  # noqa: BLE001 - reported on creation; it may be installed only in a worker's venv
            return self
        return own if isinstance(own, KindSpec) else self


SPEC = ImportedSpec(name="import")
