"""ManiSkill's tasks and suites, and instructions for them, which are this package's."""

from __future__ import annotations

import contextlib
import difflib
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlinf_envs.core.names import chosen_tasks
from rlinf_envs.errors import EnvError

INSTRUCTIONS: dict[str, str] = {
    "AssemblingKits-v1": "put the piece into its slot of the kit",
    "LiftPegUpright-v1": "stand the peg upright",
    "PegInsertionSide-v1": "put the peg into the hole of the box",
    "PickClutterYCB-v1": "pick the marked object out of the clutter",
    "PickCube-v1": "pick up the cube and bring it to the goal",
    "PickSingleYCB-v1": "pick up the object and bring it to the goal",
    "PlaceSphere-v1": "put the ball into the bin",
    "PlugCharger-v1": "plug the charger into the socket",
    "PokeCube-v1": "poke the cube with the peg",
    "PullCube-v1": "pull the cube to the target",
    "PullCubeTool-v1": "pull the cube closer with the hook",
    "PushCube-v1": "push the cube to the target",
    "PutCarrotOnPlateInScene-v1": "put carrot on plate",
    "PutEggplantInBasketScene-v1": "put eggplant into yellow basket",
    "PutSpoonOnTableClothInScene-v1": "put the spoon on the towel",
    "RollBall-v1": "roll the ball to the target",
    "StackCube-v1": "put the red cube on the green one",
    "StackGreenCubeOnYellowCubeBakedTexInScene-v1": "stack the green block on the yellow block",
    "StackPyramid-v1": "build a pyramid of the three cubes",
}
"""Instructions of tasks; those of the suite `bridge` are ManiSkill's own (`get_language_instruction`), with which
published policies are trained and evaluated."""

SUITES: dict[str, tuple[str, ...]] = {
    "tabletop": (
        "PushCube-v1",
        "PullCube-v1",
        "PickCube-v1",
        "StackCube-v1",
        "PlaceSphere-v1",
        "LiftPegUpright-v1",
        "PokeCube-v1",
        "PullCubeTool-v1",
        "PegInsertionSide-v1",
    ),
    "pick_and_place": ("PickCube-v1", "StackCube-v1", "PlaceSphere-v1", "PegInsertionSide-v1"),
    "pick_and_place_ycb": ("PickSingleYCB-v1", "PickClutterYCB-v1"),
    "bridge": (
        "PutCarrotOnPlateInScene-v1",
        "PutSpoonOnTableClothInScene-v1",
        "PutEggplantInBasketScene-v1",
        "StackGreenCubeOnYellowCubeBakedTexInScene-v1",
    ),
}
"""Suites of tasks with one robot and one kind of action. The assets of the first two come with ManiSkill; errors of the
others name the download. The 25 tasks PutOnPlateInScene25 of the literature are in no release of ManiSkill."""


CONTROL_MODE = "pd_joint_delta_pos"
"""Default of the option `control_mode`."""


def instruction_of(task: str, instruction: str | None = None) -> str | None:
    """Returns the instruction of a task: the option `instruction`, else ours; None if there is neither."""
    return INSTRUCTIONS.get(task) if instruction is None else instruction


def tasks_of(env_id: str, chosen: Sequence[str] | None = None) -> tuple[str, ...]:
    """Returns the tasks of an id: the task itself, or all tasks of a suite, or the chosen ones of them.

    Raises: EnvError for unknown names (with close matches), duplicates, and an empty choice.
    """
    tasks = registered_tasks()
    if env_id not in tasks and env_id not in SUITES:
        close = difflib.get_close_matches(env_id, (*tasks, *SUITES), n=4, cutoff=0.5)
        several = f"it has {len(tasks)}, such as PushCube-v1, and the suites {', '.join(SUITES)}"
        hint = f"did you mean {', '.join(close)}?" if close else several
        raise EnvError(f"ManiSkill has no task {env_id!r}; {hint}")
    return named_tasks(env_id, chosen)


def named_tasks(env_id: str, chosen: Sequence[str] | None = None) -> tuple[str, ...]:
    """As `tasks_of`, without checking the installation: an id that is not a suite counts as a task."""
    return chosen_tasks(env_id, SUITES.get(env_id, (env_id,)), chosen)


def registered_tasks() -> Mapping[str, Any]:
    """Returns ManiSkill's registrations by task. Raises: EnvError if the package is missing."""
    try:
        with _quiet_import():
            import mani_skill.envs  # noqa: F401  registers the tasks
            from mani_skill.utils.registration import REGISTERED_ENVS
    except ImportError as error:
        raise EnvError(f"ManiSkill cannot be imported ({error}); pip install 'rlinf-envs[maniskill]'") from error
    logging.getLogger("mani_skill ").setLevel(logging.ERROR)  # the trailing space is ManiSkill's
    return REGISTERED_ENVS


@contextlib.contextmanager
def _quiet_import() -> Iterator[None]:
    """Silences SAPIEN's import warnings about Vulkan; `notes` and our errors report what matters."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
