"""The spec of ManiSkill, without importing it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlinf_envs.adapters.maniskill.tasks import SUITES
from rlinf_envs.core.kind_spec import KindSpec, MachineCheck
from rlinf_envs.venv import VenvSpec

CAMERA_PIXELS = {"3rd_view_camera": 640 * 480}
"""Pixels of cameras that are not 128 x 128: the camera of the bridge scenes."""


@dataclass(frozen=True, kw_only=True)
class ManiSkillSpec(KindSpec):
    def drawing_options(self, env_id: str) -> Mapping[str, Any]:
        return {"render": True}

    def simulates_on_gpu(self, env_id: str, options: Mapping[str, Any]) -> bool:
        """A suite of several tasks with `sim_backend: auto` runs on CPU cores, because one GPU simulation has one
        task."""
        backend = options.get("sim_backend")
        tasks = options.get("tasks") or SUITES.get(env_id, env_id)
        has_several_tasks = not isinstance(tasks, str) and len(tasks) > 1
        return backend == "gpu" or (backend == "auto" and not has_several_tasks)

    def picture_pixels(self, options: Mapping[str, Any]) -> int:
        cameras = options.get("cameras") or ()
        first = cameras if isinstance(cameras, str) else next(iter(cameras), "")
        default = super().picture_pixels(options)
        return default if options.get("image_size") else CAMERA_PIXELS.get(first, default)

    def published_simulator(self, env_id: str, options: Mapping[str, Any]) -> str:
        return "ManiSkill PutOnPlateInScene" if self.simulates_on_gpu(env_id, options) else ""

    def machine_check(self, version_of: Mapping[str, str]) -> MachineCheck:
        subject, version = "ManiSkill", version_of.get("mani-skill")
        if version is None:
            return MachineCheck(subject, "note", "not installed", "for pushcube-ppo: pip install 'rlinf[maniskill]'")
        from rlinf_envs.adapters.maniskill import without_vulkan

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # SAPIEN's warnings about the Vulkan libraries that are searched here
            can_draw = without_vulkan.has_vulkan_device()
            devices = without_vulkan.vulkan_devices()
        if can_draw:
            text = f"{version}, images and videos by Vulkan on {', '.join(devices) or 'a device'}"
            return MachineCheck(subject, "ok", text)
        text = f"{version}, without a Vulkan device: states only, no images"
        return MachineCheck(subject, "note", text, without_vulkan.DRIVER_HINT)


SPEC = ManiSkillSpec(
    name="maniskill",
    make="rlinf_envs.adapters.maniskill.env:make_maniskill",
    steps_after_end=True,
    published_pictures={"quality": "full"},
    demonstrations={"maniskill": "rlinf_envs.adapters.maniskill.demonstrations:ManiSkillDemonstrations"},
    packages=("mani-skill", "sapien"),
    venv=VenvSpec(
        name="maniskill",
        purpose="simulators of ManiSkill 3",
        folder=Path(__file__).parent,
        modules=("mani_skill",),
        packages=("torch", "mani-skill", "sapien"),
    ),
)
