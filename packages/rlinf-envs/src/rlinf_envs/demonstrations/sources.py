"""Sources of demonstrations: scripted experts, general file layouts, and file layouts of one kind of environments."""

from __future__ import annotations

from collections.abc import Mapping

from rlinf_envs.core.kind_spec import KindSpec
from rlinf_envs.kinds import KINDS, kind_spec

EXPERTS = "experts"
"""The source for demonstrations recorded by the environment's scripted expert."""
LAYOUTS: Mapping[str, str] = {"lerobot": "rlinf_envs.demonstrations.lerobot:LeRobotDemonstrations"}
"""File layout -> import path of its reader, for environments of any kind."""


def readers(kind: KindSpec | None = None) -> dict[str, str]:
    """Returns layout -> import path of its reader, for any kind and for this kind; None: for all shipped kinds."""
    own = [kind] if kind else [kind_spec(name) for name in KINDS]
    return dict(LAYOUTS) | {layout: reader for spec in own for layout, reader in spec.demonstrations.items()}


def sources(kind: KindSpec | None = None) -> tuple[str, ...]:
    """Returns all sources for a kind; None: for any kind."""
    return (*((EXPERTS,) if kind is None or kind.expert else ()), *readers(kind))


def kinds_with(source: str) -> tuple[str, ...]:
    """Returns the shipped kinds that a source can be used with."""
    return tuple(name for name in KINDS if source in sources(kind_spec(name)))
