"""Plug-ins: what a recipe may name, and where it is.

A plug-in that ships is a folder with a `spec.py` beside its run time, and one line here. The spec answers what the rest
of the system asks about it before any process starts, and says where its class is; neither this table nor a spec
imports torch. A custom plug-in is named by its import path, `package.module:NAME`, and needs no line: the path leads to
a spec, or to a class, whose attribute `spec` is one. A class without it has the spec's defaults.
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
    """An option that is not there, or whose value cannot be.

    Args:
        text: what follows the option's name in a message: "=3 does not divide ...".
    """

    def __init__(self, option: str, text: str) -> None:
        super().__init__(f"{option}{text}")
        self.option, self.text = option, text


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What is known of a plug-in without importing it. A kind of plug-in adds methods with defaults; a plug-in
    overrides those that it answers differently."""

    name: str = ""
    """What recipes call it; a class that brings its own spec may leave it out, and the next one too."""
    implementation: Any = None
    """Import path of its class, "package.module:Class"; or the class itself."""
    options: type | None = None
    """Dataclass of its options, whose field docstrings are the help of the keys; it raises OptionError for values that
    do not go together. None: what the constructor of its class takes."""

    @property
    def module(self) -> str:
        """The module that its class is in."""
        if self.implementation is None or isinstance(self.implementation, str):
            return (self.implementation or self.name).partition(":")[0]
        return self.implementation.__module__

    def load(self) -> Any:
        """The class, or the function that makes one."""
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
                choices = get_args(get_type_hints(self.options)[option])
                reason = f"allowed: {', '.join(map(repr, choices))}"
            raise OptionError(option, f"={options.get(option)!r}: {reason[0].lower()}{reason[1:]}") from None

    def problems(self, options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """What is wrong with a recipe's options: (option, the text that follows its name)."""
        if self.options is None:
            return
        try:
            self.read(options)
        except OptionError as error:
            yield error.option, error.text


def imported(path: str) -> Any:
    """What an import path of ours leads to."""
    module, _, attribute = path.partition(":")
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

    @property
    def default(self) -> str:
        """The name of a recipe that names none: the first of the table."""
        return next(iter(self._builtin))

    def spec(self, name: str) -> S:
        """The spec of a name or an import path.

        Raises:
            AlgosError: as `get`.
        """
        base = self._base_class()
        plugin = super().get(name, callable_only=False)
        if isinstance(plugin, base):
            return plugin
        own = getattr(plugin, "spec", None)
        return replace(own if isinstance(own, base) else base(), name=name, implementation=plugin)

    def spec_if_there(self, name: str) -> S:
        """As `spec`; that with the defaults for a name that leads nowhere, which others report."""
        try:
            return self.spec(name)
        except AlgosError:
            if name in self.names():
                raise
            return self._base_class()(name=name)

    def _base_class(self) -> type[S]:
        return imported(self._base)

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


TRAINERS: Plugins[TrainerSpec] = Plugins(
    "training backend",
    {
        "replicated": "rlinf_workers.trainers.replicated.spec:SPEC",
        "fsdp2": "rlinf_workers.trainers.fsdp2.spec:SPEC",
        "megatron": "rlinf_workers.trainers.megatron.spec:SPEC",
    },
    base="rlinf_workers.trainers.spec:TrainerSpec",
)
ENGINES: Plugins[EngineSpec] = Plugins(
    "generation engine",
    {
        "huggingface": "rlinf_workers.engines.huggingface.spec:SPEC",
        "sglang": "rlinf_workers.engines.sglang.spec:SPEC",
    },
    base="rlinf_workers.engines.spec:EngineSpec",
)
POLICIES: Plugins[PolicySpec] = Plugins(
    "policy",
    {
        "actor_critic": "rlinf_workers.policies.actor_critic.spec:SPEC",
        "cnn": "rlinf_workers.policies.cnn.spec:SPEC",
        "openvla": "rlinf_workers.policies.openvla.spec:SPEC",
        "openvla_oft": "rlinf_workers.policies.openvla_oft.spec:SPEC",
        "pi0": "rlinf_workers.policies.pi0.spec:SPEC",
        "pi05": "rlinf_workers.policies.pi05.spec:SPEC",
    },
    base="rlinf_workers.policies.spec:PolicySpec",
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
