"""LIBERO's suites as data: their tasks, instructions and initial states.

Read from the files of the installed package (hf-libero) without importing its simulator, whose first import prompts the
user and takes seconds.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from rlinf_envs.adapters.libero.state_files import read_states
from rlinf_envs.adapters.libero.variants import (
    PLUS,
    PRO,
    PRO_WORDS,
    LiberoVariation,
    language_in,
    package_folder,
    plus_names,
    plus_package,
    pro_package,
    variation_of,
)
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
    num_starts: int | None = None
    """Number of the shipped states that are starts, from the first on; None: all."""
    variation: LiberoVariation | None = None
    """What a variant of LIBERO-Plus changes; None: nothing."""

    @property
    def built_as(self) -> LiberoTask:
        """The task whose scene shows this one: variants of a task share its scene."""
        if self.variation is None:
            return self
        return replace(self, name=self.variation.task, instruction="", num_starts=None, variation=None)


def package() -> Path:
    """Returns the folder `libero/libero` of the installed package. Raises: EnvError if it is not installed."""
    return package_folder("libero", "LIBERO", INSTALL)


def limit_of(suite: str) -> int:
    """Returns the time limit of a suite in actions; those of LIBERO-Plus and LIBERO-PRO have that of LIBERO's suite."""
    if suite in PRO:
        return MAX_EPISODE_STEPS[PRO[suite][0]]
    return MAX_EPISODE_STEPS[PLUS.get(suite, suite)]


def tasks_of(
    suite: str, chosen: Sequence[str | int] | None = None, categories: Sequence[str] | None = None
) -> tuple[LiberoTask, ...]:
    """Returns the tasks of a suite in LIBERO's order, or the ones chosen by name or number (from 0).

    Args:
        categories: of LIBERO-Plus, `variants.CATEGORIES`; None: all.

    Raises: EnvError for unknown names (with close matches), duplicates, and an empty choice.
    """
    if suite in PLUS:
        return _plus_tasks(suite, chosen, categories)
    if categories is not None:
        raise EnvError(f"options.categories is for LIBERO-Plus, {', '.join(PLUS)}, not for {suite}")
    if suite.startswith("libero_pro"):
        return _pro_tasks(suite, chosen)
    if suite not in MAX_EPISODE_STEPS:
        raise EnvError(f"LIBERO has no suite {suite!r}; {close_to(suite, (*MAX_EPISODE_STEPS, *PLUS))}")
    root = package()
    names = _names(root)[suite]
    picked = _picked(suite, names, chosen)
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


def _picked(suite: str, names: Sequence[str], chosen: Sequence[str | int] | None) -> Sequence[str]:
    picked = names if chosen is None else [_name_of(task, suite, names) for task in chosen]
    if not picked or len(set(picked)) < len(picked):
        raise EnvError(f"options.tasks={list(chosen or ())}; give one or more tasks of {suite}, each once")
    return picked


def _plus_tasks(
    suite: str, chosen: Sequence[str | int] | None, categories: Sequence[str] | None
) -> tuple[LiberoTask, ...]:
    """Returns variants of LIBERO-Plus. Each has one start, as in its evaluation."""
    root, base = plus_package(), PLUS[suite]
    names = _picked(suite, _names(root)[base], chosen)
    return tuple(_plus_task(suite, name, root) for name in plus_names(suite, categories, root, names))


def _plus_task(suite: str, name: str, root: Path) -> LiberoTask:
    base, variation = PLUS[suite], variation_of(name)
    has_own_scene = f"{name}_".find("_view_") < 0
    goal_file = root / "bddl_files" / base / f"{name if has_own_scene else variation.task}.bddl"
    states = (root / "init_files" / base / variation.task) if not has_own_scene else _own_states(root, base, name)
    sentence = f"{variation.task}_language_{variation.sentence}" if variation.sentence else None
    return LiberoTask(
        suite=suite,
        name=name,
        # LIBERO-Plus derives other sentences from the variant's name, with its numbers.
        instruction=language_in(root / "bddl_files" / base / f"{sentence}.bddl") if sentence else instruction_of(name),
        goal_file=goal_file,
        states_file=states.with_name(f"{states.name}.pruned_init"),
        num_starts=1,
        variation=replace(variation, task=name) if has_own_scene else variation,
    )


def _own_states(root: Path, base: str, name: str) -> Path:
    return root / "init_files" / "libero_newobj" / base / name


def _pro_tasks(suite: str, chosen: Sequence[str | int] | None) -> tuple[LiberoTask, ...]:
    """Returns the tasks of one of LIBERO-PRO's suites: LIBERO's tasks in its order, with other files."""
    if suite not in PRO:
        raise EnvError(f"LIBERO-PRO has no suite {suite!r}; {close_to(suite, tuple(PRO))}")
    root, (base, change) = pro_package(), PRO[suite]
    tasks = []
    for name in _picked(suite, _names(root)[base], chosen):
        goal_file = root / "bddl_files" / f"{base}_{change}" / f"{name}.bddl"
        states_file = root / "init_files" / f"{base}_{change}" / f"{name}.pruned_init"
        if absent := [file for file in (goal_file, states_file) if not file.is_file()]:
            raise EnvError(f"{suite}: LIBERO-PRO's package has no {absent[0].relative_to(root)}")
        words = language_in(goal_file) if change in PRO_WORDS else instruction_of(name)
        tasks.append(
            LiberoTask(suite=suite, name=name, instruction=words, goal_file=goal_file, states_file=states_file)
        )
    return tuple(tasks)


def instruction_of(name: str) -> str:
    """Returns the instruction that LIBERO derives from a task's name; names of libero_10 and libero_90 begin with their
    scene."""
    return re.sub(r"^[A-Z_]+SCENE\d+_", "", name).replace("_", " ")


def init_states(task: LiberoTask) -> np.ndarray:
    """Returns a task's shipped states, 50 in LIBERO, [N, S] float64: time, positions and velocities of the
    simulation."""
    return _states_in(task.states_file)[: task.num_starts]


@functools.lru_cache(maxsize=256)
def _states_in(file: Path) -> np.ndarray:
    return np.atleast_2d(np.asarray(read_states(file), dtype=np.float64))


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
