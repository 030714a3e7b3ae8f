"""Records of a run's steps, evaluations and result, in its folder and on the terminal."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

from rlinf.console.progress import Progress
from rlinf.jobs.base import Score
from rlinf.loop.clock import RunClock
from rlinf.loop.throughput import Throughput, without_totals
from rlinf.run_folder import RunFolder
from rlinf_sched import Plan
from rlinf_workers import COMPUTE_SPAN, SYNC_SPAN, FlowRun


class RunRecorder:
    """Writes to the run's folder and to the terminal; `scores` are those of the job, the main one first."""

    def __init__(self, folder: RunFolder, progress: Progress, scores: Sequence[Score], throughput: Throughput) -> None:
        self._folder, self._progress, self._throughput = folder, progress, throughput
        self._score, self._all_scores = scores[0], scores

    def step(self, run: FlowRun, checkpoint_times: Mapping[str, float], plan: Plan, clock: RunClock) -> None:
        """Records training step `clock.step`."""
        stage_s: dict[str, float] = defaultdict(float)
        for span in sorted(run.spans, key=lambda span: span.category == SYNC_SPAN):
            if span.category in (COMPUTE_SPAN, SYNC_SPAN):
                stage_s[span.name if span.category == COMPUTE_SPAN else "sync"] += span.duration_s
        times = {"time/step_s": run.duration_s, **{f"time/{stage}_s": seconds for stage, seconds in stage_s.items()}}
        computed = self._throughput.of(run.metrics, stage_s, run.duration_s, plan)
        metrics = {**without_totals(run.metrics), **computed, **times, **checkpoint_times}
        self._folder.metrics(clock.step, metrics, time_s=clock.training_s)
        self._folder.samples(clock.step, run.shown_rows)
        self._progress.step(clock.step, run.metrics, run.duration_s, stage_s)
        self._show_warnings()

    def evaluation(self, metrics: Mapping[str, float], clock: RunClock) -> float:
        """Records an evaluation and returns its score."""
        self._folder.evaluation(clock.step, without_totals(metrics), time_s=clock.training_s)
        self._progress.evaluation(clock.step, {score.name: metrics[score.name] for score in self._all_scores})
        for name in (name for name in metrics if name.startswith(f"{self._score.name}/")):
            self._progress.message(f"evaluation after step {clock.step}: {name} {metrics[name]:.2f}")
        self._show_warnings()
        return metrics[self._score.name]

    def _show_warnings(self) -> None:
        for text in self._folder.take_warnings():
            self._progress.warning(f"warning: {text}")

    def latest_score(self, clock: RunClock) -> float:
        return self._folder.last_evaluation().get(self._score.name, clock.before)

    def result(self, score: float, stage_s: Mapping[str, float], clock: RunClock) -> str:
        """Writes the result and the report of a finished run. Returns the table of scores and times, with the report's
        path."""
        from rlinf.report import write_report

        training_s, best = clock.training_s, self._folder.best_checkpoint()
        best_score = self._folder.read_state(best)["own_score"] if best else math.nan
        self._folder.result(
            {
                "score": self._score.name,
                "score_is_share": self._score.is_share,
                "lower_is_better": self._score.lower_is_better,
                "before": clock.before,
                "after": score,
                "best": best and {"checkpoint": best.name, "score": best_score},
                "num_steps": clock.step,
                "training_s": training_s,
                "stage_seconds": dict(stage_s),
            }
        )
        report_path = write_report(self._folder.path)
        self._folder.send_files()
        first, last = self._folder.first_evaluation(), self._folder.last_evaluation()
        scores = [(one, first.get(one.name, math.nan), last.get(one.name, math.nan)) for one in self._all_scores]
        part = f"{self._score.name}/"
        tasks = {
            name.removeprefix(part): (first.get(name, math.nan), value)
            for name, value in last.items()
            if name.startswith(part)
        }
        table = final_table(scores, best and (best.name, best_score), stage_s, training_s, tasks)
        return f"{table}\nreport: {report_path}"


def final_table(
    scores: Sequence[tuple[Score, float, float]],
    best: tuple[str, float] | None,
    stage_s: Mapping[str, float],
    training_s: float,
    tasks: Mapping[str, tuple[float, float]] | None = None,
) -> str:
    """The last thing a run prints.

    Args:
        scores: with their values before and after; the first is the one that the job is about.
        best: name of the best checkpoint and its value of the first score.
        tasks: the first score of each task, before and after, where there are several.
    """
    rows: list[tuple[str, str]] = []
    for score, before, after in scores:
        rows += [(score.text, ""), ("  before", score.show(before)), ("  after", score.show(after))]
        if best is not None and score is scores[0][0]:
            rows.append((f"  best, {best[0]}", score.show(best[1])))
    rows += [
        ("training time", f"{training_s:.0f} s"),
        ("compute by stage, all ranks", ""),
        *((f"  {stage}", f"{seconds:.0f} s") for stage, seconds in sorted(stage_s.items(), key=lambda kv: -kv[1])),
    ]
    if tasks:
        score = scores[0][0]
        rows.append(("by task, before and after", ""))
        rows += [
            (f"  {task}", f"{score.show(before):>8} {score.show(after):>8}") for task, (before, after) in tasks.items()
        ]
    width = max(len(left) for left, _ in rows) + 2
    return "\n".join(f"{left:<{width}}{right:>8}".rstrip() for left, right in rows)
