"""RLinf: reinforcement-learning post-training of language models and robot policies.

The commands of `rlinf` are here as functions, stated in `__init__.pyi`. Importing this package imports nothing, so that
a venv of a role needs no more than the role does; a name is imported when it is first used.
"""

from typing import Any

__version__ = "2026.11.0"


def _stub() -> Any:
    import lazy_loader

    return lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    attribute, _, names = _stub()
    return names if name == "__all__" else attribute(name)


def __dir__() -> list[str]:
    return _stub()[1]()
