"""When a run is over, and what to say to somebody who resumes one that is."""

from __future__ import annotations

import json
import math
import shlex
from pathlib import Path

from rlinf.config.common import RunConfig
from rlinf.run_folder.folder import RESULT


def reason_to_end(run: RunConfig, *, step: int, score: float, training_s: float) -> str | None:
    """Why a run ends after `step` steps; None: it goes on."""
    if step >= run.num_steps:
        return f"all of run.num_steps={run.num_steps} are done"
    if run.stop_at_score is not None and score >= run.stop_at_score:
        return f"its score of {score:.3g} reaches run.stop_at_score={run.stop_at_score:g}"
    if run.max_minutes is not None and training_s >= run.max_minutes * 60:
        return f"it has trained for run.max_minutes={run.max_minutes:g}"
    return None


def how_to_go_on(run: RunConfig, path: Path) -> str | None:
    """What to tell about a run that has ended, by its result.json, and has nothing left to do; None: it has."""
    try:
        result = json.loads((path / RESULT).read_text(encoding="utf-8"))
        step, score, training_s = result["num_steps"], result["after"], result["training_s"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    score = math.nan if score is None else score
    reason = reason_to_end(run, step=step, score=score, training_s=training_s)
    if reason is None:
        return None
    changes = [f"--run.num_steps {2 * run.num_steps}"] if step >= run.num_steps else []
    if run.stop_at_score is not None and score >= run.stop_at_score:
        changes.append("--run.stop_at_score null")
    if run.max_minutes is not None and training_s >= run.max_minutes * 60:
        changes.append(f"--run.max_minutes {2 * run.max_minutes:g}")
    return (
        f"the run in {path} is finished after {step} steps: {reason}; nothing was touched\n"
        f"to train on: {resume_command(path)} {' '.join(changes)}"
    )


def resume_command(path: Path) -> str:
    """The command line that goes on with the run in a folder."""
    return f"rlinf train --resume --output {shlex.quote(str(path))}"
