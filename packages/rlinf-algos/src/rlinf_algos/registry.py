"""Components by name: those of this package, those that a decorator registers, and those with an import path.

The components of this package are import paths until one is needed, so that a config can check names without importing
torch.
"""

import difflib
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, TypeVar, cast

from rlinf_algos.errors import AlgosError

F = TypeVar("F", bound=Callable[..., Any])
G = TypeVar("G", bound=Callable[..., Any])


class Registry(Generic[F]):
    """Names of one kind of function.

    Args:
        what: the kind in the singular, for messages: "policy loss".
        builtin: name -> "package.module:function"; imported on first use.
        error: the exception to raise; a subclass of AlgosError.
    """

    def __init__(
        self, what: str, builtin: Mapping[str, str] | None = None, *, error: type[AlgosError] = AlgosError
    ) -> None:
        self._what = what
        self._builtin = dict(builtin or {})
        self._added: dict[str, F] = {}
        self._error = error

    def register(self, name: str) -> Callable[[G], G]:
        """Decorator: registers the function as `name` and returns it with its own type.

        Raises:
            AlgosError: the name contains a colon, or is taken by another function.
        """

        def add(function: G) -> G:
            if ":" in name or not name:
                raise self._error(f"{name!r} is not a valid name for a {self._what}: a colon marks an import path")
            holder = self._added.get(name, self._builtin.get(name, function))
            if holder is not function and holder != path_of(function):
                raise self._error(f"the {self._what} name {name!r} is taken by {holder!r}; choose another")
            if name not in self._builtin:
                self._added[name] = cast(F, function)
            return function

        return add

    def names(self) -> tuple[str, ...]:
        """All registered names, sorted."""
        return tuple(sorted({*self._builtin, *self._added}))

    def check(self, name: str) -> None:
        """Raises AlgosError unless `name` is registered or an import path (which is not imported)."""
        if ":" not in name and name not in self.names():
            raise self._error(self.unknown(name))

    def locate(self, name: str) -> None:
        """Like `check`; the top-level package of an import path must be installed, too. Nothing is imported.

        Raises:
            AlgosError: as `get`.
        """
        self.check(name)
        path = self._builtin.get(name, name) if name not in self._added else ""
        package = path.partition(":")[0].partition(".")[0]
        if package and package not in sys.modules:
            _look_in_current_folder()
            if importlib.util.find_spec(package) is None:
                raise self._error(f"the {self._what} {path!r} cannot be imported: No module named {package!r}")

    def unknown(self, name: str) -> str:
        """The error message for a name that is not registered."""
        return (
            f"no {self._what} is called {name!r}; {did_you_mean(name, self.names())} "
            f"A custom {self._what} is 'package.module:NAME'"
        )

    def get(self, name: str, *, callable_only: bool = True) -> F:
        """The function with that name, or at an import path "package.module:function".

        After the colon there may also be a name that the module registers. The current folder is searched, too.
        With `callable_only=False` any object is accepted.

        Raises:
            AlgosError: no such name (the message suggests a similar one), or the path does not lead to a function.
        """
        if name in self._added:
            return self._added[name]
        if ":" not in name:
            self.check(name)
            return self._imported(self._builtin[name], callable_only)
        return self._imported(name, callable_only)

    def _imported(self, path: str, callable_only: bool = True) -> F:
        module, _, attribute = path.partition(":")
        _look_in_current_folder()
        try:
            loaded = importlib.import_module(module)
            member = self._added[attribute] if attribute in self._added else getattr(loaded, attribute)
        except Exception as e:  # the module is the user's and may raise what it likes
            reason = str(e) if isinstance(e, ImportError | AttributeError | ValueError) else f"{type(e).__name__}: {e}"
            raise self._error(f"the {self._what} {path!r} cannot be imported: {reason}{_place(e)}") from e
        if callable_only and not callable(member):
            raise self._error(f"the {self._what} {path!r} is a {type(member).__name__}, not a function")
        return cast(F, member)


def _look_in_current_folder() -> None:
    """Adds the current folder to `sys.path`; an installed script does not import from there by default."""
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())


def _place(error: Exception) -> str:
    """File and line at which a module raised during its import, as the end of a message; empty if it was not found."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
    return f" ({frames[-1].filename}:{frames[-1].lineno})" if frames and frames[-1].filename != __file__ else ""


def path_of(function: Callable[..., Any]) -> str:
    """ "package.module:function" """
    return f"{getattr(function, '__module__', '')}:{getattr(function, '__qualname__', repr(function))}"


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """The most similar of the known names, or all of them, as the end of a message."""
    names = sorted(names)
    close = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names)}."
