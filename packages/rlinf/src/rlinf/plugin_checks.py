"""What a recipe names (a backend, an engine, a launcher, ...), looked up before any process starts."""

from __future__ import annotations

import inspect
import json
from abc import ABCMeta
from collections.abc import Mapping
from typing import Any, TypeVar, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.errors import PydanticSchemaGenerationError, PydanticUserError

from rlinf.config.yaml_source import describe
from rlinf.errors import UserError
from rlinf_algos import AlgosError, Registry
from rlinf_workers.plugins import Plugins, Spec

S = TypeVar("S", bound=Spec)


def spec_of(plugins: Plugins[S], name: str, *, at: str) -> S:
    """The spec of a name or an import path; `at` is the key for messages. Raises: UserError."""
    try:
        return plugins.spec(name)
    except AlgosError as error:
        raise UserError(f"{at}: {error}") from error


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
        take, by their names or, where it says the types of its arguments, by their values.
    """
    try:
        cls = registry.get(name)
    except AlgosError as error:
        raise UserError(f"{at}: {error}") from error
    if base and (not (inspect.isclass(cls) and issubclass(cls, base)) or inspect.isabstract(cls)):
        lacks = ", ".join(sorted(getattr(cls, "__abstractmethods__", ()) or base.__abstractmethods__))
        raise UserError(f"{at}: {name} is no whole {base.__module__}.{base.__name__}; it has to define {lacks}")
    key = at.partition("=")[0]
    place, hint = options_at or f"{key}_options", f"they are keyword arguments of the constructor of {name}"
    try:
        if twice := sorted(settings.keys() & options.keys()):
            raise TypeError(f"is given {twice[0]!r} by the run")
        inspect.signature(cls).bind(*arguments, **settings, **options)
    except TypeError as error:
        raise UserError(f"{place}: {name} {error}", hint=hint) from error
    for option, value in options.items():
        if (wrong := _wrong(cls, option, value)) is not None:
            raise UserError(f"{place}.{option}={describe(value)}: {name} {wrong}", hint=hint)
    return cls


def _wrong(constructor: Any, option: str, value: Any) -> str | None:
    """What a value should have been; None: it is one, or the constructor does not say.

    Values come from YAML and are read as JSON is: strictly, but a list may be a tuple.
    """
    try:
        hints = get_type_hints(constructor.__init__ if inspect.isclass(constructor) else constructor)
        adapter = TypeAdapter(hints.get(option, Any), config=ConfigDict(strict=True))
        adapter.validate_json(json.dumps(value, default=str))
    except (NameError, PydanticSchemaGenerationError, PydanticUserError):  # it names a type that only it knows
        return None
    except ValidationError as error:
        return "; ".join(detail["msg"].replace("Input should", "wants it to") for detail in error.errors())
    return None
