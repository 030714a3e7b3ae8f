"""Parts by name: those of this package, those that a decorator adds, and those of an import path.

A registry is cheap: the parts of this package are import paths until somebody asks for one, so that a config can check
names without importing torch.
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
        what: the kind, in the singular, as messages say it: "policy loss".
        builtin: name -> "package.module:function"; imported when asked for.
        error: what is raised; a kind of AlgosError.
    """

    def __init__(
        self, what: str, builtin: Mapping[str, str] | None = None, *, error: type[AlgosError] = AlgosError
    ) -> None:
        self._what = what
        self._builtin = dict(builtin or {})
        self._added: dict[str, F] = {}
        self._error = error

    def register(self, name: str) -> Callable[[G], G]:
        """Decorator: makes the function, which is one of F, known as `name`; it keeps its own type.

        Raises:
            AlgosError: the name holds a colon, or is taken by another function.
        """

        def add(function: G) -> G:
            if ":" in name or not name:
                raise self._error(f"{name!r} is no name for a {self._what}: a colon stands for an import path")
            holder = self._added.get(name, self._builtin.get(name, function))
            if holder is not function and holder != path_of(function):
                raise self._error(f"the {self._what} name {name!r} is taken by {holder!r}; choose another")
            if name not in self._builtin:
                self._added[name] = cast(F, function)
            return function

        return add

    def names(self) -> tuple[str, ...]:
        """All names known at present, sorted."""
        return tuple(sorted({*self._builtin, *self._added}))

    def check(self, name: str) -> None:
        """Raises AlgosError unless `name` is known or an import path (which is not followed)."""
        if ":" not in name and name not in self.names():
            raise self._error(self.unknown(name))

    def locate(self, name: str) -> None:
        """As `check`; the package that an import path begins with must be there, too. Nothing is imported.

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
        """What to say of a name that nothing is known by."""
        article = "an" if self._what[0] in "aeiou" else "a"
        return (
            f"no {self._what} is called {name!r}; {did_you_mean(name, self.names())} "
            f"{article.capitalize()} {self._what} of your own is 'package.module:NAME'"
        )

    def get(self, name: str, *, callable_only: bool = True) -> F:
        """The function of that name, or of an import path "package.module:function".

        What stands behind the colon may also be a name that the module registers. The current folder is looked at too.
        Without `callable_only` it may be any object.

        Raises:
            AlgosError: nothing is known by that name; says what is near. Or the path does not lead to a function.
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
    """A command that is installed as a script does not import from there by itself."""
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())


def _place(error: Exception) -> str:
    """Where a module raised while it was imported, as the end of a message; nothing where it was not found."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
    return f" ({frames[-1].filename}:{frames[-1].lineno})" if frames and frames[-1].filename != __file__ else ""


def path_of(function: Callable[..., Any]) -> str:
    """ "package.module:function" """
    return f"{getattr(function, '__module__', '')}:{getattr(function, '__qualname__', repr(function))}"


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """The nearest of the known names, or all of them, as the end of a message."""
    names = sorted(names)
    close = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names)}."
