"""Plug-ins: what a recipe may name, and where it is.

A plug-in that ships is a folder with a `spec.py` beside its run time, and one line here. The spec answers what the rest
of the system asks about it before any process starts, and says where its class is; neither this table nor a spec
imports torch. A custom plug-in is named by its import path, `package.module:NAME`, and needs no line: the path leads to
a spec, or to a class, whose attribute `spec` is one. A class without it has the spec's defaults.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from rlinf_algos.registry import Registry

if TYPE_CHECKING:
    from rlinf_workers.launchers.spec import LauncherSpec
    from rlinf_workers.weight_sync.spec import WeightSyncSpec


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What is known of a plug-in without importing it. A kind of plug-in adds methods with defaults; a plug-in
    overrides those that it answers differently."""

    name: str
    """What recipes call it."""
    implementation: Any
    """Import path of its class, "package.module:Class"; or the class itself."""

    def load(self) -> Any:
        """The class, or the function that makes one."""
        if not isinstance(self.implementation, str):
            return self.implementation
        module, _, attribute = self.implementation.partition(":")
        return getattr(importlib.import_module(module), attribute)


S = TypeVar("S", bound=Spec)


class Plugins(Registry[Any], Generic[S]):
    """Names of one kind of plug-in.

    Args:
        what: the kind, as messages say it: "generation engine".
        builtin: name -> import path of its spec (or of its class).
        base: import path of the kind's spec, which has the defaults.
    """

    def __init__(self, what: str, builtin: Mapping[str, str], *, base: str) -> None:
        super().__init__(what, builtin)
        self._base = base

    def spec(self, name: str) -> S:
        """The spec of a name or an import path.

        Raises:
            AlgosError: as `get`.
        """
        module, _, attribute = self._base.partition(":")
        base: type[S] = getattr(importlib.import_module(module), attribute)
        plugin = super().get(name, callable_only=False)
        if isinstance(plugin, base):
            return plugin
        own = getattr(plugin, "spec", None)
        return own if isinstance(own, base) else base(name=name, implementation=plugin)

    def specs(self) -> list[S]:
        """All that have a name, in the order of the table and then as they were registered."""
        return [self.spec(name) for name in (*self._builtin, *self._added)]

    def get(self, name: str, *, callable_only: bool = True) -> Any:
        """The class of that name, or of an import path. Raises: AlgosError, as `Registry.get`."""
        plugin = super().get(name, callable_only=False)
        if isinstance(plugin, Spec):
            path = plugin.implementation
            return self._imported(path, callable_only) if isinstance(path, str) else path
        return super().get(name, callable_only=callable_only)


SPEC = f"{__name__}:Spec"

BACKENDS: Plugins[Spec] = Plugins(
    "training backend",
    {
        "replicated": "rlinf_workers.trainers.replicated.backend:ReplicatedBackend",
        "fsdp2": "rlinf_workers.trainers.fsdp2.backend:fsdp2",
        "megatron": "rlinf_workers.trainers.megatron.door:megatron",
    },
    base=SPEC,
)
BACKEND_CHECKS: Registry[Any] = Registry(
    "check of a training backend", {"megatron": "rlinf_workers.trainers.megatron.door:check"}
)
"""What looks at a recipe's options, beside the constructor's signature, before any process starts: called with them and
the model's config.json. Not every backend has one."""
ENGINES: Plugins[Spec] = Plugins(
    "generation engine",
    {
        "huggingface": "rlinf_workers.engines.huggingface.engine:HuggingFaceEngine",
        "sglang": "rlinf_workers.engines.sglang.engine:SGLangEngine",
    },
    base=SPEC,
)
POLICIES: Plugins[Spec] = Plugins(
    "policy",
    {
        "actor_critic": "rlinf_workers.policies.actor_critic:ActorCritic",
        "cnn": "rlinf_workers.policies.cnn:CnnActorCritic",
        "openvla": "rlinf_workers.policies.openvla.policy:OpenVLA",
        "openvla_oft": "rlinf_workers.policies.openvla_oft.policy:OpenVLAOFT",
        "pi0": "rlinf_workers.policies.pi0.policy:Pi0",
        "pi05": "rlinf_workers.policies.pi05.policy:Pi05",
    },
    base=SPEC,
)
LAUNCHERS: Plugins[LauncherSpec] = Plugins(
    "launcher",
    {
        "local": "rlinf_workers.launchers.local.spec:SPEC",
        "ray": "rlinf_workers.launchers.ray.spec:SPEC",
    },
    base="rlinf_workers.launchers.spec:LauncherSpec",
)
WEIGHT_SYNCS: Plugins[WeightSyncSpec] = Plugins(
    "weight sync",
    {
        "device": "rlinf_workers.weight_sync.device.spec:SPEC",
        "shared": "rlinf_workers.weight_sync.shared.spec:SPEC",
        "streams": "rlinf_workers.weight_sync.streams.spec:SPEC",
        "per_node": "rlinf_workers.weight_sync.per_node.spec:SPEC",
    },
    base="rlinf_workers.weight_sync.spec:WeightSyncSpec",
)
"""In the order in which `auto` tries those that suit an edge."""
