"""ManiSkill's tasks: which it has, in which families, and what each is told to do in words of our own."""

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
    "PutCarrotOnPlateInScene-v1": "put the carrot on the plate",
    "PutEggplantInBasketScene-v1": "put the eggplant into the basket",
    "PutSpoonOnTableClothInScene-v1": "put the spoon on the cloth",
    "RollBall-v1": "roll the ball to the target",
    "StackCube-v1": "put the red cube on the green one",
    "StackGreenCubeOnYellowCubeBakedTexInScene-v1": "put the green cube on the yellow one",
    "StackPyramid-v1": "build a pyramid of the three cubes",
}
"""What a task is told to do, where it says nothing itself."""

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
"""Tasks of one robot with one kind of action. The assets of the first two come with ManiSkill; the others say what to
fetch. The 25 tasks PutOnPlateInScene25 of the literature are in no release of ManiSkill."""


CONTROL_MODE = "pd_joint_delta_pos"
"""What actions mean where the option `control_mode` is not given."""


def instruction_of(task: str, instruction: str | None = None) -> str | None:
    """What a task is told to do: what the option `instruction` gives, else ours; None where there is neither."""
    return INSTRUCTIONS.get(task) if instruction is None else instruction


def tasks_of(env_id: str, chosen: Sequence[str] | None = None) -> tuple[str, ...]:
    """The tasks of an id: of one task that one, of a suite all of its, or those of them that are chosen.

    Raises: EnvError for what is not there (with close matches), for a task twice and for none at all.
    """
    tasks = registered_tasks()
    if env_id not in tasks and env_id not in SUITES:
        close = difflib.get_close_matches(env_id, (*tasks, *SUITES), n=4, cutoff=0.5)
        several = f"it has {len(tasks)}, such as PushCube-v1, and the suites {', '.join(SUITES)}"
        hint = f"did you mean {', '.join(close)}?" if close else several
        raise EnvError(f"ManiSkill has no task {env_id!r}; {hint}")
    return named_tasks(env_id, chosen)


def named_tasks(env_id: str, chosen: Sequence[str] | None = None) -> tuple[str, ...]:
    """As `tasks_of`, without a look at what is installed: an id that is no suite is taken for a task."""
    return chosen_tasks(env_id, SUITES.get(env_id, (env_id,)), chosen)


def registered_tasks() -> Mapping[str, Any]:
    """ManiSkill's registrations, by task. Raises: EnvError where the package is missing."""
    try:
        with _quiet_import():
            import mani_skill.envs  # noqa: F401  registers the tasks
            from mani_skill.utils.registration import REGISTERED_ENVS
    except ImportError as error:
        raise EnvError(f"ManiSkill cannot be imported ({error}); pip install 'rlinf-envs[maniskill]'") from error
    logging.getLogger("mani_skill ").setLevel(logging.ERROR)  # the trailing space is theirs
    return REGISTERED_ENVS


@contextlib.contextmanager
def _quiet_import() -> Iterator[None]:
    """SAPIEN warns about Vulkan libraries as it is imported; whether that matters is told by `notes` and our errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
