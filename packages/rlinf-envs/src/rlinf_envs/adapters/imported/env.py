"""Custom environments by import path, "package.module:callable".

The parameters of the callable decide how it is called:
* it has a parameter `num_envs`: called once, returns a `BatchedEnv` with that many rows;
* it has none: called once for each row, returns a `gymnasium.Env`.
Options are passed by name in both cases, except `picture_layout`, the axis order of a `gymnasium.Env`'s images
(`gymnasium_pictures`). Modules are searched on Python's path and in the current folder.
"""

from __future__ import annotations

import inspect
from typing import Any

from rlinf_envs.adapters.gymnasium.env import vector_of_callable
from rlinf_envs.core.importing import object_at
from rlinf_envs.core.protocol import BatchedEnv
from rlinf_envs.errors import EnvError


def make_imported(
    place: str,
    num_envs: int,
    *,
    max_episode_steps: int | None = None,
    ignore_terminations: bool = False,
    picture_layout: str | None = None,
    **options: Any,
) -> BatchedEnv:
    """Creates `num_envs` rows of the environment at `place`. Raises EnvError if it or its result is wrong."""
    make = object_at(place)
    parameters = inspect.signature(make).parameters
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    unknown = [] if takes_any else [name for name in options if name not in parameters]
    if unknown:
        raise EnvError(f"{place} takes no option {', '.join(unknown)}; it takes {', '.join(parameters) or 'none'}")
    if "num_envs" not in parameters:
        return vector_of_callable(
            lambda: make(**options),
            num_envs,
            max_episode_steps=max_episode_steps,
            ignore_terminations=ignore_terminations,
            picture_layout=picture_layout,
        )
    if picture_layout is not None:
        options["picture_layout"] = picture_layout
    if max_episode_steps is not None:
        options["max_episode_steps"] = max_episode_steps
    if ignore_terminations:
        options["ignore_terminations"] = True
    for name in ("max_episode_steps", "ignore_terminations"):
        if name in options and name not in parameters and not takes_any:
            raise EnvError(f"{name} is set, but {place} makes its own batch and takes no parameter {name}")
    env = make(num_envs=num_envs, **options)
    if not isinstance(env, BatchedEnv):
        missing = [name for name in dir(BatchedEnv) if not name.startswith("_") and not hasattr(env, name)]
        raise EnvError(f"{place} gave a {type(env).__name__}, which is no BatchedEnv: it lacks {', '.join(missing)}")
    if env.num_envs != num_envs:
        raise EnvError(f"{place} was asked for num_envs={num_envs} and gave {env.num_envs}")
    return env
