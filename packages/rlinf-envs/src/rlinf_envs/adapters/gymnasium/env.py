"""Gymnasium environments, by registered id or from a custom callable.

Each row is one plain `gymnasium.make` environment. Gymnasium's vector environments are not used, because by default
they spend a step on every reset and choose the seeds of later episodes.

Spaces are mapped as follows. Observations: numbers of any kind become "state" (flattened, a Dict's entries in the order
of the space, Discrete ones one-hot), a Box that is an image by the rules of `gymnasium_pictures` becomes "image.<key>"
("image.main" if it is the whole observation), a Text becomes "instruction". Values are checked against the space.
Actions: Box is continuous; Discrete, MultiDiscrete and MultiBinary are discrete. Success is `info["success"]` or
`info["is_success"]`, if an environment sets one; numbers `info["reward_<name>"]` are components of the reward. An
environment with a method `expert_actions(num_actions)` has an expert (`rlinf_envs.SupportsExpert`).
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from rlinf_envs.adapters.gymnasium.reading import ObservationReader, action_spec, kind_of
from rlinf_envs.core.vector import InProcessVector, SingleObservation, SingleStep
from rlinf_envs.errors import EnvError, RenderingUnavailableError


def make_gymnasium(
    env_id: str,
    num_envs: int,
    *,
    max_episode_steps: int | None = None,
    ignore_terminations: bool = False,
    render: bool = False,
    picture_layout: str | None = None,
    **options: Any,
) -> InProcessVector:
    """Creates `num_envs` environments of a registered Gymnasium id (for example "CartPole-v1").

    `max_episode_steps=None` takes the registered limit; `render=True` enables `render()` (render_mode "rgb_array");
    `picture_layout` is one of `gymnasium_pictures.LAYOUTS`; every other option goes to `gymnasium.make`. EnvError for
    an unknown id (with close matches), options that the environment does not accept, and missing packages.
    """
    if render:
        options["render_mode"] = "rgb_array"
    limit = max_episode_steps if max_episode_steps is not None else registered_limit(env_id)

    def make() -> GymnasiumEnv:
        return GymnasiumEnv(_make(env_id, limit, options), picture_layout=picture_layout)

    return _vector(make, num_envs, limit, ignore_terminations)


def vector_of_callable(
    make: Callable[[], gymnasium.Env],
    num_envs: int,
    *,
    max_episode_steps: int | None = None,
    ignore_terminations: bool = False,
    picture_layout: str | None = None,
) -> InProcessVector:
    """Creates `num_envs` environments with a callable that returns one; the limit None is that environment's limit."""
    first = make()
    _require_env(first)
    limit = max_episode_steps
    if limit is None and first.spec is not None:
        limit = first.spec.max_episode_steps
    waiting = [first]  # creation may be slow: the first environment becomes row 0

    def next_env() -> GymnasiumEnv:
        return GymnasiumEnv(waiting.pop() if waiting else make(), picture_layout=picture_layout)

    return _vector(next_env, num_envs, limit, ignore_terminations)


def _vector(
    make: Callable[[], GymnasiumEnv], num_envs: int, limit: int | None, ignore_terminations: bool
) -> InProcessVector:
    return InProcessVector(
        make, num_envs, max_episode_steps=limit, ignore_terminations=ignore_terminations, ends_for_good=True
    )


COMPONENT = "reward_"
"""Prefix of the names in `info` under which Gymnasium's own environments report what a reward consists of."""


class GymnasiumEnv:
    """One Gymnasium environment as a `rlinf_envs.core.vector.SingleEnv`."""

    def __init__(self, env: gymnasium.Env, *, picture_layout: str | None = None) -> None:
        _require_env(env)
        self._env = env
        self._reader = ObservationReader(env.observation_space, picture_layout)
        self.observation_spec = self._reader.spec
        self.action_spec = action_spec(env.action_space)
        self._observation: Any = None
        if callable(expert := getattr(env.unwrapped, "expert_actions", None)):
            self.expert_actions = expert
            """As in `rlinf_envs.core.vector.SingleExpert`, if the environment has it."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Deviations of its first observation from the declared space."""
        return self._reader.notes

    @property
    def own_limit(self) -> int | None:
        """The environment's time limit in actions, if its spec has one."""
        return None if self._env.spec is None else self._env.spec.max_episode_steps

    def reset(self, seed: int) -> None:
        returned = self._env.reset(seed=seed)
        if not (isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], dict)):
            raise EnvError(
                f"reset() returned {kind_of(returned)}; allowed: observation, info (a dict). An observation alone is "
                "the old Gym's interface; Gymnasium's reset ends with `return observation, {}`"
            )
        self._observation, _ = returned

    def step(self, action: np.ndarray) -> SingleStep:
        returned = self._env.step(self._native(action))
        if not isinstance(returned, tuple) or len(returned) != 5 or not isinstance(returned[4], dict):
            raise EnvError(
                f"step() returned {kind_of(returned)}; allowed: observation, reward, terminated, truncated, info (a "
                "dict). Four values are the old Gym's interface, whose `done` Gymnasium divides into terminated (the "
                "task ended) and truncated (a time limit)"
            )
        self._observation, reward, terminated, truncated, outcome = returned
        success = outcome.get("success", outcome.get("is_success"))
        return SingleStep(
            reward=float(_scalar(reward, "reward")),
            terminated=bool(_scalar(terminated, "terminated")),
            truncated=bool(_scalar(truncated, "truncated")),
            success=None if success is None else bool(_scalar(success, "info['success']")),
            reward_components={
                name.removeprefix(COMPONENT): float(value)
                for name, value in outcome.items()
                if isinstance(name, str) and name.startswith(COMPONENT) and isinstance(value, (int, float, np.number))
            },
        )

    def observe(self) -> SingleObservation:
        return self._reader.read(self._observation)

    def render(self) -> np.ndarray:
        if self._env.render_mode != "rgb_array":
            raise RenderingUnavailableError(
                f"this environment was made with render_mode={self._env.render_mode!r}; pass the option render=True"
            )
        picture = self._env.render()
        if not isinstance(picture, np.ndarray) or picture.dtype != np.uint8 or picture.shape[2:] != (3,):
            kind = f"{picture.dtype} {list(picture.shape)}" if isinstance(picture, np.ndarray) else kind_of(picture)
            raise RenderingUnavailableError(f"its render() gave {kind}; a picture is uint8 [H, W, 3]")
        return picture

    def close(self) -> None:
        self._env.close()

    def _native(self, action: np.ndarray) -> Any:
        space = self._env.action_space
        return int(action) if isinstance(space, spaces.Discrete) else action.astype(space.dtype)


def _require_env(env: object) -> None:
    if not isinstance(env, gymnasium.Env):
        is_old = any(parent.__module__.split(".")[0] == "gym" for parent in type(env).__mro__)
        hint = "; it is one of the old Gym, which Gymnasium has replaced: import gymnasium as gym" if is_old else ""
        raise EnvError(f"a gymnasium.Env was expected, got {type(env).__name__}{hint}")
    if lacking := [name for name in ("observation_space", "action_space") if not hasattr(env, name)]:
        raise EnvError(
            f"{type(env).__name__} has no {' and no '.join(lacking)}; set it in the class or its constructor"
        )
    if not _takes_seed(env.reset):
        raise EnvError(
            f"{type(env).__name__}.reset() takes no seed, as in the old Gym; Gymnasium's is "
            "def reset(self, *, seed=None, options=None), which begins with super().reset(seed=seed)"
        )


def _takes_seed(reset: Callable[..., object]) -> bool:
    parameters = inspect.signature(reset).parameters
    return "seed" in parameters or any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())


def _scalar(value: Any, name: str) -> bool | int | float:
    """Converts the value that an environment returned as `name`. Raises: EnvError unless it is one number or
    boolean."""
    if isinstance(value, (bool, int, float)):
        return value
    array = np.asarray(value)
    if array.size != 1 or array.dtype.kind not in "biuf":
        kind = f"an array of shape {list(array.shape)}" if array.ndim else type(value).__name__
        raise EnvError(f"step() returned {name} as {kind}; allowed: one number, or True or False")
    return array.item()


def registered_limit(env_id: str) -> int | None:
    """Returns the registered time limit of an id. Raises: EnvError for an unknown id, with close matches."""
    try:
        return gymnasium.spec(env_id).max_episode_steps
    except (gymnasium.error.UnregisteredEnv, gymnasium.error.Error, ImportError) as error:
        env_ids = list(gymnasium.registry)
        close = difflib.get_close_matches(env_id, env_ids, n=4, cutoff=0.5)
        hint = f"did you mean {', '.join(close)}?" if close else "see gymnasium.pprint_registry()"
        raise EnvError(f"Gymnasium has no environment {env_id!r} ({error}); {hint}") from error


def _make(env_id: str, limit: int | None, options: Mapping[str, Any]) -> gymnasium.Env:
    try:
        return gymnasium.make(env_id, max_episode_steps=limit, disable_env_checker=True, **options)
    except gymnasium.error.DependencyNotInstalled as error:
        raise EnvError(f"{env_id} needs a package that is not installed: {error}") from error
    except (TypeError, gymnasium.error.Error) as error:
        raise EnvError(f"{env_id} could not be made with {dict(options)}: {error}") from error
