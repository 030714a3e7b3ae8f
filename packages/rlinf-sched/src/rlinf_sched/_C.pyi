# ruff: noqa: N999 - the module is private, and named so
"""Types of the native module (csrc/sched). Private to this package."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

def stage_times(
    *,
    batching: int,
    seconds: np.ndarray,
    costs: np.ndarray,
    max_items: int,
    num_steps: int,
    fractions: Sequence[float],
    num_instances: np.ndarray,
    sizes: np.ndarray,
) -> np.ndarray:
    """float64 [cases, fractions + 3]: see csrc/sched/planner/stage_times.h."""

class Columns:
    def __init__(self, *, num_pools: int, num_out: int, num_edges: int) -> None: ...

class Limits:
    def __init__(
        self,
        *,
        devices: list[float],
        memory: list[float],
        rest_resident: list[float],
        rest_peak: list[float],
        steps_under_way: int,
        bound_s: float,
        rest_area: float,
        tolerance_s: float,
        tolerance_share: float,
        may_mix: bool,
        most_rows: int = 0,
    ) -> None: ...

class Join:
    def __init__(
        self,
        *,
        kind: int,
        before_part: int,
        feeds: bool,
        moved_s: float,
        waits: float,
        syncs: list[bool],
        sync_latency_s: float,
        sync_bytes_per_s: float,
        mixes: bool,
    ) -> None: ...

class Front:
    """Candidates for a part of a flow, none as good as another in every column. See csrc/sched/planner/front.h."""

    def __init__(self, columns: Columns, limits: Limits, *, num_groups: int) -> None: ...
    def offer(self, rows: np.ndarray, signatures: np.ndarray, is_mixed: np.ndarray, numbers: np.ndarray) -> None: ...
    def offer_joins(self, before: Front, after: Front, join: Join, forget: list[bool]) -> None: ...
    def best_joins(
        self, before: Front, after: Front, join: Join, *, count: int
    ) -> list[tuple[float, float, bool, tuple[int, int, int, int]]]:
        """(step_s, sync_s, is_mixed, origin): the best of those that mix and of those that do not."""
    def __len__(self) -> int: ...
    @property
    def was_thinned(self) -> bool: ...
    @property
    def rows(self) -> np.ndarray:
        """float64 [size, width]."""
    @property
    def steps_s(self) -> np.ndarray:
        """float64 [size]: seconds of a step, of rows that are whole plans."""
    @property
    def is_mixed(self) -> np.ndarray: ...
    @property
    def origins(self) -> np.ndarray:
        """int32 [size, 4]: index into planner.tree.JOINS (-1: given), earlier part, its row, the row of the later."""

class PlanTimer:
    """Times many plans of one problem. See csrc/sched/planner/plan_timer.h."""

    def __init__(
        self,
        arrays: Mapping[str, np.ndarray],
        *,
        names: Sequence[str],
        num_items: int,
        num_steps: int,
        max_staleness: int,
        tables: Sequence[np.ndarray],
        node_of: Sequence[int],
        edge_bytes: Sequence[float],
        sync_bytes: Sequence[float],
        sync_latency_s: Sequence[float],
        sync_ends: Sequence[int],
        latency_s: float,
        node_bytes_per_s: float,
        network_bytes_per_s: float,
    ) -> None: ...
    def add(
        self,
        *,
        devices: Sequence[int],
        num_instances: int,
        hand_over: int,
        room: int,
        whole: bool,
        step_s: float,
        onload_s: float,
        offload_s: float,
        table: int,
    ) -> int: ...
    def step_s(self, places: Sequence[int], most_s: float) -> float: ...

class Standstill(RuntimeError): ...

def simulate(
    arrays: Mapping[str, np.ndarray],
    *,
    names: Sequence[str],
    num_items: int,
    num_steps: int,
    max_staleness: int,
    num_devices: int,
) -> dict[str, Any]: ...
