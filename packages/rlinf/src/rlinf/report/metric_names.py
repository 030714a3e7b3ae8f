"""The plots of the report, their metrics and order. `rlinf.glossary` explains the metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlinf.glossary import SHARE, find, of_further_policy, policy_prefix
from rlinf.report.curves import NUM_COLORS, Curve, Line
from rlinf.report.records import RunRecords, is_stage_time
from rlinf.report.waits_section import AGE

SCORES = ("accuracy", "success_at_end", "success_once", "token_accuracy", "preference_accuracy")
"""Metrics of an evaluation that are shares; the first one present is the run's score."""
EVALUATION = "evaluation/"
"""Prefix of the names of evaluation metrics in this module."""

PANELS: dict[str, dict[str, str]] = {
    "Reward": {"reward/mean": "mean reward", "evaluation/reward": "held-out problems"},
    "Spread of rewards": {"reward/std_within_group": "within a group", "reward/std_between_groups": "between groups"},
    "Accuracy on held-out problems": {"evaluation/accuracy": "evaluation"},
    "Return": {"env/return": "training"},
    "Episodes that end in success": {"env/success_at_end": "training", "evaluation/success_at_end": "evaluation"},
    "Episodes with success at any time": {
        "env/success_once": "training",
        "env/classifier_success": "training, by the classifier",
        "evaluation/success_once": "evaluation",
    },
    "Loss": {
        "actor/loss": "loss",
        "sft/loss": "training",
        "dpo/loss": "training",
        "reward_model/loss": "training",
        "evaluation/loss": "held-out examples",
    },
    "Most likely tokens in held-out examples": {"evaluation/token_accuracy": "evaluation"},
    "Rewards of the two answers": {"rewards/chosen": "preferred", "rewards/rejected": "other"},
    "Preferred answers with the larger reward": {
        "rewards/accuracy": "training",
        "evaluation/preference_accuracy": "evaluation",
    },
    "Policy loss": {"actor/policy_loss": "loss"},
    "Value loss": {"actor/value_loss": "loss"},
    "Gradient norm before clipping": {"actor/grad_norm": "norm"},
    "KL to the policy that sampled": {
        "actor/kl": "KL",
        "actor/rollout_kl": "KL a token",
        "rollout/logprob_gap_kl": "before the update",
    },
    "Distance between engine and trainer": {
        "rollout/logprob_gap_mean": "mean",
        "rollout/logprob_gap_p999": "99.9 %",
        "rollout/logprob_gap_max": "worst token",
    },
    "Age of the weights that sampled, in steps": {
        "rollout/staleness_mean": "mean",
        "rollout/staleness_max": "oldest",
    },
    "KL to the reference": {"actor/ref_kl": "KL a token"},
    "Entropy": {"actor/entropy": "entropy", "rollout/entropy": "estimate by samples"},
    "Ratios that were clipped": {"actor/clip_fraction": "share"},
    "Completions that were cut": {"rollout/truncated_fraction": "share"},
    "Completion length": {"rollout/completion_tokens": "tokens"},
    "Episode length": {"env/episode_length": "steps"},
    "Time of a step": {"time/step_s": "step"},
    "Tokens a second, by device": {"perf/tokens_per_s": "tokens/s"},
    "Share of the GPUs' peak": {f"perf/mfu/{stage}": stage for stage in ("actor", "reference", "rollout")},
    "Tensor cores at work, by the GPU's counters": {
        f"perf/tensor_active/{stage}": stage for stage in ("actor", "reference", "rollout")
    },
}
"""Title -> metrics of one plot with their labels; metrics that a run does not have are left out."""


def curves(records: RunRecords) -> tuple[list[Curve], list[Curve]]:
    """Returns the main plots, and one for each remaining metric."""
    panels = panels_of([records])
    placed = {name for panel in panels.values() for name in panel}
    rest = {
        name: {name: name.rpartition("/")[2]}
        for name in records.metric_names()
        if name not in placed and not is_stage_time(name)
    }
    return _curves(panels, records), _curves(rest, records)


def panels_of(runs: Sequence[RunRecords]) -> dict[str, dict[str, str]]:
    """Returns `PANELS` with lines for further policies that a run trains, and one more for each further set of problems
    that it evaluates on."""
    names = dict.fromkeys(name for records in runs for name in records.metric_names())
    policies = dict.fromkeys(further[0] for name in names if (further := of_further_policy(name)) is not None)
    panels = {
        title: metrics
        | {
            policy_prefix(policy) + name: f"{label}, {policy}"
            for policy in policies
            for name, label in metrics.items()
            if policy_prefix(policy) + name in names
        }
        for title, metrics in PANELS.items()
    }
    ages = {AGE.format(age): f"{age} steps" if age != 1 else "1 step" for age in range(7)}
    panels["Tokens or environment steps by that age"] = ages
    for name in dict.fromkeys(name for records in runs for name in records.metric_names(evaluation=True)):
        score, _, held_out = name.partition("/")
        if held_out and score in ("accuracy", "reward"):  # success by task is a table
            panels[f"{score.replace('_', ' ').capitalize()} on {held_out}"] = {EVALUATION + name: "evaluation"}
    return panels


def unit_of(name: str, *, evaluation: bool) -> str:
    """Returns the unit of a metric, `SHARE` for a share; empty if it has none."""
    metric = find(name, evaluation=evaluation)
    return metric.unit if metric and metric.unit != "-" else ""


def score_name(records: RunRecords) -> str | None:
    """Returns the metric that is the score of the run's evaluations."""
    names = records.metric_names(evaluation=True)
    return records.result.get("score") or next((name for name in (*SCORES, *names) if name in names), None)


def _curves(panels: Mapping[str, Mapping[str, str]], records: RunRecords) -> list[Curve]:
    """Returns a curve for each panel with a metric of the run; its unit is that of its first metric."""
    charts = []
    for title, metrics in panels.items():
        lines, units = [], []
        for place, (name, label) in enumerate(metrics.items()):
            own_name, is_evaluation = name.removeprefix(EVALUATION), name.startswith(EVALUATION)
            series = records.series(own_name, evaluation=is_evaluation)
            if len(series):
                color = f"var(--c{place % NUM_COLORS})"
                lines.append(Line(label=label, series=series, color=color, has_marks=is_evaluation))
                units.append(unit_of(own_name, evaluation=is_evaluation))
        if lines:
            is_share = units[0] == SHARE
            charts.append(Curve(title=title, lines=tuple(lines), unit="" if is_share else units[0], is_share=is_share))
    return charts
