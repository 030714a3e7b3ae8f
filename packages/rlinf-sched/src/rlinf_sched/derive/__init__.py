"""Profiles from public shapes: a model's config.json, a GPU's datasheet, a simulator's published rate.

Every constant names its source; none is fitted to a result of a system like this one. Derived profiles answer "which
plan, and why" before anything runs; measured ones replace them where they exist.

Example: GRPO on a model of one's own, 16 A100s:
    from rlinf_sched.derive import grpo
    problem = grpo(model="models/mine", gpu="A100", num_devices=16, num_prompts=128, sequence_tokens=8192)

A name is imported when it is first asked for, so that shapes can be read without numpy.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlinf_sched.derive.datasheets import GPUS, Gpu, find_gpu, gpu_cluster
    from rlinf_sched.derive.generation import act_profile, generate_profile
    from rlinf_sched.derive.lengths import Lengths
    from rlinf_sched.derive.profiles import Embodied, Reasoning, derive_profiles, host_profile
    from rlinf_sched.derive.shapes import MODELS, ModelShape, find_model, resolve_model
    from rlinf_sched.derive.simulators import (
        LIBERO,
        MANISKILL_PUT_ON_PLATE,
        SIMULATORS,
        CpuSimulator,
        GpuSimulator,
        cpu_simulator_profile,
        gpu_simulator_profile,
    )
    from rlinf_sched.derive.training import forward_profile, train_profile
    from rlinf_sched.derive.workloads import WORKLOADS, embodied, grpo, ppo, workload

__all__ = [
    "ModelShape",
    "MODELS",
    "find_model",
    "resolve_model",
    "Gpu",
    "GPUS",
    "find_gpu",
    "gpu_cluster",
    "Lengths",
    "train_profile",
    "forward_profile",
    "generate_profile",
    "act_profile",
    "GpuSimulator",
    "CpuSimulator",
    "MANISKILL_PUT_ON_PLATE",
    "LIBERO",
    "SIMULATORS",
    "gpu_simulator_profile",
    "cpu_simulator_profile",
    "Reasoning",
    "Embodied",
    "derive_profiles",
    "host_profile",
    "grpo",
    "ppo",
    "embodied",
    "WORKLOADS",
    "workload",
]

_MODULES = {
    "datasheets": (
        "GPUS",
        "Gpu",
        "find_gpu",
        "gpu_cluster",
    ),
    "generation": (
        "act_profile",
        "generate_profile",
    ),
    "lengths": ("Lengths",),
    "profiles": (
        "Embodied",
        "Reasoning",
        "derive_profiles",
        "host_profile",
    ),
    "shapes": (
        "MODELS",
        "ModelShape",
        "find_model",
        "resolve_model",
    ),
    "simulators": (
        "LIBERO",
        "MANISKILL_PUT_ON_PLATE",
        "SIMULATORS",
        "CpuSimulator",
        "GpuSimulator",
        "cpu_simulator_profile",
        "gpu_simulator_profile",
    ),
    "training": (
        "forward_profile",
        "train_profile",
    ),
    "workloads": (
        "WORKLOADS",
        "embodied",
        "grpo",
        "ppo",
        "workload",
    ),
}
_PLACES = {name: f"{__name__}.{module}" for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PLACES[name]), name)
