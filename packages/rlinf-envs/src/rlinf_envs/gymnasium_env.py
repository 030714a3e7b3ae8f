"""Gymnasium environments, by registered id or from a callable of one's own.

Each row is one plain `gymnasium.make` environment. Gymnasium's own vector environments are not used: by default they
spend a step on every reset and choose the seeds of later episodes themselves.

Spaces are read as follows. Observations: numbers of any kind become "state" (flattened, a Dict's entries in the order
of the space, Discrete ones one-hot), a uint8 Box of three dimensions becomes "image.<key>" ("image.main" if it is the
whole observation), a Text becomes "instruction". Actions: Box is continuous; Discrete, MultiDiscrete and MultiBinary
are discrete. `info["success"]` or `info["is_success"]`, where an environment sets one, is its success.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

from rlinf_envs.errors import EnvError, RenderingUnavailableError
from rlinf_envs.protocol import ActionSpec, FieldSpec
from rlinf_envs.vector import InProcessVector, SingleObservation, SingleStep

TOP = "main"
"""Key of an image that is the whole observation."""


def make_gymnasium(
    env_id: str,
    num_envs: int,
    *,
    max_episode_steps: int | None = None,
    ignore_terminations: bool = False,
    render: bool = False,
    **options: Any,
) -> InProcessVector:
    """`num_envs` environments of a registered Gymnasium id (for example "CartPole-v1").

    `max_episode_steps=None` takes the registered limit; `render=True` makes `render()` work (render_mode "rgb_array");
    every other option goes to `gymnasium.make`. EnvError for an unknown id (with close matches), for what the
    environment does not accept and for packages it misses.
    """
    if render:
        options["render_mode"] = "rgb_array"
    limit = max_episode_steps if max_episode_steps is not None else _registered_limit(env_id)

    def make() -> GymnasiumEnv:
        return GymnasiumEnv(_made(env_id, limit, options))

    return _vector(make, num_envs, limit, ignore_terminations)


def vector_of_callable(
    make: Callable[[], gymnasium.Env],
    num_envs: int,
    *,
    max_episode_steps: int | None = None,
    ignore_terminations: bool = False,
) -> InProcessVector:
    """`num_envs` environments from a callable that makes one; the limit None is the one of the made environment."""
    first = make()
    _require_env(first)
    limit = max_episode_steps
    if limit is None and first.spec is not None:
        limit = first.spec.max_episode_steps
    waiting = [first]  # making one may be slow: the one already made becomes row 0

    def next_env() -> GymnasiumEnv:
        return GymnasiumEnv(waiting.pop() if waiting else make())

    return _vector(next_env, num_envs, limit, ignore_terminations)


def _vector(
    make: Callable[[], GymnasiumEnv], num_envs: int, limit: int | None, ignore_terminations: bool
) -> InProcessVector:
    return InProcessVector(
        make, num_envs, max_episode_steps=limit, ignore_terminations=ignore_terminations, ends_for_good=True
    )


class GymnasiumEnv:
    """One Gymnasium environment as a `rlinf_envs.vector.SingleEnv`."""

    notes: tuple[str, ...] = ()

    def __init__(self, env: gymnasium.Env) -> None:
        _require_env(env)
        self._env = env
        self._leaves = tuple(_leaves(env.observation_space, ()))
        self.observation_spec = _observation_spec(self._leaves)
        self.action_spec = _action_spec(env.action_space)
        self._observation: Any = None

    def reset(self, seed: int) -> None:
        self._observation, _ = self._env.reset(seed=seed)

    def step(self, action: np.ndarray) -> SingleStep:
        returned = self._env.step(self._native(action))
        if not isinstance(returned, tuple) or len(returned) != 5:
            kind = f"{len(returned)} values" if isinstance(returned, tuple) else type(returned).__name__
            raise EnvError(f"step() returned {kind}; allowed: observation, reward, terminated, truncated, info")
        self._observation, reward, terminated, truncated, outcome = returned
        success = outcome.get("success", outcome.get("is_success"))
        return SingleStep(
            reward=float(reward),
            terminated=bool(terminated),
            truncated=bool(truncated),
            success=None if success is None else bool(success),
        )

    def observe(self) -> SingleObservation:
        row: dict[str, np.ndarray | str] = {}
        numbers: list[np.ndarray] = []
        for path, space, field in self._leaves:
            value = self._observation
            for key in path:
                value = value[key]
            if field == "instruction":
                row[field] = str(value)
            elif field == "state":
                numbers.append(np.asarray(spaces.flatten(space, value), dtype=np.float32).reshape(-1))
            else:
                row[field] = np.asarray(value, dtype=np.uint8)
        if numbers:
            row["state"] = np.concatenate(numbers)
        return row

    def render(self) -> np.ndarray:
        if self._env.render_mode != "rgb_array":
            raise RenderingUnavailableError(
                f"this environment was made with render_mode={self._env.render_mode!r}; pass the option render=True"
            )
        picture = self._env.render()
        if not isinstance(picture, np.ndarray):
            raise RenderingUnavailableError(f"its render() gave {type(picture).__name__}, not a picture")
        return picture

    def close(self) -> None:
        self._env.close()

    def _native(self, action: np.ndarray) -> Any:
        space = self._env.action_space
        return int(action) if isinstance(space, spaces.Discrete) else action.astype(space.dtype)


_Leaf = tuple[tuple[str, ...], spaces.Space, str]
"""A leaf's path in the observation, its space, and the field it belongs to."""


def _leaves(space: spaces.Space, path: tuple[str, ...]) -> Iterator[_Leaf]:
    if isinstance(space, spaces.Dict):
        for key, part in space.spaces.items():
            yield from _leaves(part, (*path, key))
    elif isinstance(space, spaces.Text):
        yield path, space, "instruction"
    elif isinstance(space, spaces.Box) and space.dtype == np.uint8 and len(space.shape) == 3:
        yield path, space, f"image.{'.'.join(path) or TOP}"
    elif isinstance(spaces.flatten_space(space), spaces.Box):
        yield path, space, "state"
    else:
        where = ".".join(path) or "the observation"
        raise EnvError(f"{where} has space {space}, of no fixed size; allowed: Box, Discrete, Text and Dicts of them")


def _observation_spec(leaves: tuple[_Leaf, ...]) -> Mapping[str, FieldSpec]:
    spec: dict[str, FieldSpec] = {}
    num_numbers = 0
    for path, space, field in leaves:
        if field == "state":
            (size,) = spaces.flatten_space(space).shape or (0,)
            num_numbers += size
        elif field in spec:
            raise EnvError(f"a second Text in the observation ({'.'.join(path)}); only one can be the instruction")
        elif field == "instruction":
            spec[field] = FieldSpec(shape=(), dtype="text")
        else:
            spec[field] = FieldSpec(shape=tuple(space.shape or ()), dtype="uint8")
    if num_numbers:
        spec["state"] = FieldSpec(shape=(num_numbers,), dtype="float32")
    return spec


def _action_spec(space: spaces.Space) -> ActionSpec:
    if isinstance(space, spaces.Box):
        low, high = space.low.astype(np.float32), space.high.astype(np.float32)
        return ActionSpec(kind="continuous", shape=space.shape, low=torch.from_numpy(low), high=torch.from_numpy(high))
    if isinstance(space, spaces.Discrete):
        first, last = np.asarray(space.start), np.asarray(space.start + space.n - 1)
    elif isinstance(space, spaces.MultiDiscrete):
        first, last = np.asarray(space.start), np.asarray(space.start + space.nvec - 1)
    elif isinstance(space, spaces.MultiBinary):
        first, last = np.zeros(space.shape), np.ones(space.shape)
    else:
        raise EnvError(f"the action space is {space}; allowed: Box, Discrete, MultiDiscrete, MultiBinary")
    low, high = torch.from_numpy(first.astype(np.int64)), torch.from_numpy(last.astype(np.int64))
    return ActionSpec(kind="discrete", shape=tuple(low.shape), low=low, high=high)


def _require_env(env: object) -> None:
    if not isinstance(env, gymnasium.Env):
        raise EnvError(f"a gymnasium.Env was expected, got {type(env).__name__}")


def _registered_limit(env_id: str) -> int | None:
    try:
        return gymnasium.spec(env_id).max_episode_steps
    except (gymnasium.error.UnregisteredEnv, gymnasium.error.Error, ImportError) as error:
        known = list(gymnasium.registry)
        close = difflib.get_close_matches(env_id, known, n=4, cutoff=0.5)
        hint = f"did you mean {', '.join(close)}?" if close else "see gymnasium.pprint_registry()"
        raise EnvError(f"Gymnasium has no environment {env_id!r} ({error}); {hint}") from error


def _made(env_id: str, limit: int | None, options: Mapping[str, Any]) -> gymnasium.Env:
    try:
        return gymnasium.make(env_id, max_episode_steps=limit, disable_env_checker=True, **options)
    except gymnasium.error.DependencyNotInstalled as error:
        raise EnvError(f"{env_id} needs a package that is not installed: {error}") from error
    except (TypeError, gymnasium.error.Error) as error:
        raise EnvError(f"{env_id} could not be made with {dict(options)}: {error}") from error
