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


def colour_cameras(
    fields: Mapping[str, FieldSpec],
    cameras: str | Sequence[str] | None,
    *,
    at_most: int = 3,
    option: str = "cameras",
) -> tuple[str, ...]:
    """As `chosen_cameras`, for a model that looks at red, green and blue.

    Args:
        at_most: pictures that the model looks at; 3 is what OpenVLA-OFT's published checkpoints (ALOHA has one camera
            above and one at each wrist) and pi0 (arXiv:2410.24164, section V) were trained with.
        option: the name of the option that chooses them.

    Raises: PolicyError also for too many cameras, or other colours.
    """
    chosen = chosen_cameras(fields, cameras)
    if len(chosen) > at_most:
        names = ", ".join(name.removeprefix(PICTURE) for name in chosen)
        raise PolicyError(
            f"it looks through {at_most} of {len(chosen)} cameras at most; options.{option} chooses among {names}"
        )
    for name in chosen:
        if (channels := fields[name].shape[-1]) != 3:
            raise PolicyError(f"it looks at pictures of 3 colours, and {name!r} has {channels} channels")
    return chosen
