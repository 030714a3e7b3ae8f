"""What a recipe names (a backend, an engine, a launcher, a link), looked up before any process starts."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from rlinf.errors import UserError
from rlinf_algos.errors import AlgosError
from rlinf_algos.registry import Registry


def named_class(
    registry: Registry[Any], name: str, options: Mapping[str, Any], *arguments: Any, at: str, **settings: Any
) -> Any:
    """The class of that name, whose constructor takes what the product gives it and the recipe's options.

    Args:
        options: what the recipe says under `<key>_options`.
        arguments, settings: the product's own; their values do not matter.
        at: the key for messages, with its value where it is to be shown: "actor.backend=replicated".

    Raises: UserError for a name that is not known, or options that the constructor does not take.
    """
    try:
        found = registry.get(name)
    except AlgosError as error:
        raise UserError(f"{at}: {error}") from error
    try:
        if twice := sorted(settings.keys() & options.keys()):
            raise TypeError(f"is given {twice[0]!r} by the run")
        inspect.signature(found).bind(*arguments, **settings, **options)
    except TypeError as error:
        key = at.partition("=")[0]
        hint = f"they are keyword arguments of the constructor of {name}"
        raise UserError(f"{key}_options: {name} {error}", hint=hint) from error
    return found
