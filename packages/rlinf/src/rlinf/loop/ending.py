"""When a run is over, and what to say to somebody who resumes one that is."""

from __future__ import annotations

import math
from pathlib import Path

from rlinf.config.common import RunConfig
from rlinf.run_folder.folder import RESULT, resume_command
from rlinf.run_folder.plain_files import read_plain_json


def reasons_to_end(
    run: RunConfig,
    *,
    step: int,
    score: float,
    training_s: float,
    score_name: str = "score",
    lower_is_better: bool = False,
) -> dict[str, str]:
    """Why a run ends after `step` steps -> what to change so that it goes on; empty: it goes on.

    Args:
        lower_is_better: as `Score.lower_is_better`.
    """
    reasons = {}
    if step >= run.num_steps:
        reasons[f"all of run.num_steps={run.num_steps} are done"] = f"--run.num_steps {2 * run.num_steps}"
    limit = run.stop_at_score
    if limit is not None and (score <= limit if lower_is_better else score >= limit):
        reason = f"its {score_name.replace('_', ' ')} of {score:.3g} reaches run.stop_at_score={limit:g}"
        reasons[reason] = "--run.stop_at_score null"
    if run.max_minutes is not None and training_s >= run.max_minutes * 60:
        reason = f"it has trained for run.max_minutes={run.max_minutes:g}"
        reasons[reason] = f"--run.max_minutes {2 * run.max_minutes:g}"
    return reasons


def how_to_go_on(run: RunConfig, path: Path) -> str | None:
    """What to tell about a run that has ended, by its result.json, and has nothing left to do; None: it has."""
    try:
        result = read_plain_json(path / RESULT)
        step, score, training_s = result["num_steps"], result["after"], result["training_s"]
        name, lower_is_better = str(result.get("score", "score")), bool(result.get("lower_is_better"))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    score = math.nan if score is None else score
    reasons = reasons_to_end(
        run, step=step, score=score, training_s=training_s, score_name=name, lower_is_better=lower_is_better
    )
    if not reasons:
        return None
    return (
        f"the run in {path} is finished after {step} steps: {next(iter(reasons))}; nothing was touched\n"
        f"to train on: {resume_command(path)} {' '.join(reasons.values())}"
    )
