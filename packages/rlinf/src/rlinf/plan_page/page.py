"""Puts the page of a plan together: what would happen, how long it takes, why, and what else was weighed."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from rlinf.plan_page.gantt import draw_gantt
from rlinf.plan_page.memory import draw_memory
from rlinf.report import html
from rlinf.report.axes import percent, seconds
from rlinf_sched.describe import ranges
from rlinf_sched.explain import Explanation
from rlinf_sched.explain.quantities import counted

NUM_COLORS = 7


def render(explanation: Explanation) -> str:
    """The page; it loads nothing from anywhere."""
    stages = [stage.stage for stage in explanation.plan.stages]
    colors = {stage: f"var(--c{i % NUM_COLORS})" for i, stage in enumerate(stages)}
    colors |= {"switch": "var(--wait)", "sync": "var(--sync)"}
    name = explanation.problem.flow.name
    body = [
        _header(explanation),
        _headline(explanation),
        _notes(explanation),
        _words(explanation),
        _timeline(explanation, colors),
        _critical_path(explanation, colors),
        _modes(explanation),
        _what_if(explanation),
        _plan(explanation),
        draw_memory(explanation, colors),
        html.section("Plan as data", html.folded("JSON", f"<pre>{escape(explanation.plan.to_json())}</pre>")),
    ]
    footer = "Written by rlinf plan. Times are predictions; trace.json beside this page opens in ui.perfetto.dev."
    return html.document(f"{name} - plan", body, footer=footer)


def _header(explanation: Explanation) -> str:
    cluster = escape(explanation.problem.cluster.describe())
    return (
        f"<header><h1>{escape(explanation.problem.flow.name)}"
        f'<span class="badge good">{escape(explanation.plan.mode)}</span></h1>'
        f'<div class="sub">Execution plan for {cluster}</div></header>'
    )


def _headline(explanation: Explanation) -> str:
    problem, step_s = explanation.problem, explanation.step_s
    compute = {stage.name for stage in problem.flow.stages}
    num_devices = sum(len(use.devices) for use in explanation.groups)
    busy = sum(
        share * len(use.devices)
        for use in explanation.groups
        for label, share in use.busy_share.items()
        if label in compute
    )
    overlap = problem.flow.max_staleness > 0
    cells = [
        ("fact main", "predicted time from step to step" if overlap else "predicted time of a step", seconds(step_s)),
        ("fact", "items a second", f"{problem.num_items / step_s:,.3g} <small>of {problem.num_items:,} a step</small>"),
        ("fact", "devices", f"{num_devices:,}"),
    ]
    if num_devices:
        cells.append(("fact", "of them computing, on average", percent(busy / num_devices)))
    parts = [
        f'<div class="{kind}"><div class="label">{escape(label)}</div><div class="value">{value}</div></div>'
        for kind, label, value in cells
    ]
    return f'<div class="facts">{"".join(parts)}</div>'


def _notes(explanation: Explanation) -> str:
    items = "".join(f"<li>{escape(note)}</li>" for note in explanation.notes)
    return f'<section class="notes"><h2>Be careful</h2><ul>{items}</ul></section>' if items else ""


def _words(explanation: Explanation) -> str:
    return html.section("In plain words", *(f"<p>{escape(sentence)}</p>" for sentence in explanation.sentences))


def _timeline(explanation: Explanation, colors: Mapping[str, str]) -> str:
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
    return html.section(title, html.color_key(entries, has_waits=False), draw_gantt(explanation, colors), note=note)


def _critical_path(explanation: Explanation, colors: Mapping[str, str]) -> str:
    rows = [
        f'<tr><td>{escape(part.label)}</td><td class="n">{seconds(part.seconds)}</td>'
        f'<td class="n">{percent(part.share)}</td><td class="share">'
        f'<div style="width:{part.share:.2%};background:{colors.get(part.label, "var(--wait)")}"></div></td></tr>'
        for part in explanation.path
    ]
    head = '<tr><th>waiting for</th><th class="n">time</th><th class="n">share</th><th></th></tr>'
    return html.section(
        "Critical path",
        f'<div class="wide"><table><thead>{head}</thead><tbody>{"".join(rows)}</tbody></table></div>' if rows else "",
        note="The chain of work that decides how long the step takes. Only what is on it is worth making faster.",
    )


def _modes(explanation: Explanation) -> str:
    fastest = explanation.modes[0].step_s
    slowest = max(row.step_s for row in explanation.modes)
    rows = [
        f"<tr><td>{'<b>' if row.is_chosen else ''}{escape(row.mode)}{'</b>' if row.is_chosen else ''}</td>"
        f'<td class="n">{seconds(row.step_s)}</td>'
        f'<td class="n">{"chosen" if row.is_chosen else f"{row.step_s / fastest - 1:+.1%}"}</td>'
        f'<td class="mode"><div style="width:{row.step_s / slowest:.1%};'
        f'background:var({"--c0" if row.is_chosen else "--wait"})"></div></td>'
        f"<td>{escape(row.reason)}</td></tr>"
        for row in explanation.modes
    ]
    head = '<tr><th>mode</th><th class="n">step</th><th class="n">against the plan</th><th></th><th>why</th></tr>'
    return html.section(
        "Modes",
        f'<div class="wide"><table><thead>{head}</thead><tbody>{"".join(rows)}</tbody></table></div>',
        note="The best plan of each mode, by the planner's own prediction.",
    )


def _what_if(explanation: Explanation) -> str:
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
    return html.section("What if", html.table(columns, rows, numeric=(1, 2)) if rows else "", note=note)


def _plan(explanation: Explanation) -> str:
    flow = explanation.problem.flow
    rows = []
    for stage in explanation.plan.stages:
        edges = flow.stage(stage.stage)
        rows.append(
            (
                stage.stage,
                ", ".join(edges.reads),
                ", ".join(edges.writes),
                ranges(stage.devices) or "host",
                f"{stage.num_ranks:,}",
                f"{stage.granularity:,}" if stage.granularity else "whole batch",
                "yes" if stage.offload else "no",
                str(stage.turn + 1),
            )
        )
    columns = ("stage", "reads", "writes", "devices", "ranks", "items at a time", "offloads", "turn")
    edges = [f"{edge.source} \N{RIGHTWARDS ARROW} {edge.target}" for edge in flow.weight_edges]
    weights = f'<p class="sub after">Weights: {escape(", ".join(edges))}.</p>' if edges else ""
    return html.section("Plan", html.table(columns, rows, numeric=(4,)), weights)
