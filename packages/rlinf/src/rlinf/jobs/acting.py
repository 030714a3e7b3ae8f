"""Environments and the policy that acts in them, as training and whoever plays a checkpoint have them."""

from __future__ import annotations

from rlinf.config.common import ClusterConfig
from rlinf.config.devices import device_kind
from rlinf.config.embodied import AUTO, EnvConfig, PolicyConfig
from rlinf.errors import UserError
from rlinf.machine import Machine
from rlinf_algos import Algorithm, DaggerAlgorithm, OffPolicyAlgorithm
from rlinf_envs import PICTURE, EnvSpec
from rlinf_workers.plugins import POLICIES
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


def picture_notes(env: EnvConfig, policy: PolicyConfig) -> tuple[str, ...]:
    """What the manifest says where a checkpoint sees pictures that are drawn in another way than its demonstrations."""
    expected = {k: v for k, v in env.spec.published_pictures.items() if env.options.get(k) != v}
    if not (expected and env.options.get("cameras") and policy.options.get("folder")):
        return ()
    settings = " ".join(f"--env.options.{key} {value}" for key, value in expected.items())
    return (
        f"policy.options.folder: published checkpoints for env.kind={env.kind} were trained on pictures with "
        f"{settings}, and this run draws others, which may cost success",
    )


def simulates_on_host(env: EnvConfig, cluster: ClusterConfig, machine: Machine) -> bool:
    """Whether simulators take cores of a host beside GPUs; else they take devices, as all else does."""
    return device_kind(cluster, machine) == "cuda" and not env.simulates_on_gpu


def chosen_policy(
    policy: PolicyConfig,
    interface: EnvInterface,
    env_id: str,
    *,
    algorithm: Algorithm | OffPolicyAlgorithm | DaggerAlgorithm | None = None,
) -> tuple[PolicyConfig, tuple[str, ...]]:
    """Replaces `policy.name=auto`: by soft_actor for an off-policy algorithm, else by cnn if the environment shows
    pictures, else by actor_critic.

    The cnn also reads the state if the environment shows one, unless `policy.options.reads_state` is set.

    Returns: the policy, and a note that names it.
    Raises: UserError if a key of the section belongs to another policy.
    """
    if policy.name != AUTO:
        return policy, ()
    default, field_names = POLICIES.default, ", ".join(sorted(interface.fields))
    has_pictures = any(name.startswith(PICTURE) for name in interface.fields)
    name, reason = "cnn" if has_pictures else default, f"env.id={env_id!r} shows {field_names}"
    if isinstance(algorithm, OffPolicyAlgorithm):
        name, reason = "soft_actor", f"algorithm.name={algorithm.name} learns off-policy"
    keys = {key: getattr(policy, key) for key in POLICIES.spec(default).recipe_keys}
    keys = {key: value for key, value in keys.items() if value is not None}
    misplaced = ["options"] if name == default and policy.options else list(keys) if name != default else []
    if misplaced:
        other = "cnn" if name == default else default
        raise UserError(
            f"policy.{misplaced[0]} is for policy.name={other}; policy.name=auto chooses {name}, because {reason}",
            hint=f"leave the key out, or use --policy.name {other}",
        )
    options = dict(policy.options)
    if name == "cnn" and "state" in interface.fields:
        options.setdefault("reads_state", True)
    return PolicyConfig(name=name, options=options, **keys), (f"policy.name=auto: {name}, because {reason}",)


def policy_settings(policy: PolicyConfig, interface: EnvInterface, seed: int) -> PolicySettings:
    """The policy for environments that show and take what `interface` says."""
    return PolicySettings(
        name=policy.name, fields=interface.fields, actions=interface.actions, options=policy.arguments, seed=seed
    )
