"""What the devices of a timeline do, span by span."""

import numpy as np

from rlinf_sched.simulator import Timeline
from rlinf_sched.simulator.timeline import SpanKind


def device_seconds(timeline: Timeline, *kinds: SpanKind) -> np.ndarray:
    """[devices] float64: seconds in which at least one span of these kinds holds the device."""
    held = [[] for _ in range(timeline.num_devices)]
    for stage in timeline.stages:
        for kind in kinds:
            for span in timeline.of(stage, kind):
                for device in timeline.devices_of(stage, int(timeline.rank[span])):
                    held[device].append((timeline.start_s[span], timeline.end_s[span]))
    seconds = np.zeros(timeline.num_devices)
    for device, intervals in enumerate(held):
        until = 0.0
        for start_s, end_s in sorted(intervals):
            seconds[device] += max(0.0, end_s - max(start_s, until))
            until = max(until, end_s)
    return seconds
