"""Resolves import paths, "package.module:NAME"."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from rlinf_envs.core.kind_spec import KindSpec
from rlinf_envs.errors import EnvError


def object_at(place: str, *, key: str = "EnvSpec.id") -> Any:
    """Returns the callable or spec at "package.module:NAME". Modules are searched on Python's path and in the current
    folder.

    Args:
        key: name of the setting, for messages.

    Raises: EnvError that names what is missing.
    """
    module_name, separator, attribute = place.partition(":")
    if not (module_name and separator and attribute):
        raise EnvError(f"{key}={place!r} names no callable; write it as package.module:callable")
    if module_name.endswith(".py") or "/" in module_name:
        module = module_name.removesuffix(".py").rpartition("/")[2]
        raise EnvError(
            f"{key}={place!r} names a file; write the module, {module}:{attribute}, and start in the folder that "
            "holds it, or put that folder on the Python path"
        )
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())  # installed commands do not search the current folder by default
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise EnvError(f"{place}: {error}; looked in the current folder and on the Python path") from error
    plugin = getattr(module, attribute, None)
    if not callable(plugin) and not isinstance(plugin, KindSpec):
        offered = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        raise EnvError(f"{place}: {module_name} has no callable {attribute!r}; it has {', '.join(offered) or 'none'}")
    return plugin
