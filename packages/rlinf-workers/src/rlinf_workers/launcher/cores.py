"""Which cores a CPU slot stands for."""

from __future__ import annotations

from collections.abc import Sequence


def cores_of_slots(devices: Sequence[str], cores: Sequence[int], num_threads: int) -> frozenset[int]:
    """The cores of a worker on CPU slots; empty for one without.

    Args:
        devices: `cpu:0`, ...; others are passed over.
        cores: those that the driver may use, ascending. Slots beyond the last core begin with the first again.
        num_threads: cores of a slot.
    """
    slots = [int(index) for kind, _, index in (name.partition(":") for name in devices) if kind == "cpu"]
    numbers = (slot * num_threads + thread for slot in slots for thread in range(num_threads))
    return frozenset(cores[number % len(cores)] for number in numbers)
