"""Meaning and unit of every metric of a run. docs/metrics.md is generated from it.

python -m rlinf.glossary > docs/metrics.md
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from textwrap import dedent
from typing import Literal

Kind = Literal["reasoning", "embodied", "supervised", "both"]

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
            prompts. 0: all rewards in every group are equal, so algorithms that compare within groups have no learning
            signal.
        reward/std_between_groups | reward | Standard deviation of the groups' mean rewards, a measure of how much the
            prompts differ in difficulty.
        reward/right | share | Completions whose answer was checked and is right. This metric and the next five exist if
            the reward checks answers.
        reward/wrong | share | Completions whose answer was checked and is wrong.
        reward/unparseable | share | Completions in which no answer was found.
        reward/timeout | share | Completions whose check exceeded its time limit.
        reward/memory | share | Completions whose check exceeded its memory limit.
        reward/crashed | share | Completions whose program crashed, or on which the reward itself failed.
        reward/judge_failures | share | Completions on which a built-in reward failed, by an exception or because the
            checking process died. The run ends if the share exceeds run.max_judge_failures. An exception in a custom
            reward ends the run at once.
        reward/agent/<agent> | reward | Mean reward of an agent by name (rollout.agent.agents) that trains, over
            the episodes in which it had a turn.
        agent/turns | turns | Turns that the policy wrote in an episode, mean.
        agent/retries | episodes | How often an episode was done again after a failure that the policy cannot have
            caused, mean.
        agent/calls | calls | Calls of tools that the built-in loop made in an episode, mean.
        agent/failed_calls | calls | Those that failed by the policy's doing, which reads what was wrong: its program
            raised or reached a limit, wrong arguments, no such tool. Mean of an episode.
        agent/malformed_calls | calls | What the policy wrote like a call and is none, mean of an episode.
        agent/branches | branches | Requests that did not continue the conversation so far, because the harness edited,
            compressed or branched it, mean of an episode.
        agent/outside_engine_s | s | Time of an episode in which no turn of it was being sampled: its tools and its
            harness, mean.
        agent/group_outside_engine_s | s | The longest such time in a group, mean: what a faster engine does not
            shorten.
        router/engine_turns | turns | Turns that an engine sampled for the router (rollout.agent.router), mean of the
            engines. Like all router/ metrics it depends on timing, while the tokens do not; recorded where there are
            several engines.
        router/engine_turns_spread | turns | Standard deviation of these turns over the engines.
        router/moved_turns | share | Turns after an episode's first that another engine sampled than the one before,
            because it had much less to do.
        router/lost_turns | share | Turns after an episode's first that were sampled again because a rank was lost
            or the step was made again.
        router/drained_s | s | Time that an engine waited without a turn until the episodes of all ranks were over,
            mean of the engines. After it the engine takes new weights or leaves its devices.
        agent/discarded/<cause> | share | Episodes that ended by what the policy cannot have caused, so that nothing is
            learned from them: service (the session server or the reward), tool_service, harness_lost, engine_lost.
        agent/ended/<cause> | share | Episodes that ended by what the policy can have caused, and are scored: turns,
            tokens, time (no more of it left).
        reward/part/<term> | reward | Mean of one term of a weighted reward, before its weight.
        rollout/completion_tokens | tokens | Mean length of a completion, including its end token.
        rollout/late_fraction | share | Groups whose prompts came in with an earlier step, with rollout.sampler
            as_finished.
        rollout/truncated_fraction | share | Completions that were cut at rollout.max_new_tokens. Near 1 the policy
            learns mostly about the length limit.
        rollout/entropy | nats a token | Mean of minus the log-probability of the sampled tokens, as the engine computed
            it: an estimate of the policy's entropy without extra cost. A fall towards 0 means that the policy has
            stopped exploring.
        actor/loss | - | Loss of an optimizer step. On-policy its value means little; only its gradient matters.
        actor/trained_token_fraction | share | Tokens in groups with an advantage. The other tokens add nothing to the
            loss but count in its mean.
        actor/groups_without_advantage | share | Groups whose rewards are all equal. Near 1 the prompts are too easy or
            too hard.
        rollout/kept_tokens | tokens | Mean number of tokens that rollout.top_p, top_k and min_p left to draw each token
            from.
        rollout/logprob_gap_mean | nats a token | Mean absolute difference between the log-probabilities of the engine
            that sampled and of the actor before its first update, over the trained tokens. For a model of 28
            layers rounding explains at most 6e-5 in float32 and 0.12 in bfloat16; docs/trust.md has the bounds.
        rollout/logprob_gap_p999 | nats | 99.9th percentile of these differences, from a histogram that is exact to
            2.2 %.
        rollout/logprob_gap_max | nats | Largest of these differences; samples.jsonl shows the token.
        rollout/logprob_gap_kl | nats a token | KL divergence of the engine from the actor before its first update,
            estimate k3. docs/trust.md explains how much of it rounding causes.
        actor/rollout_kl | nats a token | KL divergence of the engine that sampled from the actor, estimate k3. On the
            first optimizer step of a batch it is the mismatch of the two; later steps add the policy's own change.
        actor/ref_kl | nats a token | KL divergence from the reference, by the estimate algorithm.kl, if there is a
            reference.
        actor/kl_coef | - | Weight of the KL in the reward, if algorithm.kl_target adapts it.
        actor/router_loss | - | Load-balancing loss of the experts, with algorithm.router_aux_coef. It is at least the
            number of experts per token.
        actor/router_agreement | share | Choices of experts of the engine that the actor's own routers make, too, with
            actor.router_replay; mean over tokens, layers (of a pipeline's last stage or chunk) and choices. Replay uses
            the engine's for all.
        actor/entropy_coef | - | Weight of the entropy bonus, if algorithm.entropy_target adapts it.
        policy/<policy>/<metric> | as the metric | A metric rollout/..., actor/... or critic/... of a further policy
            (rollout.agent.agents.NAME.policy), such as policy/guesser/actor/loss; without the prefix it is that of the
            policy of model.path.
        critic/return | reward | Mean of the returns, which the critic learns to predict.
        critic/explained | share | Share of the variance of the returns that the critic explains. 1: perfect. 0: no
            better than a constant.
        """,
    ),
    *_of(
        "embodied",
        """
        env/return | reward | Mean return (sum of rewards) of the episodes that ended in the step.
        env/return_std | reward | Standard deviation of the return over these episodes.
        env/success_once | share | Episodes in which the task was solved after at least one step.
        env/success_at_end | share | Episodes in which the task was solved after the last step.
        env/success_at_end/<task> | share | The same for one task, if the environment has several.
        env/classifier_success | share | With success_classifier: training episodes in which the classifier saw success.
        env/classifier_false_positive | share | With success_classifier: training episodes in which the classifier saw
            success, and the environment never did. If it rises, the policy is deceiving the classifier.
        env/classifier_false_negative | share | With success_classifier: training episodes that the environment counted
            as solved, and in which the classifier never saw success.
        env/episode_length | steps | Mean number of actions of an episode.
        env/truncated_fraction | share | Episodes that ended at the time limit.
        env/idle_fraction | share | With env.episodes_per_step: time that environments spent without an episode, in
            chunks of actions, from the end of the last step's last episode to that of this one's.
        env/trained_groups_fraction | share | With env.episodes_per_step and algorithm.dynamic_sampling: groups of
            episodes that were trained, of those whose episodes decided which are.
        actor/policy_loss | - | Policy loss, mean over the minibatches or updates.
        actor/value_loss | - | Loss of the values, half the squared error by default, mean over the minibatches.
        actor/temperature | - | Weight of the entropy (alpha) of an off-policy algorithm, mean over its updates.
        actor/replay_size | transitions | Transitions in the replay buffers; with algorithm.name=dagger, answers of the
            expert, those of demonstrations included.
        actor/expert_actions | actions | With algorithm.name=dagger: actions that the expert has named so far, those of
            demonstrations included. An answer of K actions counts K.
        actor/imitation_loss | - | With algorithm.name=dagger: the policy's supervised loss, mean over the updates.
        critic/value | reward | Values of the actions in the batches of an off-policy algorithm, mean over critics and
            updates.
        actor/kl | nats | KL divergence of the policy that sampled from the updated one, estimate k3, on the last
            minibatch, mean over the units of algorithm.ratio_level. The epochs end when it exceeds algorithm.target_kl.
        actor/optimizer_steps | steps | Optimizer steps of the training step, at least one; fewer if
            algorithm.target_kl ended the epochs.
        """,
    ),
    *_of(
        "supervised",
        """
        sft/loss | nats a token | Negative log-likelihood of the tokens with a loss, mean over all of them in the
            optimizer step.
        sft/trained_tokens | tokens | Tokens with a loss in the optimizer step.
        dpo/loss | - | Loss of a pair, mean over the pairs of the optimizer step. At the reference it is log 2 for
            dpo.loss=sigmoid, and 1 / (2 beta)^2 for ipo.
        reward_model/loss | - | Loss of a pair of a reward model, mean over the pairs of the optimizer step.
        rewards/chosen | - | Mean reward of the preferred answers: of dpo beta times the log ratio of policy and
            reference, of reward_model the score.
        rewards/rejected | - | The same of the other answers.
        rewards/margin | - | Difference of the two.
        rewards/accuracy | share | Pairs whose preferred answer has the larger reward.
        """,
    ),
    *_of(
        "both",
        """
        rollout/staleness_mean | steps | Training steps by which the weights that sampled are older than those that
            train, mean over tokens or environment steps, with algorithm.max_staleness; docs/staleness.md.
        rollout/staleness_max | steps | The same of the oldest token or environment step; never above
            algorithm.max_staleness.
        rollout/staleness_<steps>_fraction | share | Tokens or environment steps that were sampled by weights of that
            age.
        critic/loss | - | Loss of the critic, mean over tokens. Robots: half the squared errors of off-policy critics,
            summed over critics, mean over transitions.
        critic/grad_norm | - | Norm of the critic's gradient before clipping.
        actor/grad_norm | - | Norm of the gradient before clipping, at actor.max_grad_norm.
        actor/learning_rate | - | Learning rate of the optimizer step; jobs with language models.
        actor/clip_fraction | share | Trained tokens, or actions, whose loss term the policy loss clipped.
        actor/corrected_fraction | share | Trained tokens, or actions, whose weight algorithm.correction reduced, or
            that it left out.
        actor/rejected_fraction | share | Trained tokens that algorithm.rejection left out.
        actor/off_policy_fraction | share | Trained tokens, or actions, that algorithm.off_policy_threshold left out.
        actor/entropy | nats | Exact entropy of the policy. Language models: of a token's distribution, if the algorithm
            needs it (entropy_coef, top_entropy_fraction). Robots: of a unit of algorithm.ratio_level; off-policy
            algorithms estimate that of an answer, with actions scaled to -1..1, from the actions of a batch.
        perf/tokens_per_s | tokens/s | Tokens of the step's prompts and completions per second of the step and per
            device; a prompt counts once for all of its completions. Language models.
        perf/mfu/<stage> | share | Operations of a stage's model, as its shape has them (recomputation does not count),
            of those that its GPUs could do in its computing time at the dense bf16 rate of their datasheet (model
            FLOPs utilization). Exists on GPUs with a datasheet, for language models whose parts can be counted.
        perf/sm_active/<stage> | share | Multiprocessors of a stage's GPU that were busy while the stage held it, by the
            GPU's own counters, which see all processes. On Hopper and later, where the driver lets them be read; of a
            rank with several GPUs, the first.
        perf/tensor_active/<stage> | share | Time in which their tensor cores computed, by the same counters.
        perf/dram_active/<stage> | share | Bandwidth of the GPU's memory that was used, by the same counters.
        time/step_s | s | Wall time of the step.
        time/<stage>_s | s | Computing time of a stage, summed over its ranks.
        time/sync_s | s | Time of the weight syncs, summed over the ranks.
        time/checkpoint_s | s | Time to copy and write the checkpoint that was completed in this step, with its
            checksums.
        time/checkpoint_wait_s | s | The part of it for which training waited: the copy, and the previous checkpoint.
        """,
    ),
)
"""The metrics in metrics.jsonl."""

EVALUATION = (
    *_of(
        "reasoning",
        """
        reward | reward | Mean reward of the held-out problems, with evaluation.num_samples completions each. It is the
            score of a run whose reward does not check answers, such as a custom function that returns numbers, a reward
            model or a length.
        reward/<set> | reward | The same for a further set of problems.
        reward_error | reward | Standard error of that mean over the problems.
        reward_error/<set> | reward | The same for a further set of problems.
        accuracy | share | Right answers to the held-out problems, with evaluation.num_samples completions each, if the
            reward checks answers.
        accuracy/<set> | share | The same for a further set of problems.
        accuracy_error | share | Standard error of the accuracy over the problems.
        accuracy_error/<set> | share | The same for a further set of problems.
        num_problems | problems | Number of problems in the evaluation.
        num_problems/<set> | problems | The same for a further set of problems.
        """,
    ),
    *_of(
        "embodied",
        """
        return | reward | Mean return (sum of rewards) of an episode of the deterministic policy.
        success_once | share | Episodes in which the task was solved after at least one step.
        success_at_end | share | Episodes in which the task was solved after the last step.
        success_at_end/<task> | share | The same for one task, if the environment has several.
        episode_length | steps | Mean number of actions of an episode.
        """,
    ),
    *_of(
        "supervised",
        """
        loss | - | Loss of the held-out examples: of sft the negative log-likelihood in nats, mean over all tokens with
            a loss; of pairs the mean over them. It is the score, and lower is better.
        token_accuracy | share | Tokens with a loss that are the most likely ones under the model.
        preference_accuracy | share | Held-out pairs whose preferred answer has the larger reward.
        rewards/chosen | - | Mean reward of the preferred answers: of dpo beta times the log ratio of policy and
            reference, of reward_model the score.
        rewards/rejected | - | The same of the other answers.
        rewards/margin | - | Difference of the two.
        num_tokens | tokens | Tokens with a loss in the held-out examples.
        num_examples | examples | Held-out examples.
        num_pairs | pairs | Held-out pairs.
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


def policy_prefix(policy: str | None) -> str:
    """Returns what the metrics of a policy's trainer begin with; None: the policy of model.path, whose have none."""
    return "" if policy is None else f"policy/{policy}/"


def of_further_policy(name: str) -> tuple[str, str] | None:
    """Returns the further policy that a metric is about, and the name that it has for the first policy; None: it is
    about no further policy."""
    match = re.fullmatch(r"policy/([^/]+)/(.+)", name)
    return None if match is None else (match[1], match[2])


def find(name: str, *, evaluation: bool = False) -> MetricEntry | None:
    """Returns the metric of a name, an exact name before a family; of a further policy the one of the first."""
    further = of_further_policy(name)
    if further is not None and (metric := find(further[1], evaluation=evaluation)) is not None:
        return metric
    metrics = [metric for metric in (EVALUATION if evaluation else TRAINING) if metric.covers(name)]
    return min(metrics, key=lambda metric: "<" in metric.name, default=None)


def _linked(meaning: str) -> str:
    """Links the pages that a meaning names."""
    return re.sub(r"docs/([\w-]+\.md)", r"[\1](\1)", meaning)


def page() -> str:
    """docs/metrics.md."""
    titles = {"reasoning": "Reasoning", "embodied": "Embodied", "supervised": "Supervised", "both": "Every job"}
    parts = [
        "# Metrics",
        "",
        "A run writes one row per training step to `metrics.jsonl` and one row per evaluation to `evaluations.jsonl`.",
        "The same numbers go to TensorBoard (`tensorboard/`) and to other [log writers](loggers.md); `rlinf report`",
        "plots them. Means are over all items of a step on all ranks, so they do not depend on the plan; times do.",
        "Metrics that an algorithm does not have are left out.",
    ]
    for title, metrics in (("Training steps", TRAINING), ("Evaluations", EVALUATION)):
        parts += ["", f"## {title}"]
        for job, heading in titles.items():
            rows = [metric for metric in metrics if metric.job == job]
            if rows:
                parts += ["", f"**{heading}**", "", "| metric | unit | meaning |", "|---|---|---|"]
                parts += [f"| `{metric.name}` | {metric.unit} | {_linked(metric.meaning)} |" for metric in rows]
    parts += ["", *LOGGERS]
    return "\n".join([*parts, "", "`python -m rlinf.glossary` writes this page.", ""])


if __name__ == "__main__":
    print(page(), end="")
