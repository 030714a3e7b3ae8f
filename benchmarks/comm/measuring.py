"""Several sides of one comparison, in turn, recorded where pytest-benchmark keeps them.

`extra_info` of a benchmark then holds: num_bytes (a hand-over or a run moves so many), limit (the side that stands for
what the machine can do), and for each side its median and best time over the rounds, GB/s, and the limit's time over
its own: of the medians, and the median of the ratios within a round, which a drift of the load does not move.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

Side = Callable[[], object]
_SHORT_BURST, _SHORT_S = 50, 0.02


def measure(
    benchmark: Any,
    sides: Mapping[str, Side],
    *,
    subject: str,
    num_rounds: int,
    num_warmup: int = 1,
    num_bytes: int = 0,
    burst: int = 1,
    limit: str | None = None,
    target: str = "",
) -> None:
    """Times the sides round by round, prints them and records them; pytest-benchmark itself times `subject` once.

    Args:
        burst: Calls of a side in a row (50 of one that takes next to no time), of which the first is kept apart: it
            finds processes asleep and caches full of what the other sides have left. With 1 there is no such first.
        limit: The side that the shares refer to; the subject when it is not given, so that they are speed-ups of it.
        target: What was asked for, for the table.
    """
    times_s: dict[str, list[float]] = {name: [] for name in sides}
    first_s: dict[str, list[float]] = {name: [] for name in sides}
    for round_index in range(num_warmup + num_rounds):
        for name, side in sides.items():
            spent_s = _seconds_in_a_row(side, burst)
            if round_index >= num_warmup:
                first_s[name].append(spent_s[0])
                times_s[name].append(statistics.median(spent_s[min(1, burst - 1) :]))
    of = times_s[limit or subject]
    rows = {}
    for name, times in times_s.items():
        median_s = statistics.median(times)
        rows[name] = {
            "median_us": round(median_s * 1e6, 2),
            "best_us": round(min(times) * 1e6, 2),
            "share": round(statistics.median(of) / median_s, 4),
            "share_by_round": round(statistics.median(a / b for a, b in zip(of, times, strict=True)), 4),
        }
        if burst > 1:
            rows[name]["first_us"] = round(statistics.median(first_s[name]) * 1e6, 2)
        if num_bytes:
            rows[name]["gb_per_s"] = round(num_bytes / median_s / 1e9, 3)
    benchmark.extra_info.update(
        sides=rows,
        subject=subject,
        limit=limit,
        target=target,
        num_bytes=num_bytes,
        num_rounds=num_rounds,
        burst=burst,
        load=round(os.getloadavg()[0], 2),
    )
    print(f"\n{benchmark.name}, {num_bytes:,} bytes, {num_rounds} rounds, load {os.getloadavg()[0]:.1f}")
    for name, row in rows.items():
        rate = f"{row['gb_per_s']:8.2f} GB/s" if num_bytes else ""
        print(
            f"  {name:<36} {row['median_us']:12.1f} us (best {row['best_us']:12.1f}) {rate}  "
            f"{limit or subject} takes {row['share']:.3f} of it, by round {row['share_by_round']:.3f}"
        )
    benchmark.pedantic(sides[subject], rounds=1)


def _seconds_in_a_row(side: Side, burst: int) -> list[float]:
    spent_s = [_seconds(side) for _ in range(burst)]
    while burst > 1 and len(spent_s) < _SHORT_BURST and sum(spent_s) < _SHORT_S:
        spent_s.append(_seconds(side))
    return spent_s


def _seconds(side: Side) -> float:
    start_s = time.perf_counter()
    side()
    return time.perf_counter() - start_s
