"""Environments and the policy that acts in them, as training and whoever plays a checkpoint have them."""

from __future__ import annotations

from rlinf.config.common import ClusterConfig
from rlinf.config.devices import device_kind
from rlinf.config.embodied import EnvConfig, PolicyConfig
from rlinf.machine import Machine
from rlinf_envs import EnvSpec
from rlinf_workers.policies import PolicySettings
from rlinf_workers.roles import EnvInterface


def env_spec(env: EnvConfig) -> EnvSpec:
    """The environments of a group."""
    return EnvSpec(
        kind=env.kind,
        id=env.id,
        num_envs=env.num_envs // env.num_groups,
        max_episode_steps=env.max_episode_steps,
        ignore_terminations=env.ignore_terminations,
        num_processes=env.num_processes,
        hang_limit_s=env.hang_limit_s,
        options=env.options,
    )


def termination_notes(env: EnvConfig) -> tuple[str, ...]:
    """What the manifest says where episodes go on after an end that Gymnasium's interface calls final."""
    keys = [f"env.{key}" for key in ("ignore_terminations", "eval_ignore_terminations") if getattr(env, key)]
    if env.spec.steps_after_end or not keys:
        return ()
    return (
        f"{' and '.join(keys)}: episodes of {env.id} go on after terminated=True. Gymnasium leaves undefined what an "
        "environment does then, so returns and lengths may mean nothing; this is for simulators that go on after "
        "success",
    )


def limit_notes(env: EnvConfig, interface: EnvInterface) -> tuple[str, ...]:
    """What the manifest says where episodes are cut earlier than whoever knows the environment expects."""
    limit = interface.registered_limit
    if limit is None or env.max_episode_steps >= limit:
        return ()
    return (
        f"env.max_episode_steps={env.max_episode_steps} cuts episodes of {env.id}, whose own limit is {limit} actions: "
        f"returns are those of shorter episodes; --env.max_episode_steps {limit} has its own",
    )


def simulates_on_host(env: EnvConfig, cluster: ClusterConfig, machine: Machine) -> bool:
    """Whether simulators take cores of a host beside GPUs; else they take devices, as all else does."""
    return device_kind(cluster, machine) == "cuda" and not env.simulates_on_gpu


def policy_settings(policy: PolicyConfig, interface: EnvInterface, seed: int) -> PolicySettings:
    """The policy for environments that show and take what `interface` says."""
    return PolicySettings(
        name=policy.name, fields=interface.fields, actions=interface.actions, options=policy.arguments, seed=seed
    )
