"""What `benchmarks.gpu_check` should find on an H100: each figure with its bound, its estimate, and where to look if it
is not so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Expected:
    """A figure of a part's result."""

    part: str
    figure: str
    path: str
    """Keys and indices in the part's result, separated by slashes."""
    bound: Literal["at least", "at most"]
    value: float
    estimate: str
    """What the arithmetic says, or an earlier measurement."""
    otherwise: str

    def measured(self, results: Mapping[str, Any]) -> float | None:
        """The figure; None where its part has not run, or has not got so far."""
        value: Any = results.get(self.part, {}).get("result")
        for key in self.path.split("/"):
            if isinstance(value, Mapping):
                value = value.get(key)
            elif isinstance(value, Sequence) and key.isdigit() and int(key) < len(value):
                value = value[int(key)]
            else:
                return None
        return value

    def holds(self, figure: float) -> bool:
        return figure >= self.value if self.bound == "at least" else figure <= self.value


COPIES = "critical, flat copies"
MAPS = "`maps` or `allocations` above 0: memory is mapped anew; a long `take`: digests hold the copy up"
LAUNCHES = "compare with trainer_gpu without `--compiled-alone`; a note says if compilation failed"
CONSTANTS = "`stages_s` of the workloads says which constant of docs/calibration.md is off"
ROLES = "`memory` of the workloads says which role"
SHARE, RATIO, WAITS = "share_of_peak/actor, compiled", "reference_over_actor", "host_waits/actor, compiled"
TRAINED = "0.4 where launches hide behind arithmetic; 0.25 and 0.32 if they add to it; 0.14 and 0.19 before"
THIRD = "one forward pass of three; 0.8 before"
SUMMARY = "findings/summary"

EXPECTED = (
    Expected("sync, bfloat16", "lent, flat copies", f"lent/{COPIES}", "at most", 1.3, "1.1; 16.5 before", MAPS),
    Expected("sync, bfloat16", "packed, flat copies", f"packed/{COPIES}", "at most", 2.0, "2.2; 16.5 before", MAPS),
    Expected(
        "trainer", "0.5B, actor's share of the peak",
        f"findings/0.5B/{SHARE}", "at least", 0.35, TRAINED, LAUNCHES,
    ),
    Expected(
        "trainer", "1.5B, actor's share of the peak",
        f"findings/1.5B/{SHARE}", "at least", 0.4, TRAINED, LAUNCHES,
    ),
    Expected(
        "trainer", "0.5B, reference over actor",
        f"findings/0.5B/{RATIO}", "at most", 0.34, THIRD, "passes not packed",
    ),
    Expected(
        "trainer", "1.5B, reference over actor",
        f"findings/1.5B/{RATIO}", "at most", 0.34, THIRD, "passes not packed",
    ),
    Expected(
        "trainer", "0.5B, host waits of an update",
        f"findings/0.5B/{WAITS}", "at most", 16, "a constant", "`host_wait_places`",
    ),
    Expected(
        "steps", "median error of derived steps",
        f"{SUMMARY}/median_error", "at most", 0.1, "0.04 to 0.15 on three", CONSTANTS,
    ),
    Expected("steps", "worst error of derived steps", f"{SUMMARY}/worst_error", "at most", 0.25, "the same", CONSTANTS),
    Expected(
        "steps", "least predicted / measured memory",
        f"{SUMMARY}/least_memory_ratio", "at least", 1.0, "1.00, 1.04 on two", ROLES,
    ),
    Expected(
        "steps", "most predicted / measured memory",
        f"{SUMMARY}/most_memory_ratio", "at most", 1.1, "1.00, 1.04 on two", ROLES,
    ),
    Expected(
        "steps", "0.5B, SGLang's step over huggingface's",
        f"{SUMMARY}/sglang_over_huggingface/0.5B", "at most", 1.0, "0.8 derived; 1.4 to 2.3 before", CONSTANTS,
    ),
    Expected(
        "steps", "1.5B, SGLang's step over huggingface's",
        f"{SUMMARY}/sglang_over_huggingface/1.5B", "at most", 1.0, "0.8 derived", CONSTANTS,
    ),
    Expected(
        "sync, float32", "lent, flat copies",
        f"lent/{COPIES}", "at most", 2.0, "1.7: cast at 916 GB/s", MAPS,
    ),
    Expected(
        "sync, float32", "packed, flat copies",
        f"packed/{COPIES}", "at most", 3.0, "2.8: the same, and a copy", MAPS,
    ),
    Expected(
        "TRL", "0.5B, TRL's step over ours",
        "comparisons/0/median_of_ratios", "at least", 4.0, "2.56 before", "`flow_seconds_by_span`",
    ),
    Expected(
        "TRL, 1.5B", "1.5B, TRL's step over ours",
        "comparisons/0/median_of_ratios", "at least", 4.0, "not estimated", "`flow_seconds_by_span`",
    ),
    Expected(
        "SGLang alone", "0.5B, tokens a second of SGLang in the flow over those of SGLang alone",
        "comparisons/0/ratio_of_medians", "at least", 0.9, "1.16 on a CPU slot", "what passes between processes",
    ),
)  # fmt: skip
"""By importance, as the parts run."""


def judged(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each expected row with what was measured.

    Args:
        results: part -> {"result": JSON value}
    """
    rows: list[dict[str, Any]] = []
    for one in EXPECTED:
        figure = one.measured(results)
        holds = None if figure is None else one.holds(figure)
        expected = f"{one.bound} {one.value:g}"
        rows.append({"part": one.part, "figure": one.figure, "expected": expected, "measured": figure, "holds": holds})
        if holds is False:
            rows[-1]["otherwise"] = one.otherwise
    return rows


def table() -> str:
    """The table of benchmarks/README.md."""
    lines = ["| part | figure | on an H100 | estimate | if it is not so |", "|---|---|---|---|---|"]
    for one in EXPECTED:
        cells = (one.part, one.figure, f"{one.bound} {one.value:g}", one.estimate, one.otherwise)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
