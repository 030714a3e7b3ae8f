"""The check of a number against its range; without torch, for programs that do without."""

from rlinf_algos.errors import AlgosError


def check_range(name: str, value: float, *, low: float, high: float = float("inf"), why: str) -> None:
    """Raises `AlgosError` unless `low <= value <= high`."""
    if not low <= value <= high:
        allowed = f"at least {low}" if high == float("inf") else f"between {low} and {high}"
        raise AlgosError(f"{name}={value} must be {allowed}: {why}")
