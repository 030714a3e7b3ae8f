"""Writes the folder of a run; all files stay readable if the process is killed.

    config.yaml  manifest.json  plan.json  flow.json  flow.mmd
    problem.json       what the stages take, once it was measured: the plan was made from it
    plan_times.json    predicted and measured seconds of a step and its stages, for each plan that the run had
    memory.json        predicted and measured memory of each role on the fullest GPU
    metrics.jsonl      {"step", "time_s", "metrics"} a training step, steps counted from 0
    evaluations.jsonl  {"step", "time_s", "metrics"}; here `step` counts the training steps done
    samples.jsonl      {"step", "prompt_index", "sample", "completion", "reward", ...} a completion of a shown group
    videos/step-000100.mp4   episodes of the evaluation after 100 training steps
    episodes/step-000100.npz   training episodes that ended in the 100th step (episodes.py)
    record.jsonl       what decided the numbers of each step, with run.record (record.py)
    trace.json  logs/  checkpoints/step-000100/  result.json  report.html
    waits.json         what each process waits for, about once a second; explain-step-12.txt (loop/watch.py)
    tensorboard/       and what else the log writers of `run.loggers` keep here
    .lock              the process that writes here

A resumed run continues as if it had not stopped: everything written after the newest complete checkpoint is dropped.
"""

from __future__ import annotations

import math
import re
import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from rlinf.errors import UserError
from rlinf.log_writers.base import LoggedRun
from rlinf.run_folder import checkpoints
from rlinf.run_folder.episodes import drop_episodes
from rlinf.run_folder.fingerprints import changed_code, changed_inputs, refuse_changed
from rlinf.run_folder.lock import FolderLock, check_empty
from rlinf.run_folder.manifest import Manifest, failure_of, new_manifest, timestamp
from rlinf.run_folder.plain_files import read_plain_json
from rlinf.run_folder.record import Replay, RunRecord
from rlinf.run_folder.rows import append_rows, keep_rows, read_rows, sync, to_json, write_file
from rlinf.run_folder.trace import LIMIT_BYTES, TraceEvent, TraceWriter

if TYPE_CHECKING:
    from rlinf.log_writers.delivery import LogWriters

PROBLEM = "problem.json"
PLAN_TIMES = "plan_times.json"
GPU_MEMORY = "memory.json"
RESULT = "result.json"
WAITS = "waits.json"
ASKED, SEEN = "look-elsewhere", "seen-elsewhere.json"
NO_INPUTS: Mapping[str, str] = MappingProxyType({})
VIDEOS = "videos"
"""Folder with the films of evaluations."""
ARTIFACTS = ("config.yaml", "plan.json", RESULT, "report.html")
"""Files that log writers get at the end of a run."""
METRICS, EVALUATIONS, SAMPLES = "metrics.jsonl", "evaluations.jsonl", "samples.jsonl"


class RunFolder:
    """One run's folder, open for writing by one process, from one thread.

    Args:
        path: for a new run it must not exist, or be empty.
        config_yaml: the resolved config; for a resumed run it replaces the recorded one.
        command: the command line, for the manifest.
        keep_checkpoints: number of newest checkpoints kept beside the best one, at least 1.
        resume: continue the run in the folder from its newest complete checkpoint; from the start if it has none.
        inputs: fingerprints of the run's inputs by config key and path; compared when it is resumed.
        accept_changed_inputs: a resumed run uses changed inputs and adds a note.
        trace_bytes: approximate maximum size of trace.json; 0: no trace.

    Raises: UserError if the folder is not empty, there is nothing to resume, an input has changed, no checkpoint is
        complete, or another process writes the folder.
    """

    def __init__(
        self,
        path: Path,
        *,
        config_yaml: str,
        command: Sequence[str],
        keep_checkpoints: int,
        resume: bool = False,
        trace_bytes: int = LIMIT_BYTES,
        inputs: Mapping[str, str] = NO_INPUTS,
        accept_changed_inputs: bool = False,
    ) -> None:
        assert keep_checkpoints >= 1, f"keep_checkpoints={keep_checkpoints}"
        self.path = path
        self._keep_checkpoints = keep_checkpoints
        self._trace: TraceWriter | None = None
        self._loggers: LogWriters | None = None
        self._failure: str | None = None
        self._replays = False
        self._on_step: Callable[[int, Mapping[str, float]], None] | None = None
        self._resumed_from_step: int | None = None
        self._earlier_plan_times: list[Any] = []
        notes: list[str] = []
        if resume:
            self._manifest = Manifest.read(path, what="run")
            notes = _check_inputs(path, self._manifest, inputs, accept=accept_changed_inputs)
        else:
            check_empty(path)
            path.mkdir(parents=True, exist_ok=True)
            self._manifest = Manifest(path, new_manifest(config_yaml, command))
        self._lock = FolderLock(path, command)
        with ExitStack() as opened:
            opened.callback(self._lock.release)
            if resume:
                self._rewind()
            else:
                check_empty(path)  # another run may have used the folder since
            write_file(path / "config.yaml", config_yaml)
            if trace_bytes:
                self._trace = self._open_trace(trace_bytes)
                opened.callback(self._trace.close)
            self._manifest.values["inputs"] = dict(inputs)
            self._begin_session(command)
            self._manifest.note(*notes, *self._lock.notes)
            self._opened = opened.pop_all()

    def begin_again(self, failure: str) -> Path | None:
        """Ends the session and begins another from the newest complete checkpoint, which is returned; None: from the
        start. Everything written after it is dropped, as on resuming.

        Args:
            failure: why the session ended.
        """
        before = self._manifest.values["sessions"][-1]
        self._manifest.end_session(failure)
        self._rewind()
        if self._loggers is not None:
            self._loggers.rewind(self._resumed_from_step or 0)
        self._begin_session(before["command"])
        if "venvs" in before:
            self.venvs(before["venvs"])
        return self.latest_checkpoint()

    def close(self, failure: str | None = None) -> None:
        """Ends the session and closes the files; may be called more than once.

        Args:
            failure: why the run stopped; None if it succeeded.
        """
        self._failure = self._failure or failure
        if self._manifest.values["ended"] is None or failure is not None:
            self._manifest.end_session(failure)
        self._opened.close()

    def discard(self) -> None:
        """Deletes a new run's folder if it has no step, no evaluation and no checkpoint."""
        began = (METRICS, EVALUATIONS, checkpoints.CHECKPOINTS)
        if self._resumed_from_step is None and not any((self.path / name).exists() for name in began):
            shutil.rmtree(self.path)

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        self.close(failure_of(kind, error))

    def record(self) -> RunRecord:
        """The record of the run, with the steps that it has already."""
        return RunRecord(self.path, must_match=self._replays)

    def begin_replay(self, replay: Replay) -> None:
        """Makes this new run a replay of another one."""
        self._replays = True
        replay.copy_to(self.path, (METRICS, EVALUATIONS, SAMPLES))
        _drop_rows(self.path, _checkpoint_step(self.path))

    # -- description of the run ------------------------------------------------------------------------------------

    def note(self, text: str) -> None:
        """Records a note for the user, such as a fall-back; the same text only once."""
        self._manifest.note(text)

    def venvs(self, values: Mapping[str, Any]) -> None:
        """Records the venvs of roles in this session."""
        self._manifest.session("venvs", values)

    def agreement(self, values: Mapping[str, Any]) -> None:
        """Records this session's verdict on the log-prob mismatch."""
        self._manifest.session("agreement", values)

    def write(self, name: str, content: str) -> None:
        """Writes one of the files that describe the run: plan.json, flow.json, flow.mmd, problem.json."""
        write_file(self.path / name, content)

    def write_plan_times(self, plans: Sequence[Mapping[str, Any]]) -> None:
        """Writes predicted and measured times of this session's plans, in order; those of earlier sessions stay."""
        write_file(self.path / PLAN_TIMES, to_json({"plans": [*self._earlier_plan_times, *plans]}, indent=1) + "\n")

    # -- log writers -----------------------------------------------------------------------------------------------

    def logged_run(self, config: Mapping[str, Any]) -> LoggedRun:
        """Returns what log writers are told of the run; `config` is the resolved one."""
        return LoggedRun(
            id=self._manifest.run_id,
            name=self.path.resolve().name,
            folder=self.path,
            config=config,
            resumed_from_step=self._resumed_from_step,
        )

    def log_to(self, loggers: LogWriters) -> None:
        """Sends everything from now on to these log writers too; they are closed with the folder."""
        self._loggers = loggers
        self._opened.callback(lambda: self._manifest.note(*loggers.close(self._failure)))

    def call_on_step(self, on_step: Callable[[int, Mapping[str, float]], None]) -> None:
        """Calls a function with the number and the metrics of each training step from now on."""
        self._on_step = on_step

    def take_warnings(self) -> list[str]:
        """Returns new warnings of the log writers, and notes them."""
        warnings = [] if self._loggers is None else self._loggers.take_warnings()
        self._manifest.note(*warnings)
        return warnings

    def send_files(self) -> None:
        """Sends config, plan, result and report to the log writers, those that exist."""
        for file in (self.path / name for name in ARTIFACTS):
            if self._loggers is not None and file.is_file():
                self._loggers.artifact(file.stem, file)

    # -- what happens in it ----------------------------------------------------------------------------------------

    def metrics(self, step: int, values: Mapping[str, float], *, time_s: float) -> None:
        """Writes the metrics of one training step.

        Args:
            step: the step's number, from 0.
            values: NaN and infinities are written as null.
            time_s: training time so far, including earlier sessions.
        """
        append_rows(self.path / METRICS, [_row(step, values, time_s)])
        if self._loggers is not None:
            self._loggers.metrics(step, values)
        if self._on_step is not None:
            self._on_step(step, values)

    def evaluation(self, step: int, values: Mapping[str, float], *, time_s: float) -> None:
        """Writes one evaluation, after `step` training steps."""
        append_rows(self.path / EVALUATIONS, [_row(step, values, time_s)])
        if self._loggers is not None:
            film = film_path(self.path, step)
            self._loggers.evaluation(step, values, film if film.is_file() else None)

    def first_evaluation(self) -> dict[str, float]:
        """Returns the metrics of the evaluation before the first step, as `last_evaluation`."""
        return _evaluation(read_rows(self.path / EVALUATIONS)[:1])

    def last_evaluation(self) -> dict[str, float]:
        """Returns the metrics of the newest evaluation, null as NaN; empty before the first one."""
        return _evaluation(read_rows(self.path / EVALUATIONS)[-1:])

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Writes some completions of a step, for inspection."""
        rows = [{"step": step, **row} for row in rows]
        append_rows(self.path / SAMPLES, rows)
        if self._loggers is not None:
            self._loggers.samples(step, rows)

    def trace(self, events: Sequence[TraceEvent]) -> None:
        """Adds events to the trace, if the run has one."""
        if self._trace is None:
            return
        self._trace.write(events)
        if self._trace.leaves_out:
            self.note("trace.json holds the first and the last steps only: all are more than run.trace_megabytes")

    def result(self, values: Mapping[str, Any]) -> None:
        """Writes the result of the run, which marks it as ended."""
        write_file(self.path / RESULT, to_json(values, indent=1) + "\n")
        self._manifest.end_session()

    # -- checkpoints -----------------------------------------------------------------------------------------------

    @contextmanager
    def new_checkpoint(
        self, step: int, state: Mapping[str, Any], digests: Mapping[str, str] = checkpoints.NONE
    ) -> Iterator[Path]:
        """Yields a folder to save into; at the end of the block it becomes `checkpoints/step-<step>`, and old ones are
        deleted.

        Args:
            step: number of training steps done.
            state: the driver's state for resuming; JSON values. "step" is set to `step`; "own_score" is the score by
                which the best checkpoint is chosen, null if it was not evaluated.
            digests: see `writing_with_checksums`.

        The block may end in another thread than the one that writes to the folder.
        """
        final = self.path / checkpoints.CHECKPOINTS / checkpoints.checkpoint_name(step)
        with checkpoints.writing_with_checksums(final, {**state, "step": step}, digests) as partial:
            yield partial
            for name in (
                METRICS,
                EVALUATIONS,
                SAMPLES,
            ):  # rows from before a checkpoint must not be lost if it survives
                if (self.path / name).exists():
                    sync(self.path / name)
        if not checkpoints.point_to_best(self.path / checkpoints.CHECKPOINTS):
            self.note("the file system has no symbolic links, so checkpoints/best is not there; the report names it")
        checkpoints.prune(self.path / checkpoints.CHECKPOINTS, keep=self._keep_checkpoints)

    def latest_checkpoint(self) -> Path | None:
        """Returns the newest checkpoint; None if there is none."""
        steps = checkpoints.checkpoint_steps(self.path / checkpoints.CHECKPOINTS)
        return steps[-1][1] if steps else None

    def best_checkpoint(self) -> Path | None:
        """Returns the checkpoint with the best score; None if none was evaluated."""
        return checkpoints.best_checkpoint(self.path / checkpoints.CHECKPOINTS)

    def read_state(self, checkpoint: Path) -> dict[str, Any]:
        """Reads the state passed to `new_checkpoint`, including "step"."""
        return checkpoints.read_state(checkpoint)

    # -- inner -----------------------------------------------------------------------------------------------------

    def _rewind(self) -> None:
        """Resets the folder to the point where the run continues."""
        folder = self.path / checkpoints.CHECKPOINTS
        checkpoints.remove_partial(folder)
        set_aside = checkpoints.set_aside_damaged(folder)
        for text in set_aside:
            print(f"warning: {text}")
        self._manifest.note(*set_aside)
        checkpoint_step = _checkpoint_step(self.path)
        checkpoints.point_to_best(folder)
        _drop_rows(self.path, checkpoint_step)
        (self.path / RESULT).unlink(missing_ok=True)  # the run continues, so it has no result yet
        step = self._resumed_from_step = checkpoint_step or 0
        file = self.path / PLAN_TIMES
        plans = read_plain_json(file)["plans"] if file.exists() else []
        self._earlier_plan_times = [
            {**plan, "num_steps": min(plan["num_steps"], step - plan["first_step"])}
            for plan in plans
            if plan["first_step"] < step
        ]

    def _open_trace(self, limit_bytes: int) -> TraceWriter:
        origin_ns = round(self._manifest.values["started_s"] * 1e9)
        return TraceWriter(self.path / "trace.json", origin_ns=origin_ns, limit_bytes=limit_bytes)

    def _begin_session(self, command: Sequence[str]) -> None:
        step = self._resumed_from_step
        more = {} if step is None else {"resumed_from_step": step}
        self._manifest.begin_session(command, **more)
        if self._trace is not None:
            self._trace.session(time.time_ns(), **more)


def film_path(run: Path, step: int) -> Path:
    """Returns the path of the film of the evaluation after `step` training steps."""
    return run / VIDEOS / f"{checkpoints.checkpoint_name(step)}.mp4"


def films_of(run: Path) -> dict[int, Path]:
    """Returns step -> film, ordered by step."""
    named = ((re.fullmatch(r"step-([0-9]{1,18})", path.stem), path) for path in (run / VIDEOS).glob("step-*.mp4"))
    films = {int(match[1]): path for match, path in named if match and path.is_file()}
    return dict(sorted(films.items()))


def _checkpoint_step(path: Path) -> int | None:
    """Returns the step of the newest checkpoint; None for a run that stopped before its first.

    Raises: UserError if there were checkpoints and none is left.
    """
    steps = checkpoints.checkpoint_steps(path / checkpoints.CHECKPOINTS)
    if steps:
        return steps[-1][0]
    bad = checkpoints.bad_checkpoints(path / checkpoints.CHECKPOINTS)
    num_steps = len(read_rows(path / METRICS))
    if bad or num_steps:
        what = f"all are damaged ({', '.join(bad)})" if bad else f"{path / 'checkpoints'} holds none"
        raise UserError(
            f"{path} has no checkpoint to go on from: {what}, and {num_steps} steps are in its metrics.jsonl",
            hint="put a whole checkpoint back, or start a new run in another folder",
        )
    return None


def _check_inputs(path: Path, manifest: Manifest, inputs: Mapping[str, str], *, accept: bool) -> list[str]:
    """Compares the inputs and returns notes. Raises: UserError if an input has changed and `accept` is False."""
    if "inputs" not in manifest.values:
        return ["the run began without fingerprints of its inputs: whether they have changed since is not known"]
    changed = changed_inputs(manifest.values["inputs"], inputs)
    if not accept:
        go_on = f"{resume_command(path)} --accept-changed-inputs"
        refuse_changed(changed, "run", path, f"put back what it was, or go on with what is there now: {go_on}")
    notes = [f"{name} has changed since the run began; accepted at {timestamp()}" for name in changed]
    code = changed_code(manifest.values["inputs"], inputs)
    notes += [f"{name} has changed since the run began: what follows comes from the new one" for name in code]
    for note in notes:
        print(f"note: {note}")
    return notes


def resume_command(path: Path) -> str:
    """Returns the command line that resumes the run in a folder."""
    return f"rlinf train --resume --output {shlex.quote(str(path))}"


def _evaluation(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    return {name: math.nan if value is None else value for row in rows for name, value in row["metrics"].items()}


def _row(step: int, values: Mapping[str, float], time_s: float) -> dict[str, Any]:
    return {"step": step, "time_s": round(time_s, 4), "metrics": {name: float(v) for name, v in values.items()}}


def _drop_rows(path: Path, checkpoint_step: int | None) -> None:
    """Drops rows after the checkpoint: metrics and samples of step s belong to a checkpoint of more than s steps, an
    evaluation after s steps to one of at least s."""
    limit = -1 if checkpoint_step is None else checkpoint_step
    keep_rows(path / METRICS, lambda row: row["step"] < limit)
    keep_rows(path / SAMPLES, lambda row: row["step"] < limit)
    keep_rows(path / EVALUATIONS, lambda row: row["step"] <= limit)
    drop_episodes(path, lambda step: step > limit)
