"""Which of an environment's cameras a policy looks through."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlinf_envs import PICTURE, FieldSpec
from rlinf_workers.policies.base import PolicyError


def chosen_cameras(fields: Mapping[str, FieldSpec], cameras: str | Sequence[str] | None) -> tuple[str, ...]:
    """The fields "image.<camera>" of the cameras named, in that order.

    Args:
        cameras: names; a text has them with commas between; None: all there are, by name.

    Raises: PolicyError for a camera that is not there, and where there are no pictures [H, W, C] at all.
    """
    if isinstance(cameras, str):
        cameras = [name.strip() for name in cameras.split(",")]
    there = sorted(name for name in fields if name.startswith(PICTURE))
    chosen = there if cameras is None else [PICTURE + camera for camera in cameras]
    if unknown := [name.removeprefix(PICTURE) for name in chosen if name not in there]:
        has = ", ".join(name.removeprefix(PICTURE) for name in there) or "none"
        raise PolicyError(f"there is no camera {', '.join(unknown)}; the environment has {has}")
    if not chosen:
        raise PolicyError(
            f"it looks at pictures, fields 'image.<camera>', and the environment shows {', '.join(sorted(fields))}"
        )
    for name in chosen:
        if len(fields[name].shape) != 3 or fields[name].dtype != "uint8":
            description = f"{fields[name].dtype} of shape {list(fields[name].shape)}"
            raise PolicyError(f"a picture is uint8 of shape [H, W, C], and {name!r} is {description}")
        first, _, last = fields[name].shape
        if first in (1, 3, 4) and last not in (1, 3, 4):
            shape = list(fields[name].shape)
            raise PolicyError(f"{name!r} has the shape {shape}, channels first; a picture is [H, W, C], channels last")
    return tuple(chosen)
