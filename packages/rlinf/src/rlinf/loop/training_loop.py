"""The training loop that every job shares: start, SFT warm-up or resume, step, evaluate, checkpoint, report.

A job brings its flows and what is fed to them; nothing here knows whether a language model or a robot learns, or in
which mode.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

from rlinf.config.devices import device_kind
from rlinf.config.downloads import snapshot_folders
from rlinf.console.activities import starting
from rlinf.console.progress import Progress
from rlinf.errors import ProcessesLost, RlinfError, RunFailed
from rlinf.jobs.base import Job
from rlinf.loop.checkpoint_writer import CheckpointWriter
from rlinf.loop.clock import RunClock
from rlinf.loop.deadlines import Deadlines
from rlinf.loop.ending import reasons_to_end
from rlinf.loop.gpu_memory import GpuMemoryHistory
from rlinf.loop.learning_signal import LearningSignal
from rlinf.loop.moving import UpcomingMove, begin_move, passed_state
from rlinf.loop.pauses import next_pause
from rlinf.loop.plan_times import PlanHistory, busy_seconds
from rlinf.loop.profiling import StepProfiles
from rlinf.loop.recorder import RunRecorder
from rlinf.loop.restarts import Restarts
from rlinf.loop.session import Session
from rlinf.loop.stopping import StopRequest
from rlinf.loop.throughput import Throughput
from rlinf.loop.watch import RunWatch
from rlinf.planning.auto_mode import AutoMode
from rlinf.planning.memory import memory_lines
from rlinf.planning.plans import RunPlans, make_plans, moved_stages, placements_to_measure
from rlinf.planning.side_by_side import memory_for_both
from rlinf.processes import fork_server
from rlinf.processes.executor import make_executor, run_failed
from rlinf.processes.venvs import describe_venvs
from rlinf.run_folder import RunFolder
from rlinf_sched import flow_diagram
from rlinf_workers import Executor, Measured, WorkersError


class TrainingLoop:
    """One run of a job in its folder; `restarts` counts them, where an earlier loop has begun."""

    def __init__(self, job: Job, folder: RunFolder, restarts: Restarts | None = None) -> None:
        self._job = job
        self._config = job.config
        self._folder = folder
        self._clock = RunClock()
        self._history = PlanHistory(folder)
        self._deadlines = Deadlines(job.config.run.step_timeout_s, job.judging_s)
        self._signal = LearningSignal()
        self._result = ""
        self._only_measures = False
        self._stop = StopRequest()
        self._restarts = restarts or Restarts(job.config.run)
        self._saved_step: int | None = None
        """Step of the newest checkpoint, whole or under way."""
        self._gpu_memory: GpuMemoryHistory | None = None
        """None: the job's memory is not counted."""
        self._placements: list[RunPlans] = []
        """In a measurement, the placements that are still to be measured."""
        self._upcoming: UpcomingMove | None = None
        """The move that is made between two steps, once its workers have started."""
        on_slots = device_kind(job.config.cluster, job.machine) == "cpu"
        self._forks = on_slots and fork_server.start(job.config)
        self.progress = Progress(total=job.config.run.num_steps)
        self._profiles = StepProfiles(job.config.run.profiled_steps, folder.path, self.progress.message)
        self._record = folder.record() if job.config.run.record else None
        gpus = () if on_slots else job.machine.gpus
        self._recorder = RunRecorder(
            folder, self.progress, (job.score, *job.other_scores), Throughput(job.shapes, gpus)
        )

    def run(self) -> str:
        """Returns the table of scores and times, and where the report is.

        Raises: UserError (before any process starts), RunFailed (with role, rank, cause and log tail), ProcessesLost
            where all processes have to be new.
        """
        self._run()
        return self._result

    def measure(self) -> Measured:
        """The first steps of a run, all stages together on all devices and then apart, and what they took. Raises: as
        `run`."""
        self._only_measures = True
        self._run()
        assert self._auto.measured is not None, "a measurement ends with what it found or an error"
        return self._auto.measured

    @property
    def step(self) -> int:
        """Training steps done."""
        return self._clock.step

    def _run(self) -> None:
        flows = self._flows = self._job.build(self._folder.path)
        with self.progress.doing("planning the placement of the workers"):
            if self._only_measures:
                planned, *self._placements = placements_to_measure(self._job, flows)
            else:
                planned = make_plans(self._job, flows, self._folder.path)
        self._auto = AutoMode(self._job, flows, planned, self.progress.message)
        if self._only_measures:
            self.progress.total = sum(len(self._auto.probes_of(placed)) for placed in (planned, *self._placements))
        self._job.write_inputs(self._folder.path)
        if self._job.venvs:
            self._folder.venvs(describe_venvs(self._job.venvs))
        self._folder.write("flow.json", flows.train.graph().to_json())
        self._folder.write("flow.mmd", flow_diagram(flows.train.graph()))
        self._run_under(planned)

    def _run_under(self, planned: RunPlans) -> None:
        """Processes where the plans have them, until the run ends."""
        executor = make_executor(
            self._config.cluster,
            planned.cluster,
            models=snapshot_folders(self._config),
            log_folder=self._folder.path / "logs",
            worker_timeout_s=self._config.run.worker_timeout_s,
            forks=self._forks,
            venvs=self._job.venvs,
        )
        self._session = Session(
            self._job, self._flows, executor, self._folder, self.progress, self._deadlines, self._record
        )
        watch = RunWatch(
            executor,
            self._folder.path,
            expected_s=lambda: self._history.present.expected_s,
            message=self.progress.message,
        )
        with CheckpointWriter(self._folder, self._session.note) as self._checkpoints, executor, watch:
            self._begin_plan(planned)
            go_on = partial(self._start, planned)
            try:
                while True:
                    try:
                        self._train(go_on())
                        self._checkpoints.wait()
                        return
                    except WorkersError as error:
                        failure = self._failure(error, executor, watch)
                        if not isinstance(failure, ProcessesLost):
                            raise failure from error
                        go_on = partial(self._repair, failure)
            except Exception:
                self._checkpoints.wait_until_written()  # the processes that are left write theirs to the end
                raise
            finally:
                self._end_upcoming()

    def _failure(self, error: WorkersError, executor: Executor, watch: RunWatch) -> RlinfError:
        """What ended a step, in words; explained in the folder where there is more to say."""
        logs = None if self._only_measures else self._folder.path / "logs"
        if executor.explanation is not None and not self._only_measures:
            watch.explain_end(executor.explanation)
            executor.explanation = None
        return run_failed(error, logs, during=f"step {self._clock.step}: ")

    def _start(self, planned: RunPlans) -> float:
        """All processes, and where they begin. Returns the latest score."""
        executor = self._session.executor
        with self.progress.doing(partial(starting, executor)):
            for flow in self._flows:
                executor.start(flow, planned.plans[flow.name])
            if (checkpoint := self._folder.latest_checkpoint()) is not None:
                return self._resume(checkpoint)
            self._session.sync_weights()
        self._job.prepare(self._session)
        if not self._only_measures:
            self._clock.before = self._evaluate()
            self._job.before_training(self._session, self._clock.before)
            self._session.stage_s.clear()
            self._save_checkpoint()
        return self._clock.before

    # -- lost processes --------------------------------------------------------------------------------------------

    def _repair(self, failure: ProcessesLost) -> float:
        """New processes in place of those that were lost, while the others stay. The run goes on with the step that
        failed, or from the newest checkpoint where a trainer was lost or had begun with that step, or steps overlap:
        their completions come from weights that are gone. Returns the latest score.

        Raises: RunFailed where the run is to end. ProcessesLost where it has no checkpoint or this does not work: all
            processes have to be new then.
        """
        if self._only_measures or self._stop.is_made:  # whoever asked for it is not kept waiting
            raise RunFailed(str(failure)) from failure
        if self._saved_step is None:
            raise failure
        self._restarts.check(failure, self._clock.step)
        session, began_s = self._session, time.monotonic()
        try:
            with self.progress.doing("replacing the lost processes"):
                changed = session.executor.repair()
            if self._upcoming is not None:  # perhaps there was no memory for both, so it does not try that again
                self._upcoming = replace(self._upcoming, rehearsal=())
            self._profiles.forget()
            if changed & self._job.trainers.keys() or self._flows.train.max_staleness:
                self._checkpoints.wait_until_written()
                checkpoint = self._folder.begin_again(str(failure))
                assert checkpoint is not None, "the run has saved one"
                self._clock, self._saved_step = RunClock(), None
                self._history.clear()
                latest = self._resume(checkpoint)
                self._history.begin(self._auto.plan, self._auto.problem, self._clock.step)
            else:
                latest = self._recorder.latest_score(self._clock)
                self._clock.stop()
                session.sync_weights()
                self._job.restore(session, self._clock.step)
        except WorkersError as error:
            raise ProcessesLost(f"{failure}\nand then: {error}") from error
        session.note(
            f"{failure.summary}; {', '.join(sorted(changed)) or 'no process'} replaced in "
            f"{time.monotonic() - began_s:.1f} s, the run goes on with step {self._clock.step}"
        )
        return latest

    def _begin_plan(self, planned: RunPlans) -> None:
        plan = self._auto.plan
        self._folder.write("plan.json", plan.to_json())
        for note in (*self._config.notes, *self._job.notes, *planned.notes):
            self._session.note(note)
        self.progress.message(f"{self._config.name}, {plan.mode} on {planned.cluster.describe()}; {plan.reason}")
        if self._job.memory is not None:
            place = self._job.memory.fullest_place(plan)
            self._gpu_memory = GpuMemoryHistory(self._folder, plan, place)
            for line in memory_lines(place):
                self.progress.message(line)
        self._history.begin(plan, self._auto.problem, self._clock.step)

    # -- the program -----------------------------------------------------------------------------------------------

    def _train(self, latest: float) -> None:
        self._clock.start()
        with nullcontext() if self._only_measures else self._stop:
            self._train_until(latest)

    def _train_until(self, latest: float) -> None:
        """Trains until the run is over, or somebody stops it.

        Raises: KeyboardInterrupt, or Terminated, after a checkpoint.
        """
        if not self._only_measures:
            latest = self._close_step(latest)  # of a session that ended before it was done with the step
            self._auto.fit_into(self._config.run.num_steps - self._clock.step)
        while self._session.num_ahead or not self._is_over(latest):
            step = self._clock.step
            if self._auto.probes:
                self._session.executor.replan(self._flows.train, self._auto.probes[0])
            self._profiles.before_step(step, self._session.executor)
            predicted_s, overlapped = self._history.present.predicted_s, self._auto.overlaps
            flow_run = self._session.train(step, predicted_s=predicted_s, until=self._next_pause(latest))
            self._job.trained(flow_run)
            busy_s = busy_seconds(flow_run)
            self._history.present.add(flow_run, busy_s)
            self._checkpoints.check()
            self._recorder.step(flow_run, self._checkpoints.take_times(), self._auto.plan, self._clock)
            self._session.judge(flow_run.metrics, step)
            if (note := self._signal.observe(flow_run.metrics)) is not None:
                self._session.note(note)
            asks_for_plan = self._upcoming is None and self._auto.observe(flow_run, busy_s)
            self._clock.step, self._clock.own_score = step + 1, None
            self._job.stepped(self._session, step + 1)
            with self.progress.doing("writing the profile"):
                ends = asks_for_plan or self._stop.is_made or self._is_over(latest)
                is_last = ends and not self._session.num_ahead
                self._profiles.after_step(step + 1, self._session.executor, is_last=is_last)
            latest = self._close_step(latest)
            if self._only_measures and asks_for_plan:
                self._auto.measure(self._session.executor)
                if not self._placements:
                    return
                self._move(self._placements.pop(0), self._auto.begin_probes)
            elif asks_for_plan and not self._is_over(latest):
                self._replan()
            self._move_if_ready()
            if self._auto.overlaps and not overlapped:
                self._save_checkpoint()  # the steps before it would have other numbers if they overlapped
        self._finish(latest)

    def _close_step(self, latest: float) -> float:
        """The evaluation and the checkpoint that are due after so many steps, where they were not made yet. Returns the
        latest score.

        Raises: KeyboardInterrupt or Terminated where somebody stops the run, which is saved then.
        """
        run, stop, done = self._config.run, self._stop, self._clock.step
        if self._session.num_ahead:
            return latest  # nothing is due: steps pause for it
        if self._clock.own_score is None and (self._is_over(latest) or done % run.evaluate_every == 0):
            latest = self._evaluate_unless(latest)
        if stop.is_made or self._is_over(latest) or done % run.checkpoint_every == 0:
            self._save_checkpoint()
        if stop.is_made:
            self._checkpoints.wait()
            self.progress.message(f"stopped after step {done}; its checkpoint is saved")
            raise stop.error
        return latest

    def _next_pause(self, latest: float) -> int:
        """The first step that may not begin yet. A run that is about to end begins no further ones."""
        step = self._clock.step
        if self._only_measures or not self._auto.overlaps or self._stop.is_made or self._is_over(latest):
            return step + max(1, self._session.num_ahead)
        return next_pause(self._config.run, step, self._record)

    def _evaluate_unless(self, latest: float) -> float:
        """The score of the present weights; the latest one where somebody stops the run, which then evaluates when it
        is resumed."""
        try:
            with self._stop.raising():
                return self._evaluate()
        except KeyboardInterrupt:
            if self._stop.is_urgent:
                raise
            return latest

    def _replan(self) -> None:
        """Asks for a plan, and goes on under it if there is a better one."""
        before, num_steps = self._auto.plan, self._config.run.num_steps - self._clock.step
        self._session.executor.replan(self._flows.train, before)  # ends the last probe
        with self.progress.doing("planning from the measured times"):
            planned = self._auto.better(self._session.executor, num_steps=num_steps, move_s=self._session.start_s)
        if planned is None:
            self._history.keep(self._auto.plan, self._auto.problem, self._clock.step)
        elif moved_stages(before, after := planned.plans[self._flows.train.name]):
            self._begin_move(planned)
        else:
            self._auto.take(planned)
            self._session.executor.replan(self._flows.train, after)
            self._begin_plan(planned)

    def _begin_move(self, planned: RunPlans) -> None:
        """Starts workers in the places of other plans while steps go on, if there is memory for both."""
        executor, checkpoint = self._session.executor, self._folder.latest_checkpoint()
        memory = memory_for_both(self._job, self._auto.plan, planned)
        self._upcoming = begin_move(self._job, executor, planned, memory, checkpoint)
        self.progress.message(f"auto: {self._upcoming.text}")

    def _end_upcoming(self) -> None:
        """Forgets the upcoming move, and ends the processes that were started for it."""
        if self._upcoming is not None:
            self._upcoming = None
            self._session.executor.end_ahead()

    def _move_if_ready(self) -> None:
        """Moves once the new workers have started and no checkpoint is being written; it waits for that of a step at
        which one was due."""
        if self._upcoming is None or (
            self._checkpoints.is_writing and self._clock.step % self._config.run.checkpoint_every
        ):
            return
        if self._upcoming.is_ready(self._session.executor):
            self._move(self._upcoming.planned, self._auto.take)
            self._end_upcoming()

    def _move(self, planned: RunPlans, adopt: Callable[[RunPlans], None]) -> None:
        """Goes on under plans that place workers elsewhere; the others keep running. Trainers that move take their
        state along.

        Args:
            adopt: makes the plans those of mode auto.

        Raises: ProcessesLost if a worker was lost meanwhile; all processes have to be new then.
        """
        session, began_s = self._session, time.monotonic()
        stages = moved_stages(self._auto.plan, planned.plans[self._flows.train.name])
        groups = {name: own[0] for name, own in self._flows.train.graph().workers.items()}
        moving = {name: folder for name, folder in self._job.trainers.items() if groups[name] in stages}
        try:
            with self.progress.doing("moving workers to other devices"), ExitStack() as passing:
                state = self._state_to_pass(passing, moving) if moving else None
                moved = session.executor.move(planned.plans)
                if state is not None:
                    session.load_trainers(state, moving)
                if moved:
                    session.sync_weights()
                    self._job.restore(session, self._clock.step)
                    self._profiles.forget()
        except WorkersError as error:
            raise ProcessesLost(f"while workers moved to other devices: {error}") from error
        moved_s = time.monotonic() - began_s
        adopt(planned)
        self._begin_plan(planned)
        if moved:
            self.progress.message(f"moved {', '.join(sorted(moved))} in {moved_s:.2g} s, without a restart")

    def _state_to_pass(self, passing: ExitStack, moving: Mapping[str, str]) -> Path:
        """The folder with the present state of trainers that move: in shared memory while `passing` is open if they
        have started in advance, else the checkpoint of this step.

        Args:
            moving: as `Job.trainers`.
        """
        self._checkpoints.wait()  # the trainers that write it are about to end
        if self._upcoming is not None and self._upcoming.rehearsal:
            like = self._latest_checkpoint()
            folder = passing.enter_context(passed_state(self._session.executor, moving, like))
            if folder is not None:
                return folder
        self._save_checkpoint()
        self._checkpoints.wait()
        return self._latest_checkpoint()

    def _latest_checkpoint(self) -> Path:
        checkpoint = self._folder.latest_checkpoint()
        assert checkpoint is not None, "the run has saved one"
        return checkpoint

    def _resume(self, checkpoint: Path) -> float:
        """Returns the latest score."""
        state = self._folder.read_state(checkpoint)
        self._history.resume_at(state["step"])
        clock = self._clock = RunClock(**{name: state[name] for name in RunClock().to_json()})
        self._saved_step = clock.step
        self._session.stage_s.update(state["stage_s"])
        with self.progress.doing(f"loading {checkpoint.name}"):
            self._session.load_trainers(checkpoint)
            self._session.sync_weights()
        self._job.load(checkpoint)
        self._job.restore(self._session, clock.step)
        self.progress.message(f"resumed from {checkpoint.name}")
        return state["score"]

    def _finish(self, score: float) -> None:
        self._profiles.after_step(self._clock.step, self._session.executor, is_last=True)
        with self.progress.doing("writing the last checkpoint"):
            self._checkpoints.wait()
        self._history.write()
        self._note_gpu_memory()
        with self.progress.doing("writing the report"):
            self._result = self._recorder.result(score, self._session.stage_s, self._clock)
        if self._record is not None and self._record.must_match:
            self._result += (
                f"\nreplayed {self._record.num_equal} steps: samples, rewards and weights are the recorded ones"
            )

    def _evaluate(self) -> float:
        """Scores the present weights, writes it down and returns the score."""
        score = self._clock.own_score = self._recorder.evaluation(self._session.evaluate(self._clock.step), self._clock)
        return score

    def _save_checkpoint(self) -> None:
        """Begins a checkpoint of the present weights; does nothing where this step has one."""
        step = self._clock.step
        if self._saved_step == step:
            return
        self._saved_step = step
        state = {
            **self._clock.to_json(),
            "score": self._recorder.latest_score(self._clock),
            "score_name": self._job.score.name,
            "lower_is_better": self._job.score.lower_is_better,
            "stage_s": dict(self._session.stage_s),
        }
        with self.progress.doing("saving a checkpoint"):
            self._checkpoints.save(self._session.trainers, step, state, self._job.save)
        self._history.write()
        self._note_gpu_memory()

    def _note_gpu_memory(self) -> None:
        if self._gpu_memory is not None and self._clock.step:
            self._gpu_memory.read(self._session.executor)

    def _is_over(self, score: float) -> bool:
        """All steps done, the score reached or the time up; a measurement ends by itself."""
        if self._only_measures:
            return False
        step, training_s = self._clock.step, self._clock.training_s
        if self._record is not None and self._record.must_match and step >= self._record.num_steps:
            return True
        falls = self._job.score.lower_is_better
        reasons = reasons_to_end(self._config.run, step=step, score=score, training_s=training_s, lower_is_better=falls)
        return bool(reasons)
