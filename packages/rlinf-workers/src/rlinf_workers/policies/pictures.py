"""Chooses the cameras of an environment that a policy uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlinf_envs import PICTURE, FieldSpec
from rlinf_workers.policies.base import PolicyError


def chosen_cameras(fields: Mapping[str, FieldSpec], cameras: str | Sequence[str] | None) -> tuple[str, ...]:
    """The fields "image.<camera>" of the cameras named, in that order.

    Args:
        cameras: names, as a list or separated by commas; None: all, in the order of their names.

    Raises: PolicyError for an unknown camera, and if there are no pictures [H, W, C].
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
            f"it reads pictures, fields 'image.<camera>', but the environment provides {', '.join(sorted(fields))}"
        )
    for name in chosen:
        if len(fields[name].shape) != 3 or fields[name].dtype != "uint8":
            description = f"{fields[name].dtype} of shape {list(fields[name].shape)}"
            raise PolicyError(f"a picture is uint8 of shape [H, W, C], but {name!r} is {description}")
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
    """Like `chosen_cameras`, for a model that reads RGB pictures.

    Args:
        at_most: maximum number of pictures; OpenVLA-OFT's published checkpoints (ALOHA has one camera above and one at
            each wrist) and pi0 (arXiv:2410.24164, section V) were trained with 3.
        option: the name of the option that chooses them.

    Raises: PolicyError also for too many cameras, or pictures without 3 channels.
    """
    chosen = chosen_cameras(fields, cameras)
    if len(chosen) > at_most:
        names = ", ".join(name.removeprefix(PICTURE) for name in chosen)
        raise PolicyError(
            f"it uses at most {at_most} of {len(chosen)} cameras; choose them with options.{option} from {names}"
        )
    for name in chosen:
        if (channels := fields[name].shape[-1]) != 3:
            raise PolicyError(f"it reads RGB pictures, but {name!r} has {channels} channels")
    return chosen
