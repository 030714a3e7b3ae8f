"""The busiest resources of a step, and the fraction of the step in which they compute."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from rlinf_sched.describe import index_ranges
from rlinf_sched.explain.cores import core_shares
from rlinf_sched.explain.from_timeline import MOVING_STATE
from rlinf_sched.explain.quantities import counted, listed
from rlinf_sched.explain.spans import Spans
from rlinf_sched.plan import Plan

if TYPE_CHECKING:
    from rlinf_sched.explain.explanation import PlanExplanation

WORTH_A_WORD = 0.005
"""Moving state and weight syncs are mentioned if they take at least this fraction of the step."""


def busiest_sentence(explanation: PlanExplanation) -> Iterator[str]:
    """The devices, host processes or cores that compute most, or the weight syncs if these take even longer.

    Of a group, the member that computes most counts, because it has the least slack.
    """
    spans = explanation.spans
    syncs = spans.is_kind("sync")
    synced = float(_covered(spans, syncs, np.zeros(int(syncs.sum()), dtype=int), 1)[0])
    candidates = [*_cores(explanation), *_devices(explanation, synced), *_host_processes(explanation)]
    most, sentence = max(candidates, key=lambda one: round(one[0], 3), default=(0.0, ""))
    if synced > max(most, WORTH_A_WORD):
        yield f"Weight syncs take {synced:.0%} of the time, longer than any device or process computes."
    elif sentence:
        yield sentence


def _cores(explanation: PlanExplanation) -> Iterator[tuple[float, str]]:
    """If processes need more cores than there are, devices and host processes are slow because of it, so cores come
    first."""
    cluster = explanation.problem.cluster
    for node, shares in core_shares(explanation.problem, explanation.plan, explanation.spans).items():
        share = min(sum(shares.values()), 1.0)
        of_node = f" of node {node}" if cluster.num_nodes > 1 else ""
        yield share, _computes(f"the {counted(cluster.cpu_cores, 'core')}{of_node}", cluster.cpu_cores, f"{share:.0%}")


def _devices(explanation: PlanExplanation, synced: float) -> Iterator[tuple[float, str]]:
    num_devices = explanation.problem.cluster.num_devices
    computes = device_shares(explanation.plan, explanation.spans, num_devices, "compute", "step")
    moves = device_shares(explanation.plan, explanation.spans, num_devices, "onload", "offload")
    for use in explanation.groups:
        mine = list(use.devices)
        beside = [f"{MOVING_STATE} takes {_between(moves[mine])}"] if moves[mine].max() >= WORTH_A_WORD else []
        beside += [f"weight syncs take {synced:.0%}"] if synced >= WORTH_A_WORD else []
        noun = "device" if len(mine) == 1 else "devices"
        share = _between(computes[mine])
        yield float(computes[mine].max()), _computes(f"{noun} {index_ranges(use.devices)}", len(mine), share, beside)


def _host_processes(explanation: PlanExplanation) -> Iterator[tuple[float, str]]:
    spans = explanation.spans
    for stage in explanation.plan.stages:
        if not stage.devices:
            mine = spans.of_stage(stage.stage) & spans.is_kind("compute", "step")
            shares = _covered(spans, mine, spans.rank[mine], stage.num_ranks)
            noun = "host process" if stage.num_ranks == 1 else f"{stage.num_ranks:,} host processes"
            yield float(shares.max()), _computes(f"the {noun} of {stage.stage}", stage.num_ranks, _between(shares))


def device_shares(plan: Plan, spans: Spans, num_devices: int, *kinds: str) -> np.ndarray:
    """[num_devices] float64: fraction of time in which at least one span of these kinds holds the device."""
    chosen, devices = [np.zeros(0, dtype=int)], [np.zeros(0, dtype=int)]
    for stage in plan.stages:
        if stage.devices:
            of_rank = np.array([stage.devices_of(rank) for rank in range(stage.num_ranks)])
            mine = np.flatnonzero(spans.of_stage(stage.stage) & spans.is_kind(*kinds))
            chosen.append(np.repeat(mine, of_rank.shape[1]))
            devices.append(of_rank[spans.rank[mine]].ravel())
    return _covered(spans, np.concatenate(chosen), np.concatenate(devices), num_devices)


def _covered(spans: Spans, chosen: np.ndarray, place: np.ndarray, num_places: int) -> np.ndarray:
    """[num_places] float64: fraction of time in which at least one of the chosen spans runs at a place.

    Args:
        place: [chosen] integers, the place of each span.
    """
    from_s = place * spans.length_s  # one place after the other
    order = np.argsort(spans.start_s[chosen] + from_s, kind="stable")
    start_s, end_s = (times_s[order] for times_s in (spans.start_s[chosen] + from_s, spans.end_s[chosen] + from_s))
    before_s = np.maximum.accumulate(np.concatenate([[0.0], end_s]))[:-1]
    fresh_s = np.maximum(end_s - np.maximum(start_s, before_s), 0.0)
    return np.bincount(place[order], weights=fresh_s, minlength=num_places) / spans.length_s


def _between(shares: np.ndarray) -> str:
    """`60%`, or `20% to 60%` where they differ."""
    least, most = f"{shares.min():.0%}", f"{shares.max():.0%}"
    return most if least == most else f"{least} to {most}"


def _computes(where: str, count: int, share: str, beside: list[str] | None = None) -> str:
    verb, who = ("is", "it computes") if count == 1 else ("are", "they compute")
    return f"The busiest {verb} {where}: {listed([f'{who} {share} of the time', *(beside or [])])}."
