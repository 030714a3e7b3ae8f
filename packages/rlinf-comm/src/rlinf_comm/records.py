"""The classes whose objects may cross a process border: those that a program has registered, and no others.

    @record
    @dataclass(frozen=True)
    class Guess: ...

    record(TheirSettings)                      # a class of somebody else

A class travels under a name, "module:qualname" unless another is given. The receiver looks the name up in its own
register and imports nothing, so bytes from a stranger reach no code that the receiver has not loaded and named. Both
processes have to have run the module that registers the class.
"""

from __future__ import annotations

import dataclasses
import enum
import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, overload

_Class = TypeVar("_Class", bound=type)

_classes: dict[str, type] = {}
_names: dict[type, str] = {}
_on_replaced: list[Callable[[], None]] = []


@overload
def record(cls: _Class, /) -> _Class: ...
@overload
def record(*, name: str) -> Callable[[_Class], _Class]: ...
def record(cls: Any = None, /, *, name: str | None = None) -> Any:
    """Registers a dataclass, Enum or msgspec.Struct, so that its objects can be sent and received. A decorator, and a
    function for classes that are defined elsewhere.

    Args:
        cls: The class itself; its subclasses are registered on their own.
        name: What the class is called in bytes, for programs whose two sides keep it in different modules.

    Raises:
        TypeError: another kind of class.
        ValueError: another class has the name.
    """
    if cls is None:
        return lambda decorated: _register(decorated, name)
    return _register(cls, None)


def _register(cls: Any, name: str | None) -> Any:
    if not is_kind_of_record(cls):
        raise TypeError(
            f"record({cls!r}): only dataclasses, Enums and msgspec.Structs can be registered; "
            "@record stands above @dataclass"
        )
    name = name or default_name(cls)
    previous = _classes.get(name)
    if previous is not None and default_name(previous) != default_name(cls):
        raise ValueError(f"record({cls!r}): the name {name!r} belongs to {previous!r}; give one of them another name=")
    _classes[name] = cls
    _names[cls] = name
    if previous not in (None, cls):  # the module was loaded again, or a notebook's cell run again
        for forget in _on_replaced:
            forget()
    return cls


def is_kind_of_record(cls: Any) -> bool:
    """Whether the class is of a kind that can be registered."""
    return isinstance(cls, type) and (dataclasses.is_dataclass(cls) or is_struct(cls) or issubclass(cls, enum.Enum))


def is_struct(cls: Any) -> bool:
    """Whether `cls` derives from msgspec.Struct. This module does not import msgspec: who has such a class, has."""
    msgspec = sys.modules.get("msgspec")
    return msgspec is not None and isinstance(cls, type) and issubclass(cls, msgspec.Struct)


def default_name(cls: type) -> str:
    """ "module:qualname". A spawned child knows its parent's main module as __mp_main__; here it is __main__ to all."""
    return f"{'__main__' if cls.__module__ == '__mp_main__' else cls.__module__}:{cls.__qualname__}"


def name_of(cls: type) -> str | None:
    """The name under which a class is registered."""
    return _names.get(cls)


def class_named(name: str) -> type | None:
    """The class that is registered under a name."""
    return _classes.get(name)


def when_replaced(forget: Callable[[], None]) -> None:
    """Calls `forget` whenever a name is given to another class."""
    _on_replaced.append(forget)


def modules_of(value: Any) -> list[str]:
    """The modules of the registered classes inside a value: what a process has to import before it can receive it."""
    modules = {type(part).__module__ for part in _parts(value) if type(part) in _names}
    return sorted(modules - {"__main__", "__mp_main__"})


def _parts(value: Any) -> Iterator[Any]:
    yield value
    cls: Any = type(value)
    children: Any = ()
    if isinstance(value, (list, tuple)):
        children = value
    elif isinstance(value, dict):
        children = value.values()
    elif dataclasses.is_dataclass(cls):
        children = [getattr(value, field.name, None) for field in dataclasses.fields(cls)]
    elif is_struct(cls):
        children = [getattr(value, name, None) for name in cls.__struct_fields__]
    for child in children:
        yield from _parts(child)
