"""ManiSkill's physics on a machine without any Vulkan driver.

SAPIEN, ManiSkill's engine, creates render materials for everything it loads, even if nothing is rendered; without a
Vulkan device that fails. `disable_visuals` replaces everything that only rendering needs (materials, textures, the
visual shapes of actors and links) by dummies. Collision shapes, masses and joints do not change, so trajectories are
those of an unchanged SAPIEN.

The change patches modules of this process permanently, which is harmless because rendering is impossible there anyway.
Tasks that read their visual shapes (PushT) still fail.
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
    """Returns whether SAPIEN finds a rendering device. Takes some milliseconds, once per process."""
    import sapien.render

    if sapien.render.RenderMaterial is _NothingToDraw:
        return False
    try:
        sapien.render.RenderMaterial()
    except RuntimeError:  # "failed to find a rendering device", "ErrorIncompatibleDriver", ...: all mean there is none
        return False
    return True


def vulkan_devices() -> tuple[str, ...]:
    """Returns the driver names of the devices that SAPIEN can render with; a software driver's is `llvmpipe (...)`."""
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
        if name.startswith("__"):  # copy and pickle expect these to be missing
            raise AttributeError(name)
        return lambda *args, **kwargs: None


def _add_no_visual(builder: Any, *args: object, **kwargs: object) -> Any:
    return builder


def disable_visuals() -> None:
    """Makes SAPIEN build scenes without visuals in this process. May be called again."""
    import sapien.render
    from sapien.wrapper.actor_builder import ActorBuilder

    stand_in = {sapien.render.RenderMaterial, sapien.render.RenderTexture2D} - {_NothingToDraw}
    # Some of ManiSkill's modules import these classes by name, so each such module has to be patched.
    for module in [m for name, m in sys.modules.items() if name.split(".")[0] in ("sapien", "mani_skill")]:
        for name in ("RenderMaterial", "RenderTexture2D"):
            if getattr(module, name, None) in stand_in:
                setattr(module, name, _NothingToDraw)
    for name in dir(ActorBuilder):
        if name.startswith("add_") and "visual" in name:
            setattr(ActorBuilder, name, _add_no_visual)


def require_vulkan_device(wanted_by: str) -> None:
    """Raises RenderingUnavailableError with installation hints if there is no rendering device; `wanted_by` names the
    option that needs it."""
    if not has_vulkan_device():
        raise RenderingUnavailableError(f"{wanted_by} needs a Vulkan device and none was found; {DRIVER_HINT}")
