"""What a rank has beside its layout: refused by name, unless a pattern leaves it out by name."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from rlinf_comm._arrays import dtype_name
from rlinf_comm.errors import LayoutError

if TYPE_CHECKING:
    import torch

_NUM_LISTED = 5


def checked_patterns(leave_out: Collection[str], buffers: Iterable[str], whose: str) -> tuple[str, ...]:
    """The patterns of a `leave_out`, which say nothing about the buffers of a layout.

    Raises:
        LayoutError: one text instead of several, or a pattern that matches a buffer; names both.
    """
    if isinstance(leave_out, str):
        raise LayoutError(f"leave_out={leave_out!r} is one text; give a list of patterns, as leave_out=[{leave_out!r}]")
    for pattern in leave_out:
        matched = [name for name in buffers if fnmatchcase(name, pattern)]
        if matched:
            raise LayoutError(
                f"leave_out: {pattern!r} matches {listed(matched)}, which the layout of {whose} stores; "
                "use a narrower pattern, or a layout without them"
            )
    return tuple(leave_out)


def left_out(
    who: str,
    tensors: Mapping[str, torch.Tensor],
    buffers: Mapping[str, object],
    patterns: tuple[str, ...],
    remedy: str = "name what is to be left out: leave_out={names} (patterns with * are allowed)",
) -> dict[str, tuple[str, ...]]:
    """Which of a rank's tensors each pattern leaves out; a tensor belongs to the first pattern that matches.

    Raises:
        LayoutError: tensors that are neither among the buffers nor matched by a pattern; names them.
    """
    matches: dict[str, list[str]] = {pattern: [] for pattern in patterns}
    unknown = []
    for name in sorted(tensors.keys() - buffers.keys()):
        pattern = next((pattern for pattern in patterns if fnmatchcase(name, pattern)), None)
        (unknown if pattern is None else matches[pattern]).append(name)
    if unknown:
        remedy = remedy.format(names=unknown[:_NUM_LISTED])
        raise LayoutError(f"{_refusal(who, unknown, tensors, buffers)}. Use a layout that has them, or {remedy}")
    return {pattern: tuple(names) for pattern, names in matches.items()}


def check_used(of_ranks: Iterable[Mapping[str, Collection[str]]], where: str) -> None:
    """Refuses patterns that leave nothing out on any of several ranks.

    Raises:
        LayoutError: names the pattern.
    """
    used: dict[str, bool] = {}
    for names_by_pattern in of_ranks:
        for pattern, names in names_by_pattern.items():
            used[pattern] = used.get(pattern, False) or bool(names)
    idle = [pattern for pattern, is_used in used.items() if not is_used]
    if idle:
        raise LayoutError(
            f"leave_out: {listed(map(repr, idle))} matches no tensor of {where}; patterns are compared with whole "
            "names, as in '*.inv_freq'; take out those that are not needed"
        )


def _refusal(who: str, unknown: list[str], tensors: Mapping[str, torch.Tensor], buffers: Collection[str]) -> str:
    first = unknown[0]
    listing = ", ".join(f"{name} {_kind(tensors[name])}" for name in unknown[:_NUM_LISTED])
    more = f" and {len(unknown) - _NUM_LISTED} more" if len(unknown) > _NUM_LISTED else ""
    count = "1 tensor that its layout does" if len(unknown) == 1 else f"{len(unknown)} tensors that its layout does"
    near = difflib.get_close_matches(first, buffers, n=1, cutoff=0.0)
    hint = f"the layout knows {len(buffers)} there" + (f", the nearest to {first} is {near[0]}" if near else "")
    return f"{who} has {count} not know and that would be neither moved nor attested: {listing}{more}; {hint}"


def _kind(tensor: Any) -> str:
    shape = getattr(tensor, "shape", None)
    return "" if shape is None else f"{dtype_name(tensor.dtype) or tensor.dtype} {list(shape)}"


def listed(names: Iterable[str]) -> str:
    """The first few of many names."""
    unique = list(dict.fromkeys(names))
    more = len(unique) - _NUM_LISTED
    return ", ".join(unique[:_NUM_LISTED]) + (f" and {more} more" if more > 0 else "")
