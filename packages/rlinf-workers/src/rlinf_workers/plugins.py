"""Plug-ins: the names that a recipe may use, and what they refer to.

A shipped plug-in is a folder with a `spec.py` beside its implementation, and one line here. The spec answers what the
rest of the system asks about it before any process starts, and names its class; neither this table nor a spec imports
torch. A custom plug-in is named by its import path, `package.module:NAME`, and needs no line: the path refers to a
spec, or to a class whose attribute `spec` is one. A class without it gets the spec's defaults.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar, get_args, get_type_hints

import msgspec

from rlinf_algos import AlgosError, Registry, did_you_mean

if TYPE_CHECKING:
    from rlinf_workers.engines.spec import EngineSpec
    from rlinf_workers.launchers.spec import LauncherSpec
    from rlinf_workers.policies.spec import PolicySpec
    from rlinf_workers.trainers.spec import TrainerSpec
    from rlinf_workers.weight_sync.spec import WeightSyncSpec


class OptionError(ValueError):
    """An unknown option, or one with an invalid value.

    Args:
        text: the message after the option's name: "=3 does not divide ...".
    """

    def __init__(self, option: str, text: str) -> None:
        super().__init__(f"{option}{text}")
        self.option, self.text = option, text


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What is known of a plug-in without importing it. A kind of plug-in adds methods with defaults, which a plug-in
    may override."""

    name: str = ""
    """Its name in recipes; a class that brings its own spec may leave it out, and `implementation` too."""
    implementation: Any = None
    """Import path of its class, "package.module:Class"; or the class itself."""
    options: type | None = None
    """Dataclass of its options, whose field docstrings document the keys; it raises OptionError for incompatible
    values. None: the arguments of its class's constructor."""

    @property
    def module(self) -> str:
        """The module of its class."""
        if self.implementation is None or isinstance(self.implementation, str):
            return (self.implementation or self.name).partition(":")[0]
        return self.implementation.__module__

    def load(self) -> Any:
        """The class, or a factory function."""
        return imported(self.implementation) if isinstance(self.implementation, str) else self.implementation

    def read(self, options: Mapping[str, Any]) -> Any:
        """The options as their dataclass. Raises: OptionError."""
        assert self.options is not None, f"{self.name} declares no options"
        names = [field.name for field in fields(self.options)]
        for option in options:
            if option not in names:
                hint = did_you_mean(option, names) if names else "it has none."
                raise OptionError(option, f": {self.name} has no option of that name; {hint}")
        try:
            return msgspec.convert(dict(options), self.options)
        except msgspec.ValidationError as error:
            if isinstance(error.__cause__, OptionError):
                raise error.__cause__ from None
            reason, _, place = str(error).partition(" - at `$.")
            option = place.partition("`")[0].partition("[")[0]
            if "enum value" in reason:
                reason = f"allowed: {', '.join(_choices(get_type_hints(self.options)[option]))}"
            raise OptionError(option, f"={options.get(option)!r}: {reason[0].lower()}{reason[1:]}") from None

    def problems(self, options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """Problems of a recipe's options: (option, text after its name)."""
        if self.options is None:
            return
        try:
            self.read(options)
        except OptionError as error:
            yield error.option, error.text


def _choices(kind: Any) -> list[str]:
    """The values of a Literal, of bool, or of a union of such, as a recipe has them."""
    if kind is bool:
        return ["true", "false"]
    return [text for one in get_args(kind) for text in ([repr(one)] if isinstance(one, str | int) else _choices(one))]


def imported(path: str) -> Any:
    """Imports what one of our import paths refers to."""
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(module), attribute)


S = TypeVar("S", bound=Spec)


class Plugins(Registry[Any], Generic[S]):
    """The registry of one kind of plug-in.

    Args:
        what: the kind, as used in messages: "generation engine".
        builtin: name -> import path of its spec (or of its class).
        base: import path of the kind's spec, which has the defaults.
    """

    def __init__(self, what: str, builtin: Mapping[str, str], *, base: str) -> None:
        super().__init__(what, builtin)
        self._base = base

    @property
    def default(self) -> str:
        """The default name: the first of the table."""
        return next(iter(self._builtin))

    def spec(self, name: str) -> S:
        """The spec of a name or an import path.

        Raises:
            AlgosError: like `get`.
        """
        base = self._base_class()
        plugin = super().get(name, callable_only=False)
        if isinstance(plugin, base):
            return plugin
        own = getattr(plugin, "spec", None)
        return replace(own if isinstance(own, base) else base(), name=name, implementation=plugin)

    def spec_if_there(self, name: str) -> S:
        """Like `spec`, but returns the defaults for an invalid name, which other checks report."""
        try:
            return self.spec(name)
        except AlgosError:
            if name in self.names():
                raise
            return self._base_class()(name=name)

    def _base_class(self) -> type[S]:
        return imported(self._base)

    def specs(self) -> list[S]:
        """All named plug-ins, in the order of the table and then of registration."""
        return [self.spec(name) for name in (*self._builtin, *self._added)]

    def get(self, name: str, *, callable_only: bool = True) -> Any:
        """The class with that name or import path. Raises: AlgosError, like `Registry.get`."""
        plugin = super().get(name, callable_only=False)
        if isinstance(plugin, Spec):
            path = plugin.implementation
            return self._imported(path, callable_only) if isinstance(path, str) else path
        return super().get(name, callable_only=callable_only)


TRAINERS: Plugins[TrainerSpec] = Plugins(
    "training backend",
    {
        "replicated": "rlinf_workers.trainers.replicated.spec:SPEC",
        "fsdp2": "rlinf_workers.trainers.fsdp2.spec:SPEC",
        "megatron": "rlinf_workers.trainers.megatron.spec:SPEC",
    },
    base="rlinf_workers.trainers.spec:TrainerSpec",
)
"""Training backends, for the key `actor.backend`."""
ENGINES: Plugins[EngineSpec] = Plugins(
    "generation engine",
    {
        "huggingface": "rlinf_workers.engines.huggingface.spec:SPEC",
        "sglang": "rlinf_workers.engines.sglang.spec:SPEC",
        "vllm": "rlinf_workers.engines.vllm.spec:SPEC",
    },
    base="rlinf_workers.engines.spec:EngineSpec",
)
"""Generation engines, for the key `rollout.engine`."""
POLICIES: Plugins[PolicySpec] = Plugins(
    "policy",
    {
        "actor_critic": "rlinf_workers.policies.actor_critic.spec:SPEC",
        "cnn": "rlinf_workers.policies.cnn.spec:SPEC",
        "soft_actor": "rlinf_workers.policies.soft_actor.spec:SPEC",
        "soft_noise": "rlinf_workers.policies.soft_noise.spec:SPEC",
        "openvla": "rlinf_workers.policies.openvla.spec:SPEC",
        "openvla_oft": "rlinf_workers.policies.openvla_oft.spec:SPEC",
        "pi0": "rlinf_workers.policies.pi0.spec:SPEC",
        "pi05": "rlinf_workers.policies.pi05.spec:SPEC",
        "smolvla": "rlinf_workers.policies.smolvla.spec:SPEC",
    },
    base="rlinf_workers.policies.spec:PolicySpec",
)
"""Policies of robots, for the key `policy.name`."""
LAUNCHERS: Plugins[LauncherSpec] = Plugins(
    "launcher",
    {
        "local": "rlinf_workers.launchers.local.spec:SPEC",
        "ray": "rlinf_workers.launchers.ray.spec:SPEC",
    },
    base="rlinf_workers.launchers.spec:LauncherSpec",
)
"""Launchers of worker processes, for the key `cluster.launcher`."""
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
"""In the order in which `auto` tries the suitable ones."""
