"""An explanation for the terminal."""

import textwrap
from collections.abc import Sequence

from rlinf_sched.describe import index_ranges
from rlinf_sched.explain.explanation import PlanExplanation
from rlinf_sched.explain.memory import handed_over, peak_bytes
from rlinf_sched.explain.quantities import gib, seconds

WIDTH = 110
BAR_WIDTH = 40


def explanation_text(explanation: PlanExplanation, *, width: int = WIDTH) -> str:
    """Tables of the plan, its critical path, the modes and what-if answers, and the plan in sentences; wrapped to a
    width where possible."""
    parts = [
        "\n".join(_wrapped(sentence, "", width) for sentence in explanation.sentences),
        _titled("plan", _plan_rows(explanation), right=(2, 3, 6, 7, 8), width=width),
        _titled("critical path", _path_rows(explanation), right=(1, 2), width=width),
        _titled("modes", _mode_rows(explanation), right=(1, 2), width=width),
        _titled("what if", _answer_rows(explanation), right=(1, 2), width=width),
        "\n".join(_wrapped(note, "note: ", width) for note in explanation.notes),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _plan_rows(explanation: PlanExplanation) -> list[tuple[str, ...]]:
    plan = explanation.plan
    times = ("computes", "of the time") if explanation.problem.flow.max_staleness else ("from", "to")
    rows = [("stage", "devices", "ranks", "items at a time", "offload", "turn", *times, "peak memory")]
    for stage in plan.stages:
        rows.append(
            (
                stage.stage,
                index_ranges(stage.devices) or "host",
                str(stage.num_ranks),
                f"{handed_over(explanation.problem, stage):,}",
                "yes" if stage.offload else "no",
                str(stage.turn + 1),
                *_times(explanation, stage.stage),
                gib(peak_bytes(explanation.problem, plan, stage.stage)) if stage.devices else "",
            )
        )
    return rows


def _times(explanation: PlanExplanation, stage: str) -> tuple[str, str]:
    """When the stage computes; if steps overlap, for how long in each."""
    spans = explanation.spans
    if explanation.problem.flow.max_staleness:
        share = spans.busy_share(stage)
        return seconds(share * spans.step_s), f"{share:.0%}"
    mine = spans.of_stage(stage) & spans.is_kind("compute", "step")
    if not mine.any():
        return "", ""
    return seconds(float(spans.start_s[mine].min())), seconds(float(spans.end_s[mine].max()))


def _path_rows(explanation: PlanExplanation) -> list[tuple[str, ...]]:
    return [
        (part.label, seconds(part.seconds), f"{part.share:.0%}", "#" * round(part.share * BAR_WIDTH))
        for part in explanation.path
    ]


def _mode_rows(explanation: PlanExplanation) -> list[tuple[str, ...]]:
    chosen = explanation.modes[0]
    rows = [("mode", "step", "against the plan", "why")]
    for row in explanation.modes:
        against = "chosen" if row.is_chosen else f"{row.step_s / chosen.step_s - 1:+.1%}"
        rows.append((row.mode, seconds(row.step_s), against, row.reason))
    return rows


def _answer_rows(explanation: PlanExplanation) -> list[tuple[str, ...]]:
    if not explanation.answers:
        return []
    rows = [("question", "step", "devices", "answer")]
    for answer in explanation.answers:
        step = "does not fit" if answer.step_s is None else seconds(answer.step_s)
        rows.append((answer.question, step, f"{answer.num_devices:,}", answer.text))
    return rows


def _titled(title: str, rows: Sequence[tuple[str, ...]], *, right: Sequence[int], width: int) -> str:
    """Columns of equal width; long texts in the last column are wrapped below themselves."""
    if not rows:
        return ""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(space) if i in right else cell.ljust(space)
            for i, (cell, space) in enumerate(zip(row, widths, strict=False))
        ]
        head = "  ".join(["", *cells, ""])
        room = max(30, width - len(head))
        last = textwrap.wrap(row[-1].replace("\n", " "), room, break_long_words=False) or [""]
        lines += [(head + last[0]).rstrip(), *(" " * len(head) + rest for rest in last[1:])]
    return "\n".join([title, *lines])


def _wrapped(text: str, head: str, width: int) -> str:
    return textwrap.fill(text, width, initial_indent=head, subsequent_indent=" " * len(head), break_long_words=False)
