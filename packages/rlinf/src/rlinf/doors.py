"""What a recipe names (a backend, an engine, a policy, a launcher, a link), looked up before any process starts."""

from __future__ import annotations

import inspect
from abc import ABCMeta
from collections.abc import Mapping
from typing import Any

from rlinf.errors import UserError
from rlinf_algos.errors import AlgosError
from rlinf_algos.registry import Registry


def named_class(
    registry: Registry[Any],
    name: str,
    options: Mapping[str, Any],
    *arguments: Any,
    at: str,
    options_at: str | None = None,
    base: ABCMeta | None = None,
    **settings: Any,
) -> Any:
    """The class of that name, whose constructor takes what the product gives it and the recipe's options.

    Args:
        options: what the recipe says under `options_at`, or `<key>_options`.
        arguments, settings: the product's own; their values do not matter.
        at: the key for messages, with its value where it is to be shown: "actor.backend=replicated".
        base: a class that it inherits from, without leaving anything abstract.

    Raises: UserError for a name that is not known, a class that is not whole, or options that its constructor does not
        take.
    """
    try:
        found = registry.get(name)
    except AlgosError as error:
        raise UserError(f"{at}: {error}") from error
    if base and (not (inspect.isclass(found) and issubclass(found, base)) or inspect.isabstract(found)):
        lacks = ", ".join(sorted(getattr(found, "__abstractmethods__", ()) or base.__abstractmethods__))
        raise UserError(f"{at}: {name} is no whole {base.__module__}.{base.__name__}; it has to define {lacks}")
    try:
        if twice := sorted(settings.keys() & options.keys()):
            raise TypeError(f"is given {twice[0]!r} by the run")
        inspect.signature(found).bind(*arguments, **settings, **options)
    except TypeError as error:
        key = at.partition("=")[0]
        hint = f"they are keyword arguments of the constructor of {name}"
        raise UserError(f"{options_at or f'{key}_options'}: {name} {error}", hint=hint) from error
    return found
