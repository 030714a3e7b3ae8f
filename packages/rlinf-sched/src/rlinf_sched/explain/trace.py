"""Exports the predicted timeline as Chrome trace events for Perfetto (ui.perfetto.dev), like the trace of a run.

A worker group is a "process" of the trace and a rank a "thread"; counters show how many devices compute. Format: "Trace
Event Format", the object form, by the Chromium authors.
"""

import json
from typing import Any

import numpy as np

from rlinf_sched.describe import index_ranges
from rlinf_sched.explain.spans import KINDS, Spans, device_groups, usage
from rlinf_sched.flow_graph import FlowGraph
from rlinf_sched.plan import Plan

CATEGORIES = {"compute": "stage", "step": "stage", "onload": "lease", "offload": "lease", "sync": "sync"}
"""Kind of span -> its category, the same as in the trace of a run; transfers have the category "channel"."""
NUM_SAMPLES = 500
"""Points at which each counter is sampled."""


def trace_json(spans: Spans, plan: Plan, flow: FlowGraph) -> str:
    """The trace as JSON text; times in microseconds."""
    events = [*_names(plan, flow), *_events(spans, plan, flow), *_counters(spans, plan)]
    lines = ",\n".join(json.dumps(event, ensure_ascii=False) for event in events)
    return f'{{"displayTimeUnit": "ms", "traceEvents": [\n{lines}\n]}}\n'


def _names(plan: Plan, flow: FlowGraph) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    for pid, (worker, names) in enumerate(flow.workers.items(), start=1):
        events.append({"name": "process_name", "ph": "M", "pid": pid, "tid": 0, "args": {"name": worker}})
        stage = plan.stage(names[0])
        for rank in range(stage.num_ranks):
            devices = stage.devices_of(rank)
            where = f"device {index_ranges(devices)}" if devices else "host"
            label = f"{worker}/{rank}, {where}"
            events.append({"name": "thread_name", "ph": "M", "pid": pid, "tid": rank, "args": {"name": label}})
    return events


def _events(spans: Spans, plan: Plan, flow: FlowGraph) -> list[dict[str, Any]]:
    pids = {worker: pid for pid, worker in enumerate(flow.workers, start=1)}
    pid_of_stage = [pids[flow.stage(name).worker] for name in spans.stages]
    # Both ends are truncated alike; otherwise consecutive spans would overlap by a rounding error, and be dropped.
    starts_us, ends_us = (np.floor(times_s * 1e6).astype(int).tolist() for times_s in (spans.start_s, spans.end_s))
    events = []
    for i in np.argsort(spans.start_s, kind="stable"):
        kind, stage = KINDS[int(spans.kind[i])], int(spans.stage[i])
        events.append(
            {
                "name": spans.stages[stage] if kind == "compute" else f"{spans.stages[stage]}: {kind}",
                "cat": CATEGORIES.get(kind, "channel"),
                "ph": "X",
                "ts": starts_us[i],
                "dur": ends_us[i] - starts_us[i],
                "pid": pid_of_stage[stage],
                "tid": int(spans.rank[i]),
                "args": {"num_items": int(spans.num_items[i])} if spans.num_items[i] else {},
            }
        )
    return events


def _counters(spans: Spans, plan: Plan) -> list[dict[str, Any]]:
    edges_s = np.linspace(0.0, spans.length_s, NUM_SAMPLES + 1)
    events = []
    for group in device_groups(plan):
        if not group.devices:
            continue
        name = f"computing on devices {index_ranges(group.devices)}"
        by_stage = {stage: busy for stage, busy in usage(spans, plan, group, edges_s).items() if stage in group.stages}
        for i in range(NUM_SAMPLES):
            values = {stage: round(float(busy[i]), 3) for stage, busy in by_stage.items()}
            events.append({"name": name, "ph": "C", "ts": round(float(edges_s[i]) * 1e6, 1), "pid": 0, "args": values})
    return events
