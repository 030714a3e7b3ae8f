"""A predicted timeline as columns of spans, and the devices that each span holds."""

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from rlinf_sched.plan import Plan, StagePlan

Kind = Literal["compute", "step", "onload", "offload", "sync", "transfer"]
"""compute: on a hand-over. step: once after the last hand-over (optimizer). onload, offload: moving state. sync: new
weights. transfer: a hand-over in transit, which holds no device."""

KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Spans:
    """The activities of every rank over time, in one step or several. One entry of each array is one span."""

    step_s: float
    """Seconds between the ends of consecutive steps; their mean if steps overlap."""
    num_steps: int = 1
    """Steps that end within the spans; more than one only if steps overlap."""
    length_s: float
    """Seconds of everything shown: `step_s` for one step, about `num_steps` times that if steps overlap."""
    stages: tuple[str, ...]
    """Names of the stages; `stage` holds indices into this."""
    stage: np.ndarray
    """[n] integers, into `stages`."""
    rank: np.ndarray
    """[n] integers, instance of the stage."""
    kind: np.ndarray
    """[n] integers, into `KINDS`."""
    start_s: np.ndarray
    """[n] float64, from the beginning of the shown time."""
    end_s: np.ndarray
    """[n] float64."""
    num_items: np.ndarray
    """[n] integers, items of the span's hand-over; 0 where it has none."""

    def is_kind(self, *kinds: str) -> np.ndarray:
        """bool [n]."""
        return np.isin(self.kind, [KINDS.index(kind) for kind in KINDS if kind in kinds])

    def of_stage(self, name: str) -> np.ndarray:
        """bool [n]."""
        return self.stage == self.stages.index(name)

    def busy_share(self, name: str) -> float:
        """Fraction of the time, from 0 to 1, in which the stage's busiest instance computes."""
        mine = self.of_stage(name) & self.is_kind("compute", "step")
        busy_s = np.bincount(self.rank[mine], weights=self.end_s[mine] - self.start_s[mine])
        return float(busy_s.max(initial=0.0)) / self.length_s


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceGroup:
    """Devices with the same stages; a drawing can show all of them in one row."""

    devices: tuple[int, ...]
    """Ascending; empty for the host."""
    stages: tuple[str, ...]
    """Names of the stages, in the order of their turns."""


def device_groups(plan: Plan) -> list[DeviceGroup]:
    """The devices the plan uses, by the stages on them, in the order of the first stage; the host last."""
    ordered = sorted(plan.stages, key=lambda stage: stage.turn)
    carried: dict[int, list[str]] = {}
    for stage in ordered:
        for device in stage.devices:
            carried.setdefault(device, []).append(stage.stage)
    groups: dict[tuple[str, ...], list[int]] = {}
    for device in sorted(carried):
        groups.setdefault(tuple(carried[device]), []).append(device)
    on_host = tuple(stage.stage for stage in ordered if not stage.devices)
    on_devices = [DeviceGroup(devices=tuple(devices), stages=stages) for stages, devices in groups.items()]
    turn = {stage.stage: i for i, stage in enumerate(ordered)}
    on_devices.sort(key=lambda group: (turn[group.stages[0]], group.devices))
    return [*on_devices, DeviceGroup(devices=(), stages=on_host)] if on_host else on_devices


def usage(spans: Spans, plan: Plan, group: DeviceGroup, edges_s: np.ndarray) -> dict[str, np.ndarray]:
    """Number of a group's devices that each stage keeps busy, on average over each bin of time.

    Args:
        edges_s: [bins + 1] float64, ascending.

    Returns:
        stage -> [bins] float64 of devices (on the host: of ranks). Moving state and weights counts under "switch" and
        "sync".
    """
    busy = {}
    for name in group.stages:
        weights = _rank_weights(plan.stage(name), group)
        mine = spans.of_stage(name)
        for label, kinds in ((name, ("compute", "step")), ("switch", ("onload", "offload")), ("sync", ("sync",))):
            chosen = mine & spans.is_kind(*kinds)
            if chosen.any():
                covered = _covered(spans.start_s[chosen], spans.end_s[chosen], weights[spans.rank[chosen]], edges_s)
                busy[label] = busy.get(label, 0.0) + covered
    return busy


def _rank_weights(stage: StagePlan, group: DeviceGroup) -> np.ndarray:
    """[ranks] float64: devices of the group per busy rank."""
    if not group.devices:
        return np.ones(stage.num_ranks)
    inside = set(group.devices)
    share = min(1.0, len(stage.devices) / stage.num_ranks)
    return np.array([share * len(inside.intersection(stage.devices_of(r))) for r in range(stage.num_ranks)])


def _covered(start_s: np.ndarray, end_s: np.ndarray, weight: np.ndarray, edges_s: np.ndarray) -> np.ndarray:
    """[bins] float64: the sum of the weights of the active spans, averaged over each bin."""
    integral = _passed(start_s, weight, edges_s) - _passed(end_s, weight, edges_s)
    return np.maximum(np.diff(integral) / np.diff(edges_s), 0.0)


def _passed(times_s: np.ndarray, weight: np.ndarray, at_s: np.ndarray) -> np.ndarray:
    """[len(at_s)]: the sum of weight * (moment - time) over all times before a moment."""
    order = np.argsort(times_s, kind="stable")
    times_s, weight = times_s[order], weight[order]
    count = np.searchsorted(times_s, at_s)
    weights = np.concatenate(([0.0], np.cumsum(weight)))[count]
    return weights * at_s - np.concatenate(([0.0], np.cumsum(weight * times_s)))[count]
