"""Imports LIBERO's simulator without its prompts and without files in the home folder.

The first `import libero.libero` asks on the terminal for the data folder and writes the answer to `~/.libero`. Workers
have no terminal, so they use a configuration in a folder of this package, unless the user has one.
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
    """Imports `libero.libero`. Raises: EnvError if it or a dependency cannot be imported."""
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
        except (ImportError, AttributeError) as error:  # PyOpenGL raises AttributeError if libEGL is missing
            raise EnvError(f"LIBERO cannot be imported ({error}); {INSTALL}. Drawing needs libEGL") from error
    if not hasattr(module, "_assets_path_cache"):
        raise EnvError(f"{root} is LIBERO, but not hf-libero, whose folder of scenes can be chosen; {INSTALL}")
    return module


def environment_class() -> Any:
    """Returns LIBERO's `ControlEnv`, which builds the environment of any BDDL file."""
    libero_module()
    return sys.modules["libero.libero.envs.env_wrapper"].ControlEnv


@contextlib.contextmanager
def _configured(root: Path) -> Iterator[None]:
    """Context in which an import finds a configuration with LIBERO's defaults."""
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
    """Returns the folder with a configuration for the package at `root`; writes it once."""
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
    """Silences robosuite's warning about missing user settings."""
    logger = logging.getLogger("robosuite_logs")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
