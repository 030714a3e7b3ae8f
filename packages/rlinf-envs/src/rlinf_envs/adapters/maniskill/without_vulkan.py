"""ManiSkill's physics on a machine without any Vulkan driver.

SAPIEN, which ManiSkill runs on, makes a render material for everything it loads, even when nothing will ever be drawn;
without a Vulkan device that fails, and with it the whole environment. `disable_visuals` replaces what only drawing
needs (materials, textures, the visual shapes of actors and links) by things that do nothing. Collision shapes, masses
and joints come from elsewhere and stay as they are: trajectories are those of an unchanged SAPIEN.

The change is to the modules of this process and cannot be undone in it; there is nothing it could break, as drawing is
impossible there anyway. Tasks that read their visual shapes back (PushT) still fail.
"""

from __future__ import annotations

import sys
from typing import Any

from rlinf_envs.errors import RenderingUnavailableError

NOTE = (
    "no Vulkan driver on this machine: ManiSkill runs without visuals (states only); the physics is unchanged "
    "(rlinf_envs.adapters.maniskill.without_vulkan)"
)

DRIVER_HINT = (
    "install a Vulkan driver: an NVIDIA driver with its Vulkan library, or Mesa's software driver lavapipe, version 23 "
    "or newer (Debian 13, Ubuntu 24.04: mesa-vulkan-drivers libvulkan1; Debian 12: the same from bookworm-backports, "
    "as its own 22.3 lacks descriptorBindingPartiallyBound)"
)


def has_vulkan_device() -> bool:
    """Whether SAPIEN finds anything to draw with. Costs some milliseconds, once a process."""
    import sapien.render

    if sapien.render.RenderMaterial is _NothingToDraw:
        return False
    try:
        sapien.render.RenderMaterial()
    except RuntimeError:  # "failed to find a rendering device", "ErrorIncompatibleDriver", ...: all mean there is none
        return False
    return True


def vulkan_devices() -> tuple[str, ...]:
    """The devices that SAPIEN can draw with, as their drivers call them; a software driver's is `llvmpipe (...)`."""
    import sapien.render

    if not has_vulkan_device():
        return ()
    lines = sapien.render.get_device_summary().splitlines()
    return tuple(line.partition(":")[2].strip() for line in lines if line.startswith("GPU:"))


class _NothingToDraw:
    """Stands in for SAPIEN's RenderMaterial and RenderTexture2D: takes any attribute and any call, does nothing."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.__dict__.update(kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copy and pickle ask for these to learn that they are not there
            raise AttributeError(name)
        return lambda *args, **kwargs: None


def _add_no_visual(builder: Any, *args: object, **kwargs: object) -> Any:
    return builder


def disable_visuals() -> None:
    """Make SAPIEN build scenes without visuals in this process. May be called again."""
    import sapien.render
    from sapien.wrapper.actor_builder import ActorBuilder

    stand_in = {sapien.render.RenderMaterial, sapien.render.RenderTexture2D} - {_NothingToDraw}
    # Some of ManiSkill's modules import these classes by name, so each module that holds one has to be told.
    for module in [m for name, m in sys.modules.items() if name.split(".")[0] in ("sapien", "mani_skill")]:
        for name in ("RenderMaterial", "RenderTexture2D"):
            if getattr(module, name, None) in stand_in:
                setattr(module, name, _NothingToDraw)
    for name in dir(ActorBuilder):
        if name.startswith("add_") and "visual" in name:
            setattr(ActorBuilder, name, _add_no_visual)


def require_vulkan_device(wanted_by: str) -> None:
    """RenderingUnavailableError that says what to install if nothing can draw here; `wanted_by` is who asks."""
    if not has_vulkan_device():
        raise RenderingUnavailableError(f"{wanted_by} needs a Vulkan device and none was found; {DRIVER_HINT}")
