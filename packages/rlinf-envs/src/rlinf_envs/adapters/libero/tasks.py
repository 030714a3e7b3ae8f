"""LIBERO's suites as data: their tasks, instructions and initial states.

Read from the files of the installed package (hf-libero) without importing its simulator, whose first import prompts the
user and takes seconds.
"""

from __future__ import annotations

import codecs
import functools
import importlib.util
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlinf_envs.core.names import close_to
from rlinf_envs.errors import EnvError

MAX_EPISODE_STEPS: Mapping[str, int] = {
    "libero_spatial": 220,
    "libero_object": 280,
    "libero_goal": 300,
    "libero_10": 520,
    "libero_90": 400,
}
"""The suites and their time limits in OpenVLA's and openpi's evaluations, slightly above the longest demonstration."""

INSTALL = (
    "pip install 'rlinf-envs[libero]', then pip install --no-deps hf-libero==0.1.4 robosuite==1.4.0 bddl==1.0.1 "
    "(hf-libero's own requirements would replace torch)"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class LiberoTask:
    """One task of a suite."""

    suite: str
    name: str
    """LIBERO's name of the task, which is the stem of its files."""
    instruction: str
    """The instruction in words."""
    goal_file: Path
    """Its scene, its objects and the predicate of its goal, in BDDL."""
    states_file: Path
    """Its shipped initial states."""


def package() -> Path:
    """Returns the folder `libero/libero` of the installed package. Raises: EnvError if it is not installed."""
    spec = importlib.util.find_spec("libero")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (inner := Path(folder) / "libero").is_dir():
            return inner
    raise EnvError(f"LIBERO is not installed; {INSTALL}")


def tasks_of(suite: str, chosen: Sequence[str | int] | None = None) -> tuple[LiberoTask, ...]:
    """Returns the tasks of a suite in LIBERO's order, or the ones chosen by name or number (from 0).

    Raises: EnvError for unknown names (with close matches), duplicates, and an empty choice.
    """
    if suite not in MAX_EPISODE_STEPS:
        raise EnvError(f"LIBERO has no suite {suite!r}; {close_to(suite, tuple(MAX_EPISODE_STEPS))}")
    root = package()
    names = _names(root)[suite]
    picked = names if chosen is None else [_name_of(task, suite, names) for task in chosen]
    if not picked or len(set(picked)) < len(picked):
        raise EnvError(f"options.tasks={list(chosen or ())}; give one or more tasks of {suite}, each once")
    return tuple(
        LiberoTask(
            suite=suite,
            name=name,
            instruction=instruction_of(name),
            goal_file=root / "bddl_files" / suite / f"{name}.bddl",
            states_file=root / "init_files" / suite / f"{name}.pruned_init",
        )
        for name in picked
    )


def instruction_of(name: str) -> str:
    """Returns the instruction that LIBERO derives from a task's name; names of libero_10 and libero_90 begin with their
    scene."""
    return re.sub(r"^[A-Z_]+SCENE\d+_", "", name).replace("_", " ")


@functools.lru_cache(maxsize=256)
def init_states(task: LiberoTask) -> np.ndarray:
    """Returns a task's 50 shipped states, [N, S] float64: time, positions and velocities of the simulation."""
    # The files are pickled arrays; only arrays are unpickled.
    rebuild: Any = np.empty(0).__reduce__()[0]
    allowed = [(rebuild, "numpy.core.multiarray._reconstruct"), (codecs.encode, "_codecs.encode")]
    with torch.serialization.safe_globals([*allowed, rebuild, np.ndarray, np.dtype, np.dtypes.Float64DType]):
        states = torch.load(task.states_file, weights_only=True)
    return np.asarray(states, dtype=np.float64)


def _name_of(task: str | int, suite: str, names: Sequence[str]) -> str:
    is_number = isinstance(task, int) or task.isdecimal()
    if is_number and int(task) < len(names) and int(task) >= 0:
        return names[int(task)]
    if is_number:
        raise EnvError(f"options.tasks: {suite} has no task number {task}; its numbers are 0..{len(names) - 1}")
    if task not in names:
        raise EnvError(f"options.tasks: {suite} has no task {task!r}; {close_to(str(task), names)}")
    return str(task)


@functools.cache
def _names(root: Path) -> Mapping[str, Sequence[str]]:
    """Reads suite -> names of its tasks from a module of the package that holds nothing else."""
    path = root / "benchmark" / "libero_suite_task_map.py"
    spec = importlib.util.spec_from_file_location("libero_suite_task_map", path)
    assert spec is not None and spec.loader is not None, f"{path} is a Python file"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.libero_task_map
