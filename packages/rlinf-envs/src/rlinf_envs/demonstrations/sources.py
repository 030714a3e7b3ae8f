"""Where demonstrations come from: scripted experts, layouts of files that any environment may have, and those of one
kind."""

from __future__ import annotations

from collections.abc import Mapping

from rlinf_envs.core.kind_spec import KindSpec
from rlinf_envs.kinds import KINDS, kind_spec

EXPERTS = "experts"
"""The source of demonstrations that the environment's scripted expert records."""
LAYOUTS: Mapping[str, str] = {"lerobot": "rlinf_envs.demonstrations.lerobot:LeRobotDemonstrations"}
"""Layout of files -> import path of its reader, for environments of any kind."""


def readers(kind: KindSpec | None = None) -> dict[str, str]:
    """Layout -> import path of its reader: those for any kind, and those of the kind; None: of every shipped kind."""
    own = [kind] if kind else [kind_spec(name) for name in KINDS]
    return dict(LAYOUTS) | {layout: reader for spec in own for layout, reader in spec.demonstrations.items()}


def sources(kind: KindSpec | None = None) -> tuple[str, ...]:
    """All sources that go with a kind; None: with any."""
    return (*((EXPERTS,) if kind is None or kind.expert else ()), *readers(kind))


def kinds_with(source: str) -> tuple[str, ...]:
    """The shipped kinds that a source goes with."""
    return tuple(name for name in KINDS if source in sources(kind_spec(name)))
