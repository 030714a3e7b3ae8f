"""Imports LIBERO's simulator without its questions and its files in other places.

The first `import libero.libero` asks on the terminal where data sets shall lie, and writes the answer to `~/.libero`.
A worker has no terminal. So it is given a configuration in a folder of this package, unless the user has one.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from rlinf_envs.adapters.libero.tasks import INSTALL, package
from rlinf_envs.errors import EnvError
from rlinf_envs.workarounds.mujoco_drawing import choose_drawing

_CONFIG_VARIABLE = "LIBERO_CONFIG_PATH"


def libero_module() -> ModuleType:
    """`libero.libero`. Raises: EnvError where it or what it needs cannot be imported."""
    root = package()
    choose_drawing()
    with _configured(root), _quiet():
        try:
            importlib.import_module("libero.libero.envs.env_wrapper")
            module = importlib.import_module("libero.libero")
        except PermissionError as error:
            raise EnvError(
                f"LIBERO cannot be imported ({error}); robosuite logs to /tmp/robosuite.log, which may be another "
                "user's: have it deleted"
            ) from error
        except (ImportError, AttributeError) as error:  # PyOpenGL raises AttributeError where libEGL is missing
            raise EnvError(f"LIBERO cannot be imported ({error}); {INSTALL}. Drawing needs libEGL") from error
    if not hasattr(module, "_assets_path_cache"):
        raise EnvError(f"{root} is LIBERO, but not hf-libero, whose folder of scenes can be chosen; {INSTALL}")
    return module


def environment_class() -> Any:
    """LIBERO's `ControlEnv`, which builds the environment of any BDDL file."""
    libero_module()
    return sys.modules["libero.libero.envs.env_wrapper"].ControlEnv


@contextlib.contextmanager
def _configured(root: Path) -> Iterator[None]:
    """An import finds a configuration that holds what LIBERO would write itself."""
    previous = os.environ.get(_CONFIG_VARIABLE)
    folder = Path(previous) if previous else Path.home() / ".libero"
    if "libero.libero" in sys.modules or (folder / "config.yaml").is_file():
        yield
        return
    os.environ[_CONFIG_VARIABLE] = str(_own_configuration(root))
    try:
        yield
    finally:
        if previous is None:
            del os.environ[_CONFIG_VARIABLE]
        else:
            os.environ[_CONFIG_VARIABLE] = previous


def _own_configuration(root: Path) -> Path:
    """The folder with a configuration for the package at `root`, written once."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "rlinf" / "libero" / hashlib.sha256(str(root).encode()).hexdigest()[:12]
    parts = {"benchmark_root": "", "bddl_files": "bddl_files", "init_states": "init_files", "assets": "assets"}
    lines = [f"{key}: {root / name}" for key, name in parts.items()] + [f"datasets: {root.parent / 'datasets'}"]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = folder / f"config-{os.getpid()}"
        unfinished.write_text("\n".join(lines) + "\n", encoding="utf-8")
        unfinished.replace(folder / "config.yaml")
    except OSError as error:
        raise EnvError(
            f"LIBERO's configuration could not be written to {folder} ({error}); set XDG_CACHE_HOME to a folder that "
            "can be written to"
        ) from error
    return folder


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """robosuite warns in every process that it has no settings of the user's own."""
    logger = logging.getLogger("robosuite_logs")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
