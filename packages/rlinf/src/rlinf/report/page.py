"""Builds the report's page: configuration, results and timing of a run."""

from __future__ import annotations

import math
import shlex
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import cache
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rlinf.errors import INTERRUPTED
from rlinf.report import html
from rlinf.report.axes import number, percent
from rlinf.report.curves import MAX_POINTS, NUM_COLORS, draw
from rlinf.report.evaluations import films, success_by_task
from rlinf.report.metric_names import SCORES, curves, score_name
from rlinf.report.records import WORST, RunRecords, read_run
from rlinf.report.samples import samples
from rlinf.report.timeline import describe_busy, draw_timeline, last_steps
from rlinf.report.waits import WAIT, Waits, find_waits, steps_ahead
from rlinf.report.waits_section import draw_waits
from rlinf.run_folder.rows import write_file
from rlinf_sched.explain import gib, seconds

NO_BREAK = "\N{NO-BREAK SPACE}"

NUM_WORST = 6
"""Tokens with the largest mismatch that are shown."""

SCORE_TEXTS = {
    "accuracy": "accuracy on held-out problems",
    "reward": "mean reward on held-out problems",
    "success_at_end": "episodes that end in success, held-out seeds",
    "success_once": "episodes with success at any time",
    "loss": "loss on held-out examples",
    "token_accuracy": "most likely tokens in held-out examples",
    "preference_accuracy": "held-out pairs whose preferred answer has the larger reward",
}
BANDS = "Lines are means over neighbouring steps; the bands reach from their lowest to their highest value."
ARROW = "\N{RIGHTWARDS ARROW}"


def write_report(run_path: Path, output: Path | None = None) -> Path:
    """Writes the report of a run, finished, stopped or still running.

    Args:
        run_path: the run's folder.
        output: the page; `report.html` in the run's folder by default.
    Returns: the page's path.
    Raises: UserError if the folder holds no run.
    """
    records = read_run(Path(run_path))
    path = Path(run_path) / "report.html" if output is None else Path(output)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, render(records))
    return path


def render(records: RunRecords) -> str:
    """Returns the page, without external resources. Sections that cannot be built from the files show an error."""
    try:
        stages = records.stages()
    except (TypeError, KeyError, AttributeError):  # malformed plan.json, which its section reports
        stages = []
    colors = {stage: f"var(--c{i % NUM_COLORS})" for i, stage in enumerate(stages)}
    waits = cache(lambda: find_waits(records))
    parts: dict[str, Callable[[], str]] = {
        "Run": lambda: _header(records),
        "Scores": lambda: _headline(records),
        "Notes": lambda: html.notes("Notes and fall-backs", records.manifest.get("notes", [])),
        "Curves": lambda: _curves(records),
        "Success by task": lambda: success_by_task(records),
        "Films": lambda: films(records),
        "Timeline": lambda: _timeline(records, colors, waits()),
        "Who waited for whom": lambda: draw_waits(waits(), records),
        "Profiles": lambda: _profiles(records),
        "Time by stage": lambda: _time_by_stage(records, colors),
        "Engine and trainer": lambda: _trust(records),
        "Weight syncs": lambda: _weight_syncs(records),
        "Plan": lambda: _plan(records),
        "Predicted and measured": lambda: _plan_times(records),
        "Memory of the GPUs": lambda: _gpu_memory(records),
        "Samples": lambda: samples(records),
        "What ran": lambda: _what_ran(records),
    }
    footer = f"Written by rlinf report from {records.path.name}/; trace.json opens in ui.perfetto.dev" + (
        ", tensorboard/ in TensorBoard." if (records.path / "tensorboard").is_dir() else "."
    )
    body = [_part(title, draw) for title, draw in parts.items()]
    return html.document(f"{records.name} - run report", body, footer=footer)


def _part(title: str, draw: Callable[[], str]) -> str:
    try:
        return draw()
    except Exception as error:  # noqa: BLE001 - files may have any content; the page shows the error
        text = f"This part cannot be drawn from the files of the run: {type(error).__name__}: {error}"
        return html.section(title, f'<p class="sub">{escape(text)}</p>')


def _curves(records: RunRecords) -> str:
    main, rest = curves(records)
    note = BANDS if len(records.metrics) > MAX_POINTS else ""
    return html.section(
        "Curves", _figures(main), html.folded("Other metrics", _figures(rest)), note=note
    ) or html.section("Curves", '<p class="sub">No step was finished.</p>')


# -- sections ----------------------------------------------------------------------------------------------------------


def _header(records: RunRecords) -> str:
    config, manifest = records.config, records.manifest
    mode = config.get("mode") or records.plan.get("mode")
    algorithm = (config.get("algorithm") or {}).get("name")
    words = [config.get("job"), algorithm, mode, f"seed {config['seed']}" if "seed" in config else None]
    line = " \N{MIDDLE DOT} ".join(str(word) for word in words if word)
    failure = next((s["failure"] for s in manifest.get("sessions", [])[-1:] if "failure" in s), None)
    if failure == INTERRUPTED:
        return html.header(records.name, line, badge="stopped; --resume goes on with it")
    if failure is not None:
        why = f"<p><code>{escape(failure)}</code></p>"
        return html.header(records.name, line, badge="failed", look="bad", below=why)
    if records.result:
        return html.header(records.name, line, badge="finished", look="good")
    return html.header(records.name, line, badge="running, or stopped before its end")


def _headline(records: RunRecords) -> str:
    """Returns the scores before and after training, and its duration."""
    result, name = records.result, score_name(records)
    step_s = records.series("time/step_s")
    cells: list[tuple[str, str]] = []
    main = "" if name is None else SCORE_TEXTS.get(name, name)
    if name is not None:
        evaluations = records.series(name, evaluation=True).values
        before = result.get("before", evaluations[0] if evaluations else None)
        after = result.get("after", evaluations[-1] if evaluations else None)
        text = percent if name in SCORES else number
        if before is not None and after is not None:
            cells.append((main, _from_to(before, after, text)))
        for other in (score for score in SCORES if score != name):
            values = records.series(other, evaluation=True).values
            if values:
                cells.append((SCORE_TEXTS[other], _from_to(values[0], values[-1], percent)))
        if best := result.get("best"):
            cells.append((f"best checkpoint, {best['checkpoint']}", text(best["score"])))
    planned = (records.config.get("run") or {}).get("num_steps")
    of = f" <small>of {planned:,}</small>" if isinstance(planned, int) and planned != records.num_steps_done else ""
    cells.append(("training steps", html.Raw(f"{records.num_steps_done:,}{of}")))
    training_s = result.get("training_s") or max((row.get("time_s") or 0 for row in records.metrics), default=None)
    if training_s is not None:
        cells.append(("training time", seconds(training_s).replace(" ", NO_BREAK)))
    if len(step_s):
        cells.append(("time of a step, median", seconds(sorted(step_s.values)[len(step_s) // 2])))
    return html.boxes(cells, main=main)


def _from_to(before: float, after: float, text: Callable[[float], str]) -> html.Raw:
    return html.Raw(f"<small>{text(before)} {ARROW}</small> {text(after)}")


def _figures(drawings: list[Any]) -> str:
    figures = "".join(draw(curve) for curve in drawings)
    return f'<div class="curves">{figures}</div>' if figures else ""


def _timeline(records: RunRecords, colors: Mapping[str, str], waits: Waits | None) -> str:
    window = last_steps(records)
    if window is None:
        is_off = (records.config.get("run") or {}).get("trace") is False
        text = "run.trace is off." if is_off else "The trace holds no whole step."
        return html.section("Timeline", f'<p class="sub">{text}</p>')
    if waits is not None:
        window = window.with_waits(wait.to_span() for wait in waits.waits)
    used = {span.name for span in window.spans if span.category == "stage"}
    entries = [(stage, color) for stage, color in colors.items() if stage in used]
    if any(span.category == "sync" for span in window.spans):
        entries.append(("weight sync", "var(--sync)"))
    has_waits = any(span.category not in ("stage", "sync", WAIT) for span in window.spans)
    steps = [step + 1 for step, _, _ in window.steps]
    what = f"steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {steps[0]}"
    return html.section(
        f"Timeline of {what}",
        html.color_key(entries, has_waits=has_waits, has_step_waits=any(one.category == WAIT for one in window.spans)),
        draw_timeline(window, colors),
        note=describe_busy(window),
    )


def _profiles(records: RunRecords) -> str:
    """Returns links to the traces of `run.profile_steps`, beside the run's own timeline."""
    files = sorted((records.path / "profiles").glob("steps-*/*.json*"))
    if not files:
        return ""
    links = [
        (html.Raw(f'<a href="{quote(name)}">{escape(name)}</a>'), size_text)
        for file in files
        for name, size_text in [(file.relative_to(records.path).as_posix(), f"{file.stat().st_size / 2**20:.1f} MiB")]
    ]
    if (records.path / "trace.json").is_file():
        links.append((html.Raw('<a href="trace.json">trace.json</a>, the timeline of all workers'), ""))
    return html.section(
        "Profiles",
        html.table(("trace", "size"), links, numeric=(1,)),
        note="Traces of torch's profiler, one for each worker; save one and open it in ui.perfetto.dev.",
    )


def _time_by_stage(records: RunRecords, colors: Mapping[str, str]) -> str:
    rows = [
        (stage, color, sum(records.series(f"time/{stage}_s").values))
        for stage, color in [*colors.items(), ("sync", "var(--sync)")]
        if len(records.series(f"time/{stage}_s"))
    ]
    total_s = sum(spent_s for *_, spent_s in rows)
    if not total_s:
        return ""
    num_steps = len(records.metrics)
    cells = [
        (
            "weight sync" if stage == "sync" else stage,
            seconds(spent_s / num_steps),
            seconds(spent_s),
            percent(spent_s / total_s),
            html.share_bar(spent_s / total_s, color),
        )
        for stage, color, spent_s in sorted(rows, key=lambda row: -row[2])
    ]
    return html.section(
        "Time by stage",
        html.table(("stage", "a step", "in all", "share", ""), cells, numeric=(1, 2, 3)),
        note="Seconds of all ranks together, over the training steps; waiting is not in them.",
    )


def _trust(records: RunRecords) -> str:
    """Returns each session's verdict on the log-prob mismatch, and the tokens with the largest mismatch."""
    verdicts = [session["agreement"] for session in records.manifest.get("sessions", []) if "agreement" in session]
    parts = []
    for verdict in verdicts:
        look = "sub" if verdict["agrees"] else "mismatch"
        suspects = "".join(f"<li>{escape(suspect)}</li>" for suspect in verdict["suspects"])
        parts.append(f'<p class="{look}">Step {verdict["step"] + 1}: {escape(verdict["summary"])}.</p>')
        parts.append(f"<p>Usual suspects, in this order:</p><ol>{suspects}</ol>" if suspects else "")
    worst = sorted((row for row in records.samples if WORST in row), key=_gap, reverse=True)[:NUM_WORST]
    cells = [
        (
            f"{row['step'] + 1:,}" if "step" in row else "-",
            html.Raw(
                "{}<mark>{}</mark>{}".format(*(escape(str(row.get(name, ""))) for name in ("before", WORST, "after")))
            ),
            *(number(_nats(row.get(name))) for name in ("rollout_logprob", "actor_logprob")),
            number(_gap(row)),
        )
        for row in worst
    ]
    columns = ("step", "worst token, with the tokens around it", "by the engine", "by the trainer", "distance")
    return html.section(
        "Engine and trainer",
        *parts,
        html.table(columns, cells, numeric=(0, 2, 3, 4)),
        note="Log-probabilities of the sampled tokens, in nats, under the same weights." if parts or cells else "",
    )


def _gap(row: Mapping[str, Any]) -> float:
    """Returns the mismatch of a token in nats; NaN log-probabilities count as the largest."""
    gap = abs(_nats(row.get("rollout_logprob")) - _nats(row.get("actor_logprob")))
    return math.inf if math.isnan(gap) else gap


def _nats(value: Any) -> float:
    """Converts a value to float; NaN if it is not a number that a float holds."""
    return float(value) if isinstance(value, (int, float)) and abs(value) < 1e300 else math.nan


def _weight_syncs(records: RunRecords) -> str:
    """Summarizes the weight syncs of the whole trace, including evaluations and SFT warm-up."""
    spans: dict[tuple[str, str], list[float]] = defaultdict(list)
    for span in records.spans():
        if span.category == "sync":
            spans[span.name, span.worker].append(span.duration_s)
    rows = [
        (name, worker, f"{len(times):,}", seconds(sum(times) / len(times)), seconds(max(times)), seconds(sum(times)))
        for (name, worker), times in sorted(spans.items())
    ]
    columns = ("", "worker", "times", "mean", "longest", "in all")
    return html.section(
        "Weight syncs",
        html.table(columns, rows, numeric=(2, 3, 4, 5)),
        note="Every hand-over of weights that is in the trace; receiving includes waiting for the sender.",
    )


def _plan(records: RunRecords) -> str:
    reason = str(records.plan.get("reason", "")).strip().rstrip(".")
    return html.section(
        f"Plan: {records.plan.get('mode', 'by hand')}",
        html.plan_table(records.plan, records.flow),
        note=(f"{reason[:1].upper()}{reason[1:]}." if reason else "") + _ahead_text(records),
    )


def _ahead_text(records: RunRecords) -> str:
    """How far the planner lets generation run ahead, and the bound; empty where it had no choice."""
    bound = int(records.flow.get("max_staleness", 0))
    if not bound or not records.plan.get("prediction"):
        return ""
    ahead = steps_ahead(records)
    return f" Generation runs {ahead} step{'' if ahead == 1 else 's'} ahead of training, of at most {bound}."


def _plan_times(records: RunRecords) -> str:
    rows = []
    for plan in records.plan_times.get("plans", []):
        first, count = plan["first_step"], plan["num_steps"]
        if count:
            steps = f"{plan['mode']}, steps {first + 1} to {first + count}"
            rows.append((steps, "step", *_predicted_and_measured(plan["step"])))
            rows += [("", stage, *_predicted_and_measured(times)) for stage, times in plan["stages"].items()]
    return html.section(
        "Predicted and measured",
        html.table(("plan", "", "predicted", "measured", "error"), rows, numeric=(2, 3, 4)),
        note="Medians over the steps under each plan; of a stage what its busiest rank computes in a step. Where a "
        "plan was asked for again and stayed, the last prediction is shown.",
    )


def _gpu_memory(records: RunRecords) -> str:
    roles = records.memory.get("roles", {})
    if not roles:
        return ""
    rows = []
    for role, values in roles.items():
        predicted, measured = values["predicted_bytes"], values["measured_bytes"]
        rows.append((role, gib(predicted), gib(measured), f"{predicted / measured - 1:+.1%}"))
    total = gib(records.memory["device_bytes"])
    return html.section(
        "Memory of the GPUs",
        html.table(("role", "predicted", "measured", "error"), rows, numeric=(1, 2, 3)),
        note=f"The most that the processes of one of a role's ranks held on a GPU of {total} when a stage ended, as "
        "the driver counts it: CUDA contexts, graphs and what torch keeps are included, and an engine's own processes.",
    )


def _predicted_and_measured(times: Mapping[str, float | None]) -> tuple[str, str, str]:
    predicted, measured = times["predicted_s"], times["measured_s"]
    error = f"{predicted / measured - 1:+.1%}" if predicted is not None and measured else "-"
    texts = ["-" if value is None else seconds(value) for value in (predicted, measured)]
    return texts[0], texts[1], error


def _venv(venv: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {venv[name.lower()]}" for name in ("Python", "torch", "transformers"))
    return f"{venv['interpreter']}: {versions}"


def _what_ran(records: RunRecords) -> str:
    manifest = records.manifest
    machine, git = manifest.get("machine") or {}, manifest.get("git") or {}
    packages = manifest.get("packages") or {}
    memory_bytes = machine.get("memory_bytes")
    commit = git.get("commit", "")[:12] + (", with changes" if git.get("has_changes") else "")
    sessions = manifest.get("sessions", [])
    venvs = sessions[-1].get("venvs", {}) if sessions else {}
    resumed = [s for s in sessions if "resumed_from_step" in s]
    own = ", ".join(f"{name} {version}" for name, version in packages.items() if name.lower().startswith("rlinf"))
    facts = html.facts(
        [
            ("command", shlex.join(manifest.get("command", []))),
            ("started", manifest.get("started")),
            ("ended", manifest.get("ended")),
            ("resumed", ", ".join(f"{s['started']} from step {s['resumed_from_step']}" for s in resumed)),
            ("host", machine.get("host")),
            ("processor", machine.get("processor")),
            ("cores", machine.get("num_cores")),
            ("memory", gib(memory_bytes) if memory_bytes else None),
            ("system", machine.get("system")),
            ("Python, torch", f"{manifest.get('python')}, {manifest.get('torch')}" if manifest else None),
            *((f"venv of {role}", _venv(venv)) for role, venv in venvs.items()),
            ("packages", own),
            ("commit", commit),
        ]
    )
    config = f"<pre>{escape(records.config_yaml)}</pre>" if records.config_yaml else ""
    versions = "\n".join(f"{name} {version}" for name, version in packages.items())
    return html.section(
        "What ran",
        facts,
        html.folded("Config", config),
        html.folded("All installed packages", f"<pre>{escape(versions)}</pre>" if versions else ""),
    )
