"""Which metrics share a drawing on the report, and in which order. What they mean is in `rlinf.glossary`."""

from __future__ import annotations

from dataclasses import dataclass

from rlinf.glossary import SHARE, find
from rlinf.report.curves import Curve, Line
from rlinf.report.records import RunRecords, is_stage_time


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """One drawing and the metrics that share it."""

    title: str
    metrics: tuple[tuple[str, str], ...]
    """(metric, label); those that a run does not have are left out."""
    evaluation: str | None = None
    """Metric of the evaluations that is drawn with them."""
    unit: str = ""
    is_share: bool = False


SCORES = ("accuracy", "success_at_end", "success_once")
"""Metrics of an evaluation that are shares; the first one that there is is the run's score."""

PANELS = (
    Panel(title="Reward", metrics=(("reward/mean", "mean reward"),), unit="mean over completions"),
    Panel(
        title="Spread of rewards",
        metrics=(("reward/std_within_group", "within a group"), ("reward/std_between_groups", "between groups")),
        unit="standard deviation",
    ),
    Panel(title="Accuracy on held-out problems", metrics=(), evaluation="accuracy", is_share=True),
    Panel(title="Return", metrics=(("env/return", "training"),), unit="sum of rewards, mean over episodes"),
    Panel(
        title="Episodes that end in success",
        metrics=(("env/success_at_end", "training"),),
        evaluation="success_at_end",
        is_share=True,
    ),
    Panel(
        title="Episodes with success at any time",
        metrics=(("env/success_once", "training"),),
        evaluation="success_once",
        is_share=True,
    ),
    Panel(title="Loss", metrics=(("actor/loss", "loss"),)),
    Panel(title="Policy loss", metrics=(("actor/policy_loss", "loss"),)),
    Panel(title="Value loss", metrics=(("actor/value_loss", "loss"),)),
    Panel(title="Gradient norm", metrics=(("actor/grad_norm", "norm"),), unit="before clipping"),
    Panel(
        title="KL to the policy that sampled",
        metrics=(("actor/kl", "KL"), ("actor/rollout_kl", "KL a token")),
        unit="nats",
    ),
    Panel(title="KL to the reference", metrics=(("actor/ref_kl", "KL a token"),), unit="nats"),
    Panel(
        title="Entropy", metrics=(("actor/entropy", "entropy"), ("rollout/entropy", "estimate by samples")), unit="nats"
    ),
    Panel(title="Ratios that were clipped", metrics=(("actor/clip_fraction", "share"),), is_share=True),
    Panel(title="Completions that were cut", metrics=(("rollout/truncated_fraction", "share"),), is_share=True),
    Panel(title="Completion length", metrics=(("rollout/completion_tokens", "tokens"),), unit="tokens, mean"),
    Panel(title="Episode length", metrics=(("env/episode_length", "steps"),), unit="environment steps, mean"),
    Panel(title="Time of a step", metrics=(("time/step_s", "step"),), unit="s"),
)


def curves(records: RunRecords) -> tuple[list[Curve], list[Curve]]:
    """The main drawings, and one for each metric left over."""
    main = [curve for panel in PANELS if (curve := _curve(panel, records)) is not None]
    placed = {name for panel in PANELS for name, _ in panel.metrics}
    main += [
        _evaluation_curve(name, records)
        for name in records.metric_names(evaluation=True)
        if name.startswith(tuple(f"{score}/" for score in SCORES))
    ]
    rest = [
        Curve(
            title=name,
            lines=(Line(label=name.rpartition("/")[2], series=records.series(name), color="var(--c0)"),),
            unit=unit if unit not in ("-", SHARE) else "",
            is_share=unit == SHARE,
        )
        for name in records.metric_names()
        for unit in (_unit(name),)
        if name not in placed and not is_stage_time(name) and len(records.series(name))
    ]
    return main, rest


def _unit(name: str) -> str:
    metric = find(name)
    return "" if metric is None else metric.unit


def _evaluation_curve(name: str, records: RunRecords) -> Curve:
    """The curve of an evaluation metric on a further set of problems, `accuracy/aime24` for example."""
    score, _, held_out = name.partition("/")
    series = records.series(name, evaluation=True)
    line = Line(label="evaluation", series=series, color="var(--c0)", has_marks=True)
    return Curve(title=f"{score.replace('_', ' ').capitalize()} on {held_out}", lines=(line,), is_share=True)


def score_name(records: RunRecords) -> str | None:
    """The metric that the run's evaluations are about."""
    names = records.metric_names(evaluation=True)
    return records.result.get("score") or next((name for name in (*SCORES, *names) if name in names), None)


def _curve(panel: Panel, records: RunRecords) -> Curve | None:
    lines = [
        Line(label=label, series=records.series(name), color=f"var(--c{place})")
        for place, (name, label) in enumerate(panel.metrics)
        if len(records.series(name))
    ]
    if panel.evaluation is not None:
        series = records.series(panel.evaluation, evaluation=True)
        color = "var(--c1)" if lines else "var(--c0)"
        lines += [Line(label="evaluation", series=series, color=color, has_marks=True)] if len(series) else []
    if not lines:
        return None
    return Curve(title=panel.title, lines=tuple(lines), unit=panel.unit, is_share=panel.is_share)
