"""The score of a reasoning run, and the metrics of an evaluation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from rlinf.config.reasoning import ReasoningConfig
from rlinf.jobs.base import Score
from rlinf.jobs.rewards import JUDGES
from rlinf.tasks import TaskProblem
from rlinf_workers.roles import ScoredGroup

ACCURACY = "accuracy"


def scores_of(config: ReasoningConfig, *, judges: bool) -> tuple[Score, ...]:
    """Returns the score first, then the scores shown beside it: the reward, unless it is the accuracy itself.

    Args:
        judges: whether the reward decides if an answer is right.
    """
    evaluation = config.evaluation
    how = "of greedy answers to" if evaluation.temperature == 0 else f"(avg@{evaluation.num_samples}) on"
    reward = Score(name="reward", text=f"mean reward {how} held-out problems", is_share=False)
    if not judges:
        return (reward,)
    kind = "greedy accuracy" if evaluation.temperature == 0 else f"accuracy (avg@{evaluation.num_samples})"
    is_accuracy = config.reward.kind in JUDGES and not getattr(config.reward, "partial", False)
    return Score(name=ACCURACY, text=f"{kind} on held-out problems"), *(() if is_accuracy else (reward,))


def evaluation_metrics(
    scored: Sequence[ScoredGroup], held_out: Mapping[str, Sequence[TaskProblem]], *, judges: bool
) -> dict[str, float]:
    """Returns `reward` for the held-out problems and `reward/NAME` for each further set, and the same for `accuracy` if
    the reward judges answers: avg@k, with its standard error over problems if there are several."""
    metrics: dict[str, float] = {}
    start = 0
    for set_name, problems in held_out.items():
        name = f"/{set_name}" if set_name else ""
        groups, start = scored[start : start + len(problems)], start + len(problems)
        measured = {"reward": [float(group.rewards.double().mean()) for group in groups]}
        if judges:
            measured[ACCURACY] = [group.outcomes.count("right") / len(group.outcomes) for group in groups]
        for metric, means in measured.items():
            values = torch.tensor(means, dtype=torch.float64)
            metrics[f"{metric}{name}"] = float(values.mean())
            if len(values) > 1:
                metrics[f"{metric}_error{name}"] = float(values.std()) / math.sqrt(len(values))
        metrics[f"num_problems{name}"] = float(len(groups))
    return metrics
