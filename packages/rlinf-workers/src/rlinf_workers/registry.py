"""The doors: what a recipe may name, and where it is.

A name of the tables below is an import path until somebody asks for it, so that a config can be checked without torch.
Whatever is not in them is named by its own import path, `package.module:Class`, and needs no line here.
"""

from __future__ import annotations

from typing import Any

from rlinf_algos.registry import Registry

BACKENDS: Registry[Any] = Registry(
    "training backend",
    {
        "replicated": "rlinf_workers.training.replicated.backend:ReplicatedBackend",
        "fsdp2": "rlinf_workers.training.fsdp2.backend:fsdp2",
        "megatron": "rlinf_workers.training.megatron.door:megatron",
    },
)
BACKEND_CHECKS: Registry[Any] = Registry(
    "check of a training backend", {"megatron": "rlinf_workers.training.megatron.door:check"}
)
"""What looks at a recipe's options, beside the constructor's signature, before any process starts: called with them and
the model's config.json. Not every backend has one."""
ENGINES: Registry[Any] = Registry(
    "generation engine",
    {
        "huggingface": "rlinf_workers.generation.huggingface:HuggingFaceEngine",
        "sglang": "rlinf_workers.generation.sglang.engine:SGLangEngine",
    },
)
POLICIES: Registry[Any] = Registry(
    "policy",
    {
        "actor_critic": "rlinf_workers.policies.actor_critic:ActorCritic",
        "cnn": "rlinf_workers.policies.cnn:CnnActorCritic",
        "openvla": "rlinf_workers.policies.openvla.policy:OpenVLA",
        "openvla_oft": "rlinf_workers.policies.openvla_oft.policy:OpenVLAOFT",
        "pi0": "rlinf_workers.policies.pi0.policy:Pi0",
        "pi05": "rlinf_workers.policies.pi05.policy:Pi05",
    },
)
LAUNCHERS: Registry[Any] = Registry(
    "launcher",
    {
        "local": "rlinf_workers.launcher.local:LocalLauncher",
        "ray": "rlinf_workers.launcher.ray:RayLauncher",
    },
)
WEIGHT_LINKS: Registry[Any] = Registry(
    "weight link",
    {
        "device": "rlinf_workers.links.device:DeviceWeightLink",
        "per_node": "rlinf_workers.links.per_node:PerNodeWeightLink",
        "shared": "rlinf_workers.links.shared:SharedWeightLink",
        "streams": "rlinf_workers.links.streams:StreamsWeightLink",
    },
)
