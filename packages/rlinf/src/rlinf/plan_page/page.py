"""Builds the page of a plan: predicted timeline, times, reasons and alternatives."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape

from rlinf.plan_page.gantt import draw_gantt
from rlinf.plan_page.memory import draw_memory, memory_by_kind
from rlinf.planning.memory import Load
from rlinf.report import html
from rlinf.report.axes import percent
from rlinf_sched.explain import PlanExplanation, counted, seconds

NUM_COLORS = 7


def render(explanation: PlanExplanation, loads: Sequence[Load] = ()) -> str:
    """Returns the page, without external resources.

    Args:
        loads: memory of the ranks by kind, if known.
    """
    plan, name = explanation.plan, explanation.problem.flow.name
    plan_json = plan.to_json()
    stages = [stage.stage for stage in plan.stages]
    colors = {stage: f"var(--c{i % NUM_COLORS})" for i, stage in enumerate(stages)}
    colors |= {"switch": "var(--wait)", "sync": "var(--sync)"}
    body = [
        html.header(name, f"Execution plan for {explanation.problem.cluster.describe()}", badge=plan.mode, look="good"),
        _headline(explanation),
        html.notes("Be careful", explanation.notes),
        html.section("In plain words", *(f"<p>{escape(sentence)}</p>" for sentence in explanation.sentences)),
        _timeline(explanation, colors),
        _critical_path(explanation, colors),
        _modes(explanation),
        _what_if(explanation),
        html.section("Plan", html.plan_table(json.loads(plan_json), json.loads(explanation.problem.flow.to_json()))),
        draw_memory(explanation, colors),
        memory_by_kind(loads),
        html.section("Plan as data", html.folded("JSON", f"<pre>{escape(plan_json)}</pre>")),
    ]
    footer = "Written by rlinf plan. Times are predictions; trace.json beside this page opens in ui.perfetto.dev."
    return html.document(f"{name} - plan", body, footer=footer)


def _headline(explanation: PlanExplanation) -> str:
    problem, step_s = explanation.problem, explanation.step_s
    compute = {stage.name for stage in problem.flow.stages}
    num_devices = sum(len(use.devices) for use in explanation.groups)
    busy = sum(
        share * len(use.devices)
        for use in explanation.groups
        for label, share in use.busy_share.items()
        if label in compute
    )
    main = "predicted time from step to step" if problem.flow.max_staleness else "predicted time of a step"
    items = html.Raw(f"{problem.num_items / step_s:,.3g} <small>of {problem.num_items:,} a step</small>")
    cells = [(main, seconds(step_s)), ("items a second", items), ("devices", f"{num_devices:,}")]
    if num_devices:
        cells.append(("of them computing, on average", percent(busy / num_devices)))
    return html.boxes(cells, main=main)


def _timeline(explanation: PlanExplanation, colors: Mapping[str, str]) -> str:
    spans = explanation.spans
    entries = [(stage, colors[stage]) for stage in colors if stage in spans.stages]
    if spans.is_kind("onload", "offload").any():
        entries.append(("moving state", colors["switch"]))
    if spans.is_kind("sync").any():
        entries.append(("weight sync", colors["sync"]))
    title = "Timeline of one step"
    note = "Height is the share of the row's devices that a stage keeps busy; empty means idle."
    if explanation.problem.flow.max_staleness:
        title = f"Timeline of the steady state, {counted(spans.num_steps, 'step')}"
        note += " From the end of a step to that of a later one: what is generated here is trained on afterwards."
    return html.section(title, html.color_key(entries), draw_gantt(explanation, colors), note=note)


def _critical_path(explanation: PlanExplanation, colors: Mapping[str, str]) -> str:
    rows = [
        (part.label, seconds(part.seconds), percent(part.share), html.share_bar(part.share, color))
        for part in explanation.path
        for color in (colors.get(part.label, "var(--wait)"),)
    ]
    return html.section(
        "Critical path",
        html.table(("waiting for", "time", "share", ""), rows, numeric=(1, 2)),
        note="The chain of work that decides how long the step takes. Only what is on it is worth making faster.",
    )


def _modes(explanation: PlanExplanation) -> str:
    fastest = explanation.modes[0].step_s
    slowest = max(row.step_s for row in explanation.modes)
    rows = [
        (
            html.Raw(f"<b>{escape(row.mode)}</b>") if row.is_chosen else row.mode,
            seconds(row.step_s),
            "chosen" if row.is_chosen else f"{row.step_s / fastest - 1:+.1%}",
            html.share_bar(row.step_s / slowest, "var(--c0)" if row.is_chosen else "var(--wait)"),
            row.reason,
        )
        for row in explanation.modes
    ]
    return html.section(
        "Modes",
        html.table(("mode", "step", "against the plan", "", "why"), rows, numeric=(1, 2)),
        note="The best plan of each mode, by the planner's own prediction.",
    )


def _what_if(explanation: PlanExplanation) -> str:
    rows = [
        (
            answer.question,
            "does not fit" if answer.step_s is None else seconds(answer.step_s),
            f"{answer.num_devices:,}",
            answer.text,
            answer.meaning,
        )
        for answer in explanation.answers
    ]
    columns = ("what if", "step", "devices", "answer", "what was changed")
    note = "Each line is a plan of its own, made for the changed problem."
    return html.section("What if", html.table(columns, rows, numeric=(1, 2)), note=note)
