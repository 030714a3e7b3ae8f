"""What the steps of a run compute: tokens a second, and the share of the GPUs' peak that stages reach."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlinf.machine import InstalledGpu
from rlinf_sched import Plan
from rlinf_sched.derive import ModelShape, find_gpu, sheet_of

COMPUTED, ATTENDED = "computed_tokens/", "attended_tokens/"
"""Totals of a stage, see `Worker.count_tokens`."""
GENERATES = "rollout"
"""The stage whose tokens are those of the step."""


class Throughput:
    """Of the steps of a run.

    Args:
        shapes: stage -> shape of its model, as far as they are known.
        gpus: those of the run. Of a kind without a datasheet here, or of several kinds, no peak is known.
    """

    def __init__(self, shapes: Mapping[str, ModelShape], gpus: Sequence[InstalledGpu]) -> None:
        sheet = sheet_of(gpu.name for gpu in gpus)
        self._shapes, self._peak_flops_per_s = shapes, find_gpu(sheet).flops_per_s if sheet else 0.0

    def of(
        self, metrics: Mapping[str, float], stage_s: Mapping[str, float], step_s: float, plan: Plan
    ) -> dict[str, float]:
        """The metrics `perf/...` of a step.

        Args:
            metrics: as the flow has measured them, with the totals.
            stage_s: stage -> computing time, summed over its ranks.
            step_s: wall time.
        """
        measured: dict[str, float] = {}
        num_devices = len({device for stage in plan.stages for device in stage.devices})
        if (tokens := metrics.get(COMPUTED + GENERATES, 0.0)) and step_s > 0:
            measured["perf/tokens_per_s"] = tokens / (step_s * max(num_devices, 1))
        for stage in plan.stages:
            shape, tokens = self._shapes.get(stage.stage), metrics.get(COMPUTED + stage.stage, 0.0)
            device_s = stage_s.get(stage.stage, 0.0) * len(stage.devices) / stage.num_ranks
            if shape and tokens and device_s > 0 and self._peak_flops_per_s:
                operations = tokens * shape.forward_flops(metrics[ATTENDED + stage.stage] / tokens)
                measured[f"perf/mfu/{stage.stage}"] = operations / (device_s * self._peak_flops_per_s)
        return measured


def without_totals(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics that a run records."""
    return {name: value for name, value in metrics.items() if not name.startswith((COMPUTED, ATTENDED))}
