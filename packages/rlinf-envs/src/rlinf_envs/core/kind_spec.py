"""KindSpec: what is known of a kind of environments before there is one.

A custom environment may bring one: as the attribute `kind_spec` of the callable that its id names, or as a kind of its
own, `kind: package.module:SPEC`. What it leaves out has the defaults here.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from rlinf_envs.venv import VenvSpec

IMPORTED = "rlinf_envs.adapters.imported.env:make_imported"


class MachineCheck(NamedTuple):
    """What a simulator can do on this machine, for `rlinf doctor`."""

    subject: str
    verdict: Literal["ok", "note", "problem"]
    text: str
    hint: str = ""


@dataclass(frozen=True, kw_only=True)
class KindSpec:
    """One kind of environments. Neither this nor a module of a spec imports torch or a simulator.

    Example of a custom kind, `env.kind: arms.spec:ARMS` and `env.id: lift`:
        ARMS = KindSpec(name="arms", make="arms.env:make_arms", picture_size=96, seconds_per_step=0.004)
    """

    name: str
    """What recipes call it."""
    make: Any = IMPORTED
    """Import path of a function `(id, num_envs, *, max_episode_steps, ignore_terminations, **options) -> BatchedEnv`,
    or the function itself. The default imports the callable that the id names."""
    steps_after_end: bool = False
    """Whether a step after the end of an episode has a meaning, so that `ignore_terminations` has, too."""
    expert: str = ""
    """Import path of a function `(EnvSpec, seed) -> Demonstration` that records its scripted expert; "": it has
    none."""
    demonstrations: Mapping[str, str] = field(default_factory=dict)
    """Layouts of files that show this kind of environment alone, `sft_warm_up.source`, each with the import path of its
    reader: `(path, rename, RunEnvironment) -> DemonstrationFiles`."""
    venv: VenvSpec | None = None
    """The venv that its packages can be installed in; None: they share the product's own."""
    picture_size: int = 128
    """Pixels of a side of its pictures where the option `image_size` is not given."""
    seconds_per_step: float | None = None
    """Of one environment on one core, pictures included; None: unknown. For planning."""

    def load(self) -> Any:
        """The function that makes environments."""
        return loaded(self.make)

    def of(self, env_id: str) -> KindSpec:
        """The spec of one environment of this kind."""
        return self

    def drawing_options(self, env_id: str) -> Mapping[str, Any]:
        """The options with which an environment draws (`render`); none: it does so without, or cannot. An imported one
        that takes a `render_mode` draws with that."""
        if self.make != IMPORTED:
            return {}
        from rlinf_envs.core.importing import object_at

        takes_mode = "render_mode" in inspect.signature(object_at(env_id)).parameters
        return {"render_mode": "rgb_array"} if takes_mode else {}

    def simulates_on_gpu(self, env_id: str, options: Mapping[str, Any]) -> bool:
        """Whether the simulator takes a GPU where there is one; others are work for the host's cores."""
        return False

    def picture_pixels(self, options: Mapping[str, Any]) -> int:
        """Pixels of one picture, as the simulator draws it."""
        size = options.get("image_size") or self.picture_size
        return size * size

    def published_simulator(self, env_id: str, options: Mapping[str, Any]) -> str:
        """The simulator in `rlinf_sched.derive.SIMULATORS` whose published times and memory are this one's, or nearest
        to it; "": there is none."""
        return ""

    def own_limit(self, env_id: str, env: Any) -> int | None:
        """Actions after which a registered environment cuts an episode by itself; None: unknown.

        Args:
            env: one that was made with another limit.
        """
        return getattr(env, "own_limit", None)

    def machine_check(self, version_of: Mapping[str, str]) -> MachineCheck | None:
        """What it can do on this machine; None: as any other program.

        Args:
            version_of: version of every installed distribution.
        """
        return None


def loaded(plugin: Any) -> Any:
    """What an import path of this package or of a spec leads to; anything else is returned as it is."""
    if not isinstance(plugin, str):
        return plugin
    module, _, attribute = plugin.partition(":")
    return getattr(importlib.import_module(module), attribute)
