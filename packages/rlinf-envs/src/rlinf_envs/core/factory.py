"""Creates environments from their descriptions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from rlinf_envs.core.env_spec import EnvSpec
from rlinf_envs.core.kind_spec import loaded
from rlinf_envs.core.picture_memory import PictureMemory
from rlinf_envs.core.protocol import BatchedEnv
from rlinf_envs.core.vector import InProcessVector, observes_rows
from rlinf_envs.errors import EnvError
from rlinf_envs.kinds import kind_spec


def make_env(
    spec: EnvSpec, *, on_replaced: Callable[[str], None] | None = None, pictures: PictureMemory | None = None
) -> BatchedEnv:
    """Creates the environment that `spec` describes. Raises EnvError with the allowed values for a wrong description.

    `on_replaced` is called with a sentence for every subprocess that was lost and replaced. `pictures` is memory that
    images are written into while it has space, except those of disturbed environments and of custom `BatchedEnv`s in
    this process, which return their own tensors.
    """
    if spec.disturbance is not None:
        from rlinf_envs.core.disturbed import DisturbedEnv

        plain = replace(spec, disturbance=None)
        return DisturbedEnv(make_env(plain, on_replaced=on_replaced), spec.disturbance)
    kind = kind_spec(spec.kind)  # raises for an unknown kind
    if spec.success_classifier is not None and kind.simulator is not None:
        raise _not_classified(spec)
    if not 0 <= spec.num_processes <= spec.num_envs:
        raise EnvError(
            f"EnvSpec.num_processes={spec.num_processes} with num_envs={spec.num_envs}; "
            f"allowed: 0..num_envs, as every process holds at least one environment"
        )
    if spec.hang_limit_s is not None and spec.hang_limit_s <= 0:
        raise EnvError(f"EnvSpec.hang_limit_s={spec.hang_limit_s}; it must be more than 0 seconds, or None")
    if spec.num_processes > 0 or kind.simulator is not None:
        from rlinf_envs.core.simulator_process import SimulatorProcess
        from rlinf_envs.core.subprocess_env import SubprocessVector

        simulator = loaded(kind.simulator) or SimulatorProcess
        return SubprocessVector(spec, on_replaced=on_replaced, pictures=pictures, simulator=simulator)
    env = make_in_process(spec)
    if pictures is not None and isinstance(env, InProcessVector):
        fields = env.observation_spec
        env.show_in(lambda _, name: pictures.empty((spec.num_envs, *fields[name].shape)))
    return env


def make_in_process(spec: EnvSpec) -> BatchedEnv:
    """Creates the environment in this process and ignores `spec.num_processes`."""
    options: dict[str, Any] = dict(spec.options)
    reserved = {"max_episode_steps", "ignore_terminations", "num_envs"} & set(options)
    if reserved:
        raise EnvError(f"EnvSpec.options holds {', '.join(sorted(reserved))}; set the field of EnvSpec instead")
    env = kind_spec(spec.kind, spec.id).load()(
        spec.id,
        spec.num_envs,
        max_episode_steps=spec.max_episode_steps,
        ignore_terminations=spec.ignore_terminations,
        **options,
    )
    if (classifier := spec.success_classifier) is not None:
        if not observes_rows(env):
            env.close()
            raise _not_classified(spec)
        env.reward_by(loaded(classifier.loader)(classifier.file, classifier.digest))
    return env


def _not_classified(spec: EnvSpec) -> EnvError:
    return EnvError(
        f"a success classifier looks at each row after every action, and the environments of kind {spec.kind} step all "
        "rows at once or elsewhere"
    )
