"""Meta-World's tasks as data: their instructions, and the tasks of an id.

The sentences are this package's; Meta-World has none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlinf_envs.core.names import chosen_tasks, close_to
from rlinf_envs.errors import EnvError
from rlinf_envs.workarounds.mujoco_drawing import choose_drawing

INSTRUCTIONS: Mapping[str, str] = {
    "assembly-v3": "pick up the ring by its handle and put it over the peg",
    "basketball-v3": "drop the basketball into the hoop",
    "bin-picking-v3": "move the block from one bin to the other",
    "box-close-v3": "put the lid on the box",
    "button-press-topdown-v3": "press the button down from above",
    "button-press-topdown-wall-v3": "reach over the wall and press the button down",
    "button-press-v3": "push the button in",
    "button-press-wall-v3": "go around the wall and push the button in",
    "coffee-button-v3": "press the button of the coffee machine",
    "coffee-pull-v3": "pull the mug away from the coffee machine",
    "coffee-push-v3": "push the mug under the coffee machine",
    "dial-turn-v3": "turn the dial",
    "disassemble-v3": "lift the ring off the peg",
    "door-close-v3": "close the door",
    "door-lock-v3": "lock the door",
    "door-open-v3": "open the door",
    "door-unlock-v3": "unlock the door",
    "hand-insert-v3": "push the block into the hole in the table",
    "drawer-close-v3": "close the drawer",
    "drawer-open-v3": "open the drawer",
    "faucet-open-v3": "turn the faucet on",
    "faucet-close-v3": "turn the faucet off",
    "hammer-v3": "drive the nail in with the hammer",
    "handle-press-side-v3": "press the handle at the side down",
    "handle-press-v3": "press the handle down",
    "handle-pull-side-v3": "pull the handle at the side up",
    "handle-pull-v3": "pull the handle up",
    "lever-pull-v3": "pull the lever up",
    "peg-insert-side-v3": "insert the peg into the hole from the side",
    "pick-place-wall-v3": "pick up the puck and carry it over the wall to the goal",
    "pick-out-of-hole-v3": "pick the puck out of the hole",
    "reach-v3": "move the gripper to the goal",
    "push-back-v3": "push the puck back to the goal",
    "push-v3": "push the puck to the goal",
    "pick-place-v3": "pick up the puck and hold it at the goal",
    "plate-slide-v3": "slide the plate forward into the net",
    "plate-slide-side-v3": "slide the plate sideways into the net",
    "plate-slide-back-v3": "slide the plate back out of the net",
    "plate-slide-back-side-v3": "slide the plate sideways out of the net",
    "peg-unplug-side-v3": "pull the peg out of the hole at the side",
    "soccer-v3": "push the ball into the net",
    "stick-push-v3": "push the box forward with the stick",
    "stick-pull-v3": "pull the box back with the stick",
    "push-wall-v3": "push the puck around the wall to the goal",
    "reach-wall-v3": "go around the wall and move the gripper to the goal",
    "shelf-place-v3": "put the block on the shelf",
    "sweep-into-v3": "sweep the block into the hole",
    "sweep-v3": "sweep the block off the table",
    "window-open-v3": "slide the window open",
    "window-close-v3": "slide the window shut",
}
"""Task -> instruction."""

_SUITES = ("MT10", "MT25", "MT50")


def classes() -> Mapping[str, type[Any]]:
    """Returns Meta-World's environment class of each task. Raises: EnvError if the package is missing."""
    choose_drawing()
    try:
        from metaworld.env_dict import ALL_V3_ENVIRONMENTS
    except ImportError as error:
        raise EnvError(f"Meta-World cannot be imported ({error}); pip install 'rlinf-envs[metaworld]'") from error
    return ALL_V3_ENVIRONMENTS


def tasks_of(env_id: str, chosen: Sequence[str] | None = None) -> tuple[str, ...]:
    """Returns the tasks of an id: the task itself, or all tasks of a suite, or the chosen ones of them.

    Raises: EnvError for unknown names (with close matches), duplicates, and an empty choice.
    """
    task_classes = classes()
    if env_id in _SUITES:
        from metaworld import env_dict

        tasks = tuple(getattr(env_dict, f"{env_id}_V3"))
    elif env_id in task_classes:
        tasks = (env_id,)
    else:
        raise EnvError(f"Meta-World has no task {env_id!r}; {close_to(env_id, (*task_classes, *_SUITES))}")
    return chosen_tasks(env_id, tasks, chosen)
