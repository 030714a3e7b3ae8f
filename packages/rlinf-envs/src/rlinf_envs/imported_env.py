"""A user's own environment, named by where it is: "package.module:callable".

The callable is asked in one of two ways, told apart by its parameters:
* it has a parameter `num_envs`: called once, returns a `BatchedEnv` with that many rows;
* it has none: called once for each row, returns a `gymnasium.Env`.
Options are passed by name in both cases, but for `picture_layout`, which says how pictures of a `gymnasium.Env` lie in
its observations (`gymnasium_pictures`). Modules are looked for as Python does, and in the current folder.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

from rlinf_envs.errors import EnvError
from rlinf_envs.gymnasium_env import vector_of_callable
from rlinf_envs.protocol import BatchedEnv


def make_imported(
    place: str,
    num_envs: int,
    *,
    max_episode_steps: int | None = None,
    ignore_terminations: bool = False,
    picture_layout: str | None = None,
    **options: Any,
) -> BatchedEnv:
    """`num_envs` rows of the environment at `place`; EnvError says what is wrong with it or with what it made."""
    make = callable_at(place)
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


def callable_at(place: str) -> Callable[..., Any]:
    """What is at "package.module:callable". Raises: EnvError saying what is missing."""
    module_name, separator, attribute = place.partition(":")
    if not (module_name and separator and attribute):
        raise EnvError(f"EnvSpec.id={place!r} names no callable; write it as package.module:callable")
    if module_name.endswith(".py") or "/" in module_name:
        module = module_name.removesuffix(".py").rpartition("/")[2]
        raise EnvError(
            f"EnvSpec.id={place!r} names a file; write the module, {module}:{attribute}, and start in the folder that "
            "holds it, or put that folder on the Python path"
        )
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())  # a command installed as a script does not look in the current folder by itself
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise EnvError(f"{place}: {error}; looked in the current folder and on the Python path") from error
    found = getattr(module, attribute, None)
    if not callable(found):
        offered = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        raise EnvError(f"{place}: {module_name} has no callable {attribute!r}; it has {', '.join(offered) or 'none'}")
    return found
