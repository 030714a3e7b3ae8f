"""Checks the plug-ins that a recipe names (backend, engine, launcher, ...) before any process starts."""

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
    """Returns the spec of a name or an import path; `at` is the key for messages. Raises: UserError."""
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
    """Returns the class of a name, after checking that its constructor accepts the product's arguments and the recipe's
    options.

    Args:
        options: the recipe's values under `options_at`, or `<key>_options`.
        arguments, settings: the product's arguments; their values are not used.
        at: the key for messages, with its value if it should be shown: "actor.backend=replicated".
        base: a class that it must inherit from and implement completely.

    Raises: UserError for an unknown name, an abstract class, or options that its constructor does not accept, by name
        or, if its arguments are annotated, by value.
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
    """Describes the expected type of a wrong value; None: it is right, or the argument is not annotated.

    Values come from YAML and are validated strictly, but a list may be a tuple.
    """
    try:
        hints = get_type_hints(constructor.__init__ if inspect.isclass(constructor) else constructor)
        adapter = TypeAdapter(hints.get(option, Any), config=ConfigDict(strict=True))
        adapter.validate_json(json.dumps(value, default=str))
    except (NameError, PydanticSchemaGenerationError, PydanticUserError):  # an annotation that cannot be resolved here
        return None
    except ValidationError as error:
        return "; ".join(detail["msg"].replace("Input should", "wants it to") for detail in error.errors())
    return None
