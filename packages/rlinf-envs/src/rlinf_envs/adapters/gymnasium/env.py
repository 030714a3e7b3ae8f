"""Gymnasium environments, by registered id or from a custom callable.

Each row is one plain `gymnasium.make` environment. Gymnasium's vector environments are not used, because by default
they spend a step on every reset and choose the seeds of later episodes.

Spaces are mapped as follows. Observations: numbers of any kind become "state" (flattened, a Dict's entries in the order
of the space, Discrete ones one-hot), a Box that is an image by the rules of `gymnasium_pictures` becomes "image.<key>"
("image.main" if it is the whole observation), a Text becomes "instruction". Values are checked against the space.
Actions: Box is continuous; Discrete, MultiDiscrete and MultiBinary are discrete. Success is `info["success"]` or
`info["is_success"]`, if an environment sets one.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

from rlinf_envs.adapters.gymnasium.pictures import LAYOUTS, Picture, picture_of
from rlinf_envs.core.protocol import PICTURE, ActionSpec, FieldSpec
from rlinf_envs.core.vector import InProcessVector, SingleObservation, SingleStep
from rlinf_envs.errors import EnvError, RenderingUnavailableError

TOP = "main"
"""Key of an image that is the whole observation."""


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


class GymnasiumEnv:
    """One Gymnasium environment as a `rlinf_envs.core.vector.SingleEnv`."""

    notes: tuple[str, ...]
    """Deviations of its first observation from the declared space."""

    def __init__(self, env: gymnasium.Env, *, picture_layout: str | None = None) -> None:
        _require_env(env)
        if picture_layout not in (None, *LAYOUTS):
            raise EnvError(f"options.picture_layout={picture_layout!r}; allowed: {', '.join(LAYOUTS)}")
        self._env = env
        self._leaves = tuple(_leaves(env.observation_space, (), picture_layout))
        self.observation_spec = _observation_spec(self._leaves)
        self.action_spec = _action_spec(env.action_space)
        self._observation: Any = None
        self.notes, self._is_first = (), True

    @property
    def own_limit(self) -> int | None:
        """The environment's time limit in actions, if its spec has one."""
        return None if self._env.spec is None else self._env.spec.max_episode_steps

    def reset(self, seed: int) -> None:
        returned = self._env.reset(seed=seed)
        if not (isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], dict)):
            raise EnvError(
                f"reset() returned {_kind_of(returned)}; allowed: observation, info (a dict). An observation alone is "
                "the old Gym's interface; Gymnasium's reset ends with `return observation, {}`"
            )
        self._observation, _ = returned

    def step(self, action: np.ndarray) -> SingleStep:
        returned = self._env.step(self._native(action))
        if not isinstance(returned, tuple) or len(returned) != 5 or not isinstance(returned[4], dict):
            raise EnvError(
                f"step() returned {_kind_of(returned)}; allowed: observation, reward, terminated, truncated, info (a "
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
        )

    def observe(self) -> SingleObservation:
        row: dict[str, np.ndarray | str] = {}
        numbers: list[np.ndarray] = []
        for path, space, field, picture in self._leaves:
            value = self._value(path)
            if picture is not None:
                row[field] = picture.read(value)
                self.notes += picture.notes(value) if self._is_first else ()
            elif field == "instruction":
                row[field] = str(value)
            else:  # not in the dtype of the space, which would truncate values that do not fit
                flat = value if isinstance(space, spaces.Box) else spaces.flatten(space, value)
                numbers.append(np.asarray(flat, dtype=np.float32).reshape(-1))
                if self._is_first and isinstance(space, spaces.Box):
                    self.notes += tuple(_beyond_bounds(space, numbers[-1], path))
        self._is_first = False
        if numbers:
            row["state"] = np.concatenate(numbers)
        return row

    def render(self) -> np.ndarray:
        if self._env.render_mode != "rgb_array":
            raise RenderingUnavailableError(
                f"this environment was made with render_mode={self._env.render_mode!r}; pass the option render=True"
            )
        picture = self._env.render()
        if not isinstance(picture, np.ndarray) or picture.dtype != np.uint8 or picture.shape[2:] != (3,):
            kind = f"{picture.dtype} {list(picture.shape)}" if isinstance(picture, np.ndarray) else _kind_of(picture)
            raise RenderingUnavailableError(f"its render() gave {kind}; a picture is uint8 [H, W, 3]")
        return picture

    def close(self) -> None:
        self._env.close()

    def _value(self, path: tuple[str, ...]) -> Any:
        """Returns the value of a part of the observation."""
        value = self._observation
        for key in path:
            if not isinstance(value, Mapping) or key not in value:
                there = f"has {', '.join(map(str, value))}" if isinstance(value, Mapping) else f"is {_kind_of(value)}"
                raise EnvError(f"observation_space declares {'.'.join(path)!r}, and the observation {there}")
            value = value[key]
        return value

    def _native(self, action: np.ndarray) -> Any:
        space = self._env.action_space
        return int(action) if isinstance(space, spaces.Discrete) else action.astype(space.dtype)


_Leaf = tuple[tuple[str, ...], spaces.Space, str, "Picture | None"]
"""A leaf's path in the observation, its space, its field, and how to read it if it is an image."""


def _leaves(space: spaces.Space, path: tuple[str, ...], layout: str | None) -> Iterator[_Leaf]:
    where = f"the observation {'.'.join(path)!r}" if path else "the observation"
    if isinstance(space, spaces.Dict):
        for key, part in space.spaces.items():
            yield from _leaves(part, (*path, key), layout)
    elif isinstance(space, spaces.Text):
        yield path, space, "instruction", None
    elif (picture := picture_of(space, where, layout)) is not None:
        yield path, space, f"{PICTURE}{'.'.join(path) or TOP}", picture
    elif isinstance(spaces.flatten_space(space), spaces.Box):
        yield path, space, "state", None
    else:
        raise EnvError(f"{where} has space {space}, of no fixed size; allowed: Box, Discrete, Text and Dicts of them")


def _beyond_bounds(space: spaces.Box, numbers: np.ndarray, path: tuple[str, ...]) -> Iterator[str]:
    """Yields a note for the first of these numbers that is outside the space's bounds."""
    low, high = space.low.reshape(-1), space.high.reshape(-1)
    if numbers.shape != low.shape:
        return
    for index in np.flatnonzero((numbers < low) | (numbers > high))[:1]:
        yield (
            f"the first observation{''.join(f'[{key!r}]' for key in path)} holds {numbers[index]:g}, and its "
            f"observation_space says {low[index]:g} to {high[index]:g}; numbers are taken as they are"
        )


def _observation_spec(leaves: tuple[_Leaf, ...]) -> Mapping[str, FieldSpec]:
    spec: dict[str, FieldSpec] = {}
    num_numbers = 0
    for path, space, field, picture in leaves:
        if field == "state":
            (size,) = spaces.flatten_space(space).shape or (0,)
            num_numbers += size
        elif field in spec:
            raise EnvError(f"a second Text in the observation ({'.'.join(path)}); only one can be the instruction")
        elif field == "instruction":
            spec[field] = FieldSpec(shape=(), dtype="text")
        else:
            assert picture is not None, "every other field is one"
            spec[field] = FieldSpec(shape=picture.shape, dtype="uint8")
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


def _kind_of(returned: object) -> str:
    if not isinstance(returned, tuple) or not returned:
        return type(returned).__name__
    return f"{len(returned)} values, the last one of type {type(returned[-1]).__name__}"


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
