"""Meaning and unit of every metric of a run. docs/metrics.md is generated from it.

python -m rlinf.glossary > docs/metrics.md
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from textwrap import dedent
from typing import Literal

Kind = Literal["reasoning", "embodied", "both"]

SHARE = "share"
"""The unit of numbers from 0 to 1 that are drawn as percent."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricEntry:
    """One metric, or a family of them.

    Example: Metric(name="time/<stage>_s", unit="s", job="both", meaning="...") is the one for time/rollout_s.
    """

    name: str
    """The metric's name; text between < and > is a placeholder."""
    unit: str
    meaning: str
    job: Kind = "both"

    def covers(self, name: str) -> bool:
        pattern = "".join(".+" if part.startswith("<") else re.escape(part) for part in re.split(r"(<\w+>)", self.name))
        return re.fullmatch(pattern, name) is not None


def _of(job: Kind, table: str) -> tuple[MetricEntry, ...]:
    """Parses metrics from lines `name | unit | meaning`; a more indented line continues the one above."""
    rows = [row.split(" | ") for row in dedent(table).strip().replace("\n    ", " ").splitlines()]
    return tuple(MetricEntry(name=name, unit=unit, meaning=meaning, job=job) for name, unit, meaning in rows)


TRAINING = (
    *_of(
        "reasoning",
        """
        reward/mean | reward | Mean reward of the step's completions.
        reward/std_within_group | reward | Standard deviation of the rewards of one prompt's completions, mean over
            prompts. At 0 every group agrees with itself, and algorithms that compare within groups learn nothing.
        reward/std_between_groups | reward | Standard deviation of the groups' mean rewards: how much the prompts differ
            in difficulty.
        reward/right | share | Completions whose answer was checked and is right. This and the next five are there where
            the reward judges answers.
        reward/wrong | share | Completions whose answer was checked and is wrong.
        reward/unparseable | share | Completions in which no answer was found.
        reward/timeout | share | Completions whose check ran out of time.
        reward/memory | share | Completions whose check ran out of memory.
        reward/crashed | share | Completions whose program crashed, or on which the reward itself failed.
        reward/judge_failures | share | Completions on which the reward itself failed, by an exception or because the
            checking process died: no fault of the completion. Above run.max_judge_failures the run ends.
        reward/part/<term> | reward | Mean of one term of a weighted reward, without its weight.
        rollout/completion_tokens | tokens | Mean length of a completion, its end token included.
        rollout/truncated_fraction | share | Completions that were cut at rollout.max_new_tokens. Near 1 the limit
            decides what is learned.
        rollout/entropy | nats a token | Mean of minus the log-probability of the sampled tokens, by the engine: an
            estimate of the policy's entropy that costs nothing. A fall towards 0 means that the policy has stopped
            exploring.
        actor/loss | - | Loss of an optimizer step; on-policy its value says little, its gradient all.
        actor/learning_rate | - | Learning rate of the optimizer step.
        actor/trained_token_fraction | share | Tokens in groups with an advantage; the others only count.
        actor/groups_without_advantage | share | Groups whose rewards are all equal. Near 1 the prompts are too easy or
            too hard.
        rollout/logprob_gap_mean | nats a token | Mean distance between what the engine that sampled and the actor
            before its first update say of the tokens that are trained on. Above 0.1 or so they are not the same model.
        rollout/logprob_gap_p999 | nats | Distance that 99.9 % of these tokens do not exceed; from a histogram, to
            2.2 %.
        rollout/logprob_gap_max | nats | Distance at the worst token, which samples.jsonl shows.
        rollout/logprob_gap_kl | nats a token | KL of the engine to the actor before its first update, estimate k3: the
            mismatch of the two alone. docs/trust.md says how much of it rounding explains.
        actor/rollout_kl | nats a token | KL of the engine that sampled to the actor, estimate k3. On the first
            optimizer step of a batch it is the mismatch of the two; on later ones the update's own step adds to it.
        actor/ref_kl | nats a token | KL to the reference, by the estimate algorithm.kl; where there is one.
        actor/kl_coef | - | Weight of the KL in the reward; with algorithm.kl_target, which adapts it.
        actor/router_loss | - | Load-balancing loss of the experts, at least the number of experts of a token; with
            algorithm.router_aux_coef.
        actor/entropy_coef | - | Weight of the entropy bonus; with algorithm.entropy_target, which adapts it.
        critic/loss | - | Loss of the critic, mean over tokens.
        critic/grad_norm | - | Norm of the critic's gradient before clipping.
        critic/return | reward | Mean of what the critic is to predict.
        critic/explained | share | Variance of the returns that the critic explains: 1 is perfect, 0 no better than a
            constant.
        """,
    ),
    *_of(
        "embodied",
        """
        env/return | reward | Mean sum of rewards of the episodes that ended in the step.
        env/return_std | reward | Standard deviation of that sum over the episodes.
        env/success_once | share | Episodes in which the task counted as solved after any step.
        env/success_at_end | share | Episodes in which it counted as solved after the last one.
        env/success_at_end/<task> | share | The same of one task, where the environment has several.
        env/episode_length | steps | Mean number of actions of an episode.
        env/truncated_fraction | share | Episodes that the time limit ended.
        actor/policy_loss | - | Policy loss, mean over the minibatches.
        actor/value_loss | - | Loss of the values, half the squared error by default, mean over the minibatches.
        actor/kl | nats | KL of the policy that sampled to the updated one, estimate k3, on the last minibatch, mean
            over what has a ratio (algorithm.ratio_level). The epochs end when it exceeds algorithm.target_kl.
        actor/optimizer_steps | steps | Optimizer steps of the training step, fewer where the KL ended them.
        """,
    ),
    *_of(
        "both",
        """
        actor/grad_norm | - | Norm of the gradient before clipping, at actor.max_grad_norm.
        actor/clip_fraction | share | Trained tokens, or actions, where the policy loss's clip decided.
        actor/corrected_fraction | share | Trained tokens, or actions, whose weight algorithm.correction cut, or that it
            left out.
        actor/rejected_fraction | share | Trained tokens that algorithm.rejection left out.
        actor/off_policy_fraction | share | Trained tokens, or actions, that algorithm.off_policy_threshold left out.
        actor/entropy | nats | Entropy of the policy, exact: of a token's distribution, where the algorithm asks for it
            (entropy_coef, top_entropy_fraction), or of what has a ratio in episodes (algorithm.ratio_level).
        time/step_s | s | Wall time of the step.
        time/<stage>_s | s | Computing time of a stage, all its ranks together.
        time/sync_s | s | Time that ranks spent in handing the new weights over, all together.
        time/checkpoint_s | s | Time until the checkpoint that became whole in this step was: copied, written, sealed.
        time/checkpoint_wait_s | s | The part of it for which training waited: the copy, and the checkpoint before.
        """,
    ),
)
"""The metrics in metrics.jsonl."""

EVALUATION = (
    *_of(
        "reasoning",
        """
        reward | reward | Mean reward of the held-out problems, evaluation.num_samples completions each. It is the score
            of a run whose reward judges no answers: a custom function that returns numbers, a reward model, lengths.
        reward/<set> | reward | The same of a further set of problems.
        reward_error | reward | Standard error of that mean over the problems.
        reward_error/<set> | reward | The same of a further set of problems.
        accuracy | share | Held-out problems answered right, mean over evaluation.num_samples completions each; where
            the reward judges answers.
        accuracy/<set> | share | The same of a further set of problems.
        accuracy_error | share | Standard error of the accuracy over the problems.
        accuracy_error/<set> | share | The same of a further set of problems.
        num_problems | problems | Problems that were asked.
        num_problems/<set> | problems | The same of a further set of problems.
        """,
    ),
    *_of(
        "embodied",
        """
        return | reward | Mean sum of rewards of an episode of the deterministic policy.
        success_once | share | Episodes in which the task counted as solved after any step.
        success_at_end | share | Episodes in which it counted as solved after the last one.
        success_at_end/<task> | share | The same of one task, where the environment has several.
        episode_length | steps | Mean number of actions of an episode.
        """,
    ),
)
"""The metrics in evaluations.jsonl; log writers show them under `evaluation/`."""


LOGGERS = (
    "## Log writers",
    "",
    "TensorBoard, W&B, MLflow, SwanLab and trackio get these metrics under the same names, those of evaluations with",
    "`evaluation/` before them. [loggers.md](loggers.md) explains `run.loggers`.",
)


def find(name: str, *, evaluation: bool = False) -> MetricEntry | None:
    """Returns the metric of a name, an exact name before a family."""
    metrics = [metric for metric in (EVALUATION if evaluation else TRAINING) if metric.covers(name)]
    return min(metrics, key=lambda metric: "<" in metric.name, default=None)


def page() -> str:
    """docs/metrics.md."""
    titles = {"reasoning": "Reasoning", "embodied": "Embodied", "both": "Every job"}
    parts = [
        "# Metrics",
        "",
        "A run writes a row a training step to `metrics.jsonl` and a row an evaluation to `evaluations.jsonl`. The",
        "same numbers go to TensorBoard (`tensorboard/`) and to other [log writers](loggers.md); `rlinf report` draws",
        "them. Means are over all items of a step, whoever computed them, so they do not depend on the plan; times do.",
        "A metric that an algorithm does not have is left out.",
    ]
    for title, metrics in (("Training steps", TRAINING), ("Evaluations", EVALUATION)):
        parts += ["", f"## {title}"]
        for job, heading in titles.items():
            rows = [metric for metric in metrics if metric.job == job]
            if rows:
                parts += ["", f"**{heading}**", "", "| metric | unit | what it says |", "|---|---|---|"]
                parts += [f"| `{metric.name}` | {metric.unit} | {metric.meaning} |" for metric in rows]
    parts += ["", *LOGGERS]
    return "\n".join([*parts, "", "This page is made by `python -m rlinf.glossary`.", ""])


if __name__ == "__main__":
    print(page(), end="")
