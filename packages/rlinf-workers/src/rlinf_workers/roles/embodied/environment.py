"""Env: steps groups of environments with the actions it receives.

The environments are divided into groups, and messages carry one group each: while one group waits for its action, the
process simulates another. Two groups per process are enough to keep both the simulator and the policy busy.

If groups have processes of their own (`EnvSpec.num_processes`), they simulate at the same time, and each result is sent
as soon as that group's rows are done: a slow reset delays only its own group. `rlinf_envs` replaces a process that dies
or hangs, and the run's manifest gets a note.

A training segment begins with resets or continues the episodes of the previous segment (docs/decisions/038). With
`EnvironmentSettings.episodes` a training step is whole episodes instead (`dealing`, docs/decisions/056). Where steps
overlap, the stage of the next one may begin beside it, in a second thread (`Worker.is_ahead`), and rows that the other
step does not need take the episodes of the later one (`dealt_group`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from rlinf_comm import record
from rlinf_envs import (
    PICTURE,
    BatchedEnv,
    Demonstration,
    Disturbance,
    EnvSpec,
    EpisodeEnd,
    EpisodeKeeper,
    EpisodeRecorder,
    ExecutedEpisode,
    KeptEpisode,
    Observation,
    Replayable,
    SuccessClassifier,
    awaited_processes,
    begins_rows,
    execute_episode,
    make_env,
    pack_episodes,
    record_expert,
    recorded_env,
)
from rlinf_workers.execution.ports import Reader, Writer
from rlinf_workers.roles.embodied.dealing import EpisodeBatch
from rlinf_workers.roles.embodied.dealt_group import DealtGroup, DealtStep, Sent
from rlinf_workers.roles.embodied.expert_queries import ExpertQueries
from rlinf_workers.roles.embodied.native_actions import native_actions
from rlinf_workers.roles.embodied.segment_group import SegmentGroup
from rlinf_workers.roles.picture_pool import PicturePool
from rlinf_workers.roles.records.embodied import Action, GroupEpisodes, GroupObservation, text_tensor
from rlinf_workers.spans import now_ns
from rlinf_workers.worker import Worker

record(EnvSpec)
record(SuccessClassifier)
record(Disturbance)
record(Demonstration)
record(ExecutedEpisode)


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentSettings:
    """The environments of a role, and the length of a segment."""

    spec: EnvSpec
    """The environments of one group; `num_envs` is their number."""
    num_groups: int
    num_steps: int
    """Steps of a training segment; a multiple of chunk_size."""
    continues: bool = False
    """Whether a training segment begins where its group's last one ended (the environments must be
    `rlinf_envs.Replayable`); False: it begins with a reset."""
    episodes: EpisodeBatch | None = None
    """The whole episodes of a training step, which simulators take one after the other; None: a step is one segment of
    each group. The environments must be `rlinf_envs.SupportsBegin`."""
    reads: tuple[str, ...]
    """The observation fields that are sent to the policy."""
    chunk_size: int = 1
    """Actions per chunk (K)."""
    num_eval_episodes: int
    same_start: bool = False
    """All environments of a group begin a training segment in the same state, so that the sums of rewards of their
    first episodes can be compared."""
    expert: ExpertQueries | None = None
    """What an expert is asked in training segments (the environments must have one, `rlinf_envs.has_expert`); None:
    nothing."""
    eval_seed: int
    """Evaluation resets with eval_seed, eval_seed + 1, ...; below 2**31."""
    eval_ignores_terminations: bool = False
    """Whether an evaluation episode runs until it is truncated; False: it also ends when the environment terminates
    it."""
    keeps_episodes: bool = False
    """Whether `interact_and_report` sends the actions and rewards of all training episodes."""
    num_recorded: int = 0
    """Record the first this many episodes of an evaluation, until `save_recordings`."""


T = TypeVar("T")

_LOOK_AGAIN_S = 0.002
"""How often a stage with simulating groups polls for actions of other groups."""

TRAIN_SEED_BIT = 1 << 31
"""Set in every training seed and in no evaluation seed, so that the two never coincide."""


def training_seeds(seed: int, step: int, group: int, num_envs: int, *, same_start: bool = False) -> list[int]:
    """Reset seeds of one group's environments at a training step; below 2**32."""
    state = np.random.SeedSequence([seed, step, group]).generate_state(1 if same_start else num_envs)
    seeds = [int(value) | TRAIN_SEED_BIT for value in state]
    return seeds * num_envs if same_start else seeds


class Environment(Worker):
    """Simulates its share of the environment groups: replica g % num_replicas holds group g."""

    computes_at_once = True
    """With `EnvironmentSettings.episodes`, where simulators have processes of their own."""

    def __init__(self, settings: EnvironmentSettings) -> None:
        self._settings = settings
        self._groups = self._own_groups(settings.num_groups)
        spec = settings.spec
        self._threads = ThreadPoolExecutor(max(1, len(self._groups))) if spec.num_processes else None
        self._pictures = self._picture_pool()
        self._train: dict[int, BatchedEnv] = {}
        self._dealt_groups: dict[int, DealtGroup] = {}
        """Empty if a training step is segments."""
        self._make_training_groups()
        self._evaluate: dict[int, BatchedEnv] = {}
        self._running: dict[int, SegmentGroup] = {}
        """The groups whose segments have not ended."""
        self._dealt_step: DealtStep | None = None
        """The last step that was whole episodes, where no stage runs (`begin_segments`)."""
        self._writers: dict[DealtStep, Writer[GroupObservation]] = {}
        """Of the steps whose stages run, as this worker's threads share them."""
        self._sending = Lock()
        """Held while observations of whole episodes are sent."""
        self._idle_since: dict[int, tuple[int, int]] = {}
        """Group -> its rounds, and chunks with an episode, when idle time was last recorded."""
        self._last_observations: dict[int, dict[str, Tensor]] = {}
        """Training group -> its last observation, with which its next segment begins; empty if segments begin with
        resets."""

    def _picture_pool(self) -> PicturePool | None:
        """One pool for all groups; None if the policy reads no pictures."""
        shows = any(name.startswith(PICTURE) for name in self._settings.reads)
        return PicturePool(lambda text: self.note(f"{self.name}: {text}")) if shows else None

    def _own_groups(self, num_groups: int) -> list[int]:
        return [g for g in range(num_groups) if g % self.identity.num_replicas == self.identity.replica]

    def interact(self, actions: Reader[Action], observations: Writer[GroupObservation]) -> None:
        """Stage: receives actions and sends observations; the first observations come from resets. Ends when every
        group has finished its segments."""
        self._run_segments(actions, observations)

    def interact_and_report(
        self,
        actions: Reader[Action],
        observations: Writer[GroupObservation],
        episodes: Writer[GroupEpisodes],
    ) -> None:
        """Stage: like `interact`, for training segments that continue or whose episodes are kept; afterwards sends each
        group's episodes."""
        step = self._run_segments(actions, observations)
        episodes.put_many([(group, self.take_episodes_of(group, step)) for group in self._groups])

    def take_episodes_of(self, group: int, step: DealtStep | None = None) -> GroupEpisodes:
        """The current state of a group's episodes, and those kept since the last call, or of a step of whole
        episodes."""
        env, continues = self._train[group], self._settings.continues
        rows = self._replayable(group).snapshot() if continues else ()
        columns = pack_episodes(self._kept(group, env, step)) if isinstance(env, EpisodeKeeper) else {}
        episodes = {name: torch.from_numpy(column) for name, column in columns.items()}
        return GroupEpisodes(group=group, rows=rows, episodes=episodes)

    def _kept(self, group: int, env: EpisodeKeeper, step: DealtStep | None) -> list[KeptEpisode]:
        step = step or self._dealt_step
        return env.take(cuts=not self._settings.continues) if step is None else step.kept_episodes(group)

    def continue_from(self, episodes: list[GroupEpisodes]) -> None:
        """Restores the groups of this rank to these states; a group without a state begins with a reset."""
        self._last_observations.clear()
        for item in episodes:
            if item.group in self._train:
                self._last_observations[item.group] = self._copy(
                    self._read(self._replayable(item.group).restore(item.rows))
                )

    def _replayable(self, group: int) -> Replayable:
        env = self._train[group]
        assert isinstance(env, Replayable), "the job accepts only replayable environments if segments continue"
        return env

    def abandon(self) -> None:
        self._writers.clear()
        for group in self._dealt_groups.values():
            group.clear()

    def _run_segments(self, actions: Reader[Action], observations: Writer[GroupObservation]) -> DealtStep | None:
        """Returns the step if it is whole episodes."""
        if self.step.phase == "train" and self._settings.episodes is not None:
            return self._run_episodes(self._deal(self._settings.episodes), actions, observations)
        self._send(observations, self.begin_segments())
        while self._running:
            chunk = actions.next_chunk(at_most=len(self._running))
            if self._threads is None:
                self._send(observations, [observation for action in chunk for observation in self.advance(action)])
            else:
                self._overlap(self._threads, chunk, actions, lambda sent: self._send(observations, sent))

    def begin_segments(self) -> list[GroupObservation]:
        """Begins the segments of a run of the flow, or its whole episodes; returns the first observation of each
        group."""
        if self.step.phase == "train" and self._settings.episodes is not None:
            self._dealt_step = self._deal(self._settings.episodes)
            return self._observed(self._join(self._dealt_step))
        self._dealt_step = None
        self._running = {group.index: group for group in self._prepare()}
        begin = map if self._threads is None else self._threads.map
        with self._simulating():
            return list(begin(SegmentGroup.begin, self._running.values()))

    def advance(self, action: Action) -> list[GroupObservation]:
        """Executes one chunk of actions in its group. Returns the observation after it and, if this ends a segment and
        another follows, the first observation of the next segment."""
        if self._dealt_step is not None:
            observations = self._observed(self._advance_dealt(self._dealt_step, action))
            if not self._dealt_step.running:
                self._record_dealt(self._dealt_step)
            return observations
        group = self._running[action.group]
        observations = [group.act(action)]
        if group.ends_segment and group.segments:
            observations.append(group.begin())
        elif group.ends_segment:
            del self._running[action.group]
            if self._settings.continues and not group.is_evaluated:
                self._last_observations[group.index] = self._copy(observations[0].fields)
        return observations

    def _overlap(
        self,
        threads: ThreadPoolExecutor,
        chunk: list[Action],
        actions: Reader[Action],
        send: Callable[[list[GroupObservation]], None],
    ) -> None:
        """Lets the group of this chunk simulate in parallel with those whose actions arrive meanwhile."""
        self._simulate(threads, chunk, actions, advance=self.advance, send=send, num_running=lambda: len(self._running))

    def _simulate(
        self,
        threads: ThreadPoolExecutor,
        chunk: list[Action],
        actions: Reader[Action],
        *,
        advance: Callable[[Action], list[T]],
        send: Callable[[list[T]], None],
        num_running: Callable[[], int],
    ) -> None:
        """Lets the groups of this chunk simulate in parallel with those whose actions arrive meanwhile."""
        moving: dict[Future[list[T]], int] = {}
        try:
            while chunk or moving:
                for action in chunk:
                    moving[threads.submit(advance, action)] = now_ns()
                with self._simulating():
                    done, chunk = self._next_event(moving, actions, num_running)
                if done:
                    results = [observation for future in done for observation in future.result()]
                    with actions.hands_on([moving.pop(future) for future in done]):
                        send(results)
                    chunk = actions.ready_chunk() if moving and len(moving) < num_running() else []
        finally:
            wait(moving)  # if the run is abandoned, the next one must not find groups still simulating

    def _next_event(
        self, moving: Mapping[Future[list[T]], int], actions: Reader[Action], num_running: Callable[[], int]
    ) -> tuple[set[Future[list[T]]], list[Action]]:
        """Waits for groups that have finished simulating or for the next chunk of actions, whichever comes first."""
        while not (done := wait(moving, _LOOK_AGAIN_S, return_when=FIRST_COMPLETED).done):
            if len(moving) < num_running() and (chunk := actions.ready_chunk()):
                return set(), chunk
        return done, []

    def _simulating(self) -> AbstractContextManager[object]:
        """Context for a wait for simulator processes, if there are any."""
        return self._host.waits.waiting("simulator", processes=awaited_processes)

    def _teller(self, group: int) -> Callable[[str], None]:
        return lambda text: self.note(f"{self.name}, group {group}: {text}")

    @staticmethod
    def _send(writer: Writer[GroupObservation], observations: list[GroupObservation]) -> None:
        writer.put_many([(observation.group, observation) for observation in observations])

    def _prepare(self) -> Sequence[SegmentGroup]:
        return [
            self._prepare_train(g) if self.step.phase == "train" else self._prepare_evaluation(g) for g in self._groups
        ]

    def _prepare_train(self, group: int) -> SegmentGroup:
        settings, context = self._settings, self.step
        num_envs, same_start = settings.spec.num_envs, settings.same_start
        return SegmentGroup(
            index=group,
            env=self._train[group],
            read=self._read,
            report=self._record_training_episode,
            segments=[training_seeds(context.seed, context.step, group, num_envs, same_start=same_start)],
            num_chunks=settings.num_steps // settings.chunk_size,
            chunk_size=settings.chunk_size,
            filler_seed=settings.eval_seed,
            fields=self._last_observations.pop(group, None),
            queries=settings.expert and settings.expert.of_group(context.seed, context.step, group),
        )

    # -- whole episodes --------------------------------------------------------------------------------------------

    def _run_episodes(
        self, step: DealtStep, actions: Reader[Action], observations: Writer[GroupObservation]
    ) -> DealtStep:
        """Simulates a step of whole episodes. If it is ahead, the threads of two steps do so, and the one that gets the
        last actions that a group waits for lets it simulate; the last step of a group may end in either."""
        self._writers[step] = observations
        self._send_dealt(self._join(step), observations)
        while step.running:
            chunk = actions.next_chunk(at_most=1 if self.is_ahead else len(step.running))
            if self._threads is None:
                for action in chunk:
                    self._send_dealt(self._advance_dealt(step, action), observations)
            elif chunk:
                self._simulate(
                    self._threads,
                    chunk,
                    actions,
                    advance=lambda action: self._advance_dealt(step, action),
                    send=lambda sent: self._send_dealt(sent, observations),
                    num_running=lambda: len(step.running),
                )
        del self._writers[step]
        self._record_dealt(step)
        return step

    def _join(self, step: DealtStep) -> Sent:
        begin = map if self._threads is None else self._threads.map
        with self._simulating():
            return [one for sent in begin(lambda group: group.join(step), self._dealt_groups.values()) for one in sent]

    def _advance_dealt(self, step: DealtStep, action: Action) -> Sent:
        """Executes the actions of a group, unless it waits for those of another step."""
        group = self._dealt_groups[action.group]
        return group.act(step, native_actions(action.actions, group.env.action_spec))

    def _send_dealt(self, sent: Sent, own: Writer[GroupObservation]) -> None:
        with self._sending:
            for step, observation in sent:
                own.instead(self._writers[step]).put(observation, key=observation.group)
                step.was_sent(observation)

    @staticmethod
    def _observed(sent: Sent) -> list[GroupObservation]:
        for step, observation in sent:
            step.was_sent(observation)
        return [observation for _, observation in sent]

    def _deal(self, batch: EpisodeBatch) -> DealtStep:
        """The episodes of the starts of this rank's lanes."""
        context = self.step  # threads of groups have none
        lanes = [lane for lane in range(batch.num_lanes) if lane % self.identity.num_replicas == self.identity.replica]
        if not lanes:
            self.note(f"{self.name} has no episodes to simulate: there are {batch.num_lanes} lanes of starts")
        return DealtStep(
            batch,
            lanes=lanes,
            seed_of=lambda start: training_seeds(context.seed, context.step, start, 1)[0],
            groups=self._groups,
        )

    def _dealt_group(self, group: int) -> DealtGroup:
        env = self._train[group]
        assert begins_rows(env), "the job accepts only such environments for whole episodes"
        return DealtGroup(
            index=group,
            env=env,
            read=self._read,
            chunk_size=self._settings.chunk_size,
            sends_finals=not self._settings.same_start,
        )

    def _record_dealt(self, step: DealtStep) -> None:
        """Records the episodes of a step that has ended, and how long simulators had none since the one before."""
        for end, cut in step.ends:
            self._record_training_episode(end, cut)
        passed = []
        for index, group in self._dealt_groups.items():
            rounds, simulated = self._idle_since.get(index, (0, 0))
            passed.append((group.num_rounds - rounds, group.num_simulated - simulated, group.env.num_envs))
            self._idle_since[index] = group.num_rounds, group.num_simulated
        if most := max((rounds for rounds, _, _ in passed), default=0):
            for _, simulated, num_envs in passed:
                self.record("env/idle_fraction", 1 - simulated / (most * num_envs))
        dealer = step.dealer
        if dealer.batch.dynamic_sampling:
            for start in sorted(dealer.seen):
                self.record("env/trained_groups_fraction", float(start in dealer.chosen))

    def _prepare_evaluation(self, group: int) -> SegmentGroup:
        """Whole episodes, dealt to the groups in turn and padded to whole segments."""
        settings = self._settings
        if group not in self._evaluate:
            self._evaluate[group] = self._make_evaluated(group)
        episodes = range(group, settings.num_eval_episodes, settings.num_groups)
        width = settings.spec.num_envs
        seeds = [settings.eval_seed + episode for episode in episodes]
        env = self._evaluate[group]
        if isinstance(env, EpisodeRecorder):
            env.want(seed for seed in seeds if seed < settings.eval_seed + settings.num_recorded)
        # Every group gets the same number of segments, the last ones possibly without episodes that count. So all
        # groups end together, and a policy that batches several groups never waits for one that has ended.
        num_segments = -(-settings.num_eval_episodes // (settings.num_groups * width))
        segments = [seeds[i * width : (i + 1) * width] for i in range(num_segments)]
        if not settings.spec.max_episode_steps:
            raise ValueError("max_episode_steps is needed for evaluation, so that every episode ends")
        return SegmentGroup(
            index=group,
            env=env,
            read=self._read,
            report=self._record_episode,
            segments=segments,
            num_chunks=-(-settings.spec.max_episode_steps // settings.chunk_size),
            chunk_size=settings.chunk_size,
            filler_seed=settings.eval_seed,
            is_evaluated=True,
        )

    def _make_training_groups(self) -> None:
        self._train = {group: self._make_trained(group) for group in self._groups}
        if self._settings.episodes is not None:
            self._dealt_groups = {group: self._dealt_group(group) for group in self._groups}

    def _make_trained(self, group: int) -> BatchedEnv:
        env = make_env(self._settings.spec, on_replaced=self._teller(group), pictures=self._pictures)
        return EpisodeKeeper(env) if self._settings.keeps_episodes else env

    def _make_evaluated(self, group: int) -> BatchedEnv:
        ignores = self._settings.eval_ignores_terminations
        spec = replace(self._settings.spec, ignore_terminations=ignores, success_classifier=None)
        if not self._settings.num_recorded:
            return make_env(spec, on_replaced=self._teller(group), pictures=self._pictures)
        cameras = [name for name in self._settings.reads if name.startswith(PICTURE)]
        return recorded_env(spec, cameras, on_replaced=self._teller(group), pictures=self._pictures)

    def save_recordings(self, folder: str) -> list[str]:
        """Writes the recorded episodes of the last evaluation (`RecordedEpisode.save`). Returns the reasons why some
        have no pictures."""
        recorders = [env for env in self._evaluate.values() if isinstance(env, EpisodeRecorder)]
        for recorder in recorders:
            for episode in recorder.take():
                episode.save(Path(folder))
        return list(dict.fromkeys(recorder.problem for recorder in recorders if recorder.problem))

    @staticmethod
    def _copy(fields: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copies the fields, because the memory they were sent in is reused."""
        return {name: value.clone() for name, value in fields.items()}

    def _read(self, observation: Observation) -> dict[str, Tensor]:
        """The fields that the policy reads."""
        values = {name: observation[name] for name in self._settings.reads}
        return {name: v if isinstance(v, Tensor) else text_tensor(v) for name, v in values.items()}

    def _record_episode(self, episode: EpisodeEnd, cut: bool) -> None:
        self.record("env/truncated_fraction", float(cut))
        self.record("env/return", episode.return_)
        self.record_spread("env/return_std", episode.return_)
        self.record("env/episode_length", episode.length)
        if episode.success_once is not None:
            self.record("env/success_once", float(episode.success_once))
        if episode.success_at_end is not None:
            self.record("env/success_at_end", float(episode.success_at_end))
            if episode.task is not None:
                self.record(f"env/success_at_end/{episode.task}", float(episode.success_at_end))

    def _record_training_episode(self, episode: EpisodeEnd, cut: bool) -> None:
        self._record_episode(episode, cut)
        if self._settings.spec.success_classifier is None:
            return
        accepted = episode.return_ > 0
        self.record("env/classifier_success", float(accepted))
        if episode.success_once is not None:
            self.record("env/classifier_false_positive", float(accepted and not episode.success_once))
            self.record("env/classifier_false_negative", float(episode.success_once and not accepted))

    def demonstrate(self, seed: int) -> list[Demonstration]:
        """Runs an episode of the scripted expert; only the first rank does. Raises: EnvError if there is no expert."""
        return [] if self.rank else [record_expert(self._settings.spec, seed)]

    def execute(self, seeds: list[int], actions: list[Tensor], cameras: tuple[str, ...]) -> list[ExecutedEpisode]:
        """Executes actions [T, *action shape] from each reset seed, in an environment of its own."""
        spec = replace(self._settings.spec, num_envs=1, num_processes=0, ignore_terminations=False)
        env = make_env(spec)
        try:
            return [execute_episode(env, seed, each, cameras) for seed, each in zip(seeds, actions, strict=True)]
        finally:
            env.close()

    def reward_by(self, classifier: SuccessClassifier) -> None:
        """From now on, this classifier gives the reward of training episodes; none may be under way. Raises: EnvError
        if the classifier is not the one with this digest."""
        if self._settings.spec.success_classifier == classifier:
            return
        self._settings = replace(self._settings, spec=replace(self._settings.spec, success_classifier=classifier))
        for env in self._train.values():
            env.close()
        self._make_training_groups()

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown()
        for env in [*self._train.values(), *self._evaluate.values()]:
            env.close()
