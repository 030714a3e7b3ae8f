"""Env: steps groups of environments with the actions that it is sent.

The environments are cut into groups, and a group is what travels: while one group waits for its action, the process
simulates another. Two groups in each process are enough to keep both the simulator and the policy busy (pipelining in
halves).

Where groups have processes of their own (`EnvSpec.num_processes`) they simulate at the same time, and each is handed on
as soon as its own rows are done: a slow reset holds up its group and no other. A process that dies or hangs is replaced
by `rlinf_envs`; the run's manifest gets a line.

A training segment begins with resets, or continues the episodes of the segment before (docs/decisions/038).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rlinf_comm import record
from rlinf_envs import (
    PICTURE,
    ActionSpec,
    BatchedEnv,
    Demonstration,
    Disturbance,
    EnvSpec,
    EpisodeEnd,
    EpisodeRecorder,
    Observation,
    Replayable,
    StepResult,
    awaited_processes,
    make_env,
    record_expert,
    recorded_env,
)
from rlinf_workers.execution.ports import Reader, Writer
from rlinf_workers.roles.embodied.picture_pool import PicturePool
from rlinf_workers.roles.records.embodied import Action, GroupEpisodes, GroupObservation, text_tensor
from rlinf_workers.spans import now_ns
from rlinf_workers.worker import Worker

record(EnvSpec)
record(Disturbance)
record(Demonstration)


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentSettings:
    """Which environments, and how long a segment is."""

    spec: EnvSpec
    """One group's environments; `num_envs` is their number."""
    num_groups: int
    num_steps: int
    """Steps of a training segment; a multiple of chunk_size."""
    continues: bool = False
    """A training segment begins where the last one of its group ended; False: with a reset. The environments have to be
    `rlinf_envs.Replayable`."""
    reads: tuple[str, ...]
    """The fields that are handed on."""
    chunk_size: int = 1
    """Actions that come at once (K)."""
    num_eval_episodes: int
    same_start: bool = False
    """All environments of a group begin a training segment in the same state, so that the sums of rewards of their
    first episodes can be compared."""
    eval_seed: int
    """Evaluation resets with eval_seed, eval_seed + 1, ...; below 2**31."""
    eval_ignores_terminations: bool = False
    """An episode of an evaluation goes on until it is cut off; False: it ends as the environment says."""
    num_recorded: int = 0
    """Episodes of an evaluation, from the first on, that are kept whole until `save_recordings`."""


_LOOK_AGAIN_S = 0.002
"""How often a stage whose groups are simulating looks for the actions of others."""

TRAIN_SEED_BIT = 1 << 31
"""Set in every reset seed of training and in none of evaluation, so that the two never meet."""


def training_seeds(seed: int, step: int, group: int, num_envs: int, *, same_start: bool = False) -> list[int]:
    """Reset seeds of one group's environments at a training step; below 2**32."""
    state = np.random.SeedSequence([seed, step, group]).generate_state(1 if same_start else num_envs)
    seeds = [int(value) | TRAIN_SEED_BIT for value in state]
    return seeds * num_envs if same_start else seeds


@dataclass
class _Group:
    """One group on its way through its segments."""

    index: int
    env: BatchedEnv
    segments: list[list[int]]
    """Reset seeds of the segments to come."""
    num_chunks: int
    """Chunks of a segment."""
    time: int = 0
    """Chunks of the present segment that were executed."""
    counted: int = 0
    """Rows of the present segment that count (an evaluation's last segment may be wider than what is left to do)."""
    is_evaluated: bool = False
    """Only the first episode of a row counts, which is the one that its seed stands for."""


class Environment(Worker):
    """Simulates its share of the environment groups: group g lives on replica g % num_replicas."""

    def __init__(self, settings: EnvironmentSettings) -> None:
        self._settings = settings
        self._groups = self._own_groups(settings.num_groups)
        spec = settings.spec
        self._threads = ThreadPoolExecutor(max(1, len(self._groups))) if spec.num_processes else None
        self._pictures = self._picture_pool()
        self._train = {
            group: make_env(spec, on_replaced=self._teller(group), pictures=self._pictures) for group in self._groups
        }
        self._evaluate: dict[int, BatchedEnv] = {}
        self._running: dict[int, _Group] = {}
        """The groups whose segments have not ended."""
        self._last_observations: dict[int, dict[str, Tensor]] = {}
        """Training group -> what it showed last, for its next segment to begin with; empty where that is a reset."""

    def _picture_pool(self) -> PicturePool | None:
        """One for all groups, where pictures are handed on."""
        shows = any(name.startswith(PICTURE) for name in self._settings.reads)
        return PicturePool(lambda text: self.note(f"{self.name}: {text}")) if shows else None

    def _own_groups(self, num_groups: int) -> list[int]:
        return [g for g in range(num_groups) if g % self.identity.num_replicas == self.identity.replica]

    def interact(self, actions: Reader[Action], observations: Writer[GroupObservation]) -> None:
        """Stage: actions in, observations out; the first observations come from resets. Ends when every group has
        done its segments."""
        self._run_segments(actions, observations)

    def go_on(
        self,
        actions: Reader[Action],
        observations: Writer[GroupObservation],
        episodes: Writer[GroupEpisodes],
    ) -> None:
        """Stage: as `interact`, where training segments continue; says afterwards where each group stands."""
        self._run_segments(actions, observations)
        episodes.put_many([(item.group, item) for item in self.running_episodes()])

    def running_episodes(self) -> list[GroupEpisodes]:
        """Where the episodes of each group stand."""
        return [GroupEpisodes(group=group, rows=self._replayable(group).snapshot()) for group in self._groups]

    def continue_from(self, episodes: list[GroupEpisodes]) -> None:
        """Brings the groups of this rank where they stood; a group that is not among them begins with a reset."""
        self._last_observations.clear()
        for item in episodes:
            if item.group in self._train:
                self._last_observations[item.group] = self._copy(
                    self._read(self._replayable(item.group).restore(item.rows))
                )

    def _replayable(self, group: int) -> Replayable:
        env = self._train[group]
        assert isinstance(env, Replayable), "the job refuses others where segments continue"
        return env

    def _run_segments(self, actions: Reader[Action], observations: Writer[GroupObservation]) -> None:
        self._send(observations, self.begin_segments())
        while self._running:
            chunk = actions.next_chunk(at_most=len(self._running))
            if self._threads is None:
                self._send(observations, [observation for action in chunk for observation in self.advance(action)])
            else:
                self._overlap(self._threads, chunk, actions, observations)

    def begin_segments(self) -> list[GroupObservation]:
        """Begins the segments of a run of the flow: the first observation of each group."""
        self._running = {group.index: group for group in self._prepare()}
        begin = map if self._threads is None else self._threads.map
        with self._simulating():
            return list(begin(self._begin_segment, self._running.values()))

    def advance(self, action: Action) -> list[GroupObservation]:
        """Executes one chunk of actions in its group. Returns the observation after it and, where this ends a segment
        and another follows, the first observation of that one."""
        group = self._running[action.group]
        observations = [self._step(group, action)]
        if group.time == group.num_chunks and group.segments:
            observations.append(self._begin_segment(group))
        elif group.time == group.num_chunks:
            del self._running[action.group]
        return observations

    def _overlap(
        self,
        threads: ThreadPoolExecutor,
        chunk: list[Action],
        actions: Reader[Action],
        observations: Writer[GroupObservation],
    ) -> None:
        """Has the groups of a chunk simulate at the same time, and those whose actions arrive meanwhile."""
        moving: dict[Future[list[GroupObservation]], int] = {}
        try:
            while chunk or moving:
                for action in chunk:
                    moving[threads.submit(self.advance, action)] = now_ns()
                with self._simulating():
                    done, chunk = self._next_event(moving, actions)
                if done:
                    results = [observation for future in done for observation in future.result()]
                    with actions.hands_on([moving.pop(future) for future in done]):
                        self._send(observations, results)
                    chunk = actions.ready_chunk() if moving and len(moving) < len(self._running) else []
        finally:
            wait(moving)  # where the run is given up, the next one must not find them moving

    def _next_event(
        self, moving: Mapping[Future[list[GroupObservation]], int], actions: Reader[Action]
    ) -> tuple[set[Future[list[GroupObservation]]], list[Action]]:
        """Groups that have simulated, or a chunk of actions of others, whichever comes first."""
        while not (done := wait(moving, _LOOK_AGAIN_S, return_when=FIRST_COMPLETED).done):
            if len(moving) < len(self._running) and (chunk := actions.ready_chunk()):
                return set(), chunk
        return done, []

    def _simulating(self) -> AbstractContextManager[object]:
        """Around what waits for the simulators' processes, where there are any."""
        return self._host.waits.waiting("simulator", processes=awaited_processes)

    def _teller(self, group: int) -> Callable[[str], None]:
        return lambda text: self.note(f"{self.name}, group {group}: {text}")

    @staticmethod
    def _send(writer: Writer[GroupObservation], observations: list[GroupObservation]) -> None:
        writer.put_many([(observation.group, observation) for observation in observations])

    def _prepare(self) -> list[_Group]:
        settings, context = self._settings, self.step
        if context.phase == "train":
            return [
                _Group(
                    index=group,
                    env=self._train[group],
                    segments=[
                        training_seeds(
                            context.seed,
                            context.step,
                            group,
                            settings.spec.num_envs,
                            same_start=settings.same_start,
                        )
                    ],
                    num_chunks=settings.num_steps // settings.chunk_size,
                )
                for group in self._groups
            ]
        return [self._prepare_evaluation(group) for group in self._groups]

    def _prepare_evaluation(self, group: int) -> _Group:
        """Whole episodes; they are dealt to the groups in turn, padded to whole segments."""
        settings = self._settings
        if group not in self._evaluate:
            self._evaluate[group] = self._make_evaluated(group)
        episodes = range(group, settings.num_eval_episodes, settings.num_groups)
        width = settings.spec.num_envs
        seeds = [settings.eval_seed + episode for episode in episodes]
        env = self._evaluate[group]
        if isinstance(env, EpisodeRecorder):
            env.want(seed for seed in seeds if seed < settings.eval_seed + settings.num_recorded)
        # As many segments for every group, the last ones maybe without episodes that count: groups end together, so
        # that a policy that takes several of them at a time never waits for one that has ended.
        num_segments = -(-settings.num_eval_episodes // (settings.num_groups * width))
        segments = [seeds[i * width : (i + 1) * width] for i in range(num_segments)]
        if not settings.spec.max_episode_steps:
            raise ValueError("max_episode_steps is needed for evaluation: an episode has to end")
        return _Group(
            index=group,
            env=env,
            segments=segments,
            num_chunks=-(-settings.spec.max_episode_steps // settings.chunk_size),
            is_evaluated=True,
        )

    def _make_evaluated(self, group: int) -> BatchedEnv:
        spec = replace(self._settings.spec, ignore_terminations=self._settings.eval_ignores_terminations)
        if not self._settings.num_recorded:
            return make_env(spec, on_replaced=self._teller(group), pictures=self._pictures)
        cameras = [name for name in self._settings.reads if name.startswith(PICTURE)]
        return recorded_env(spec, cameras, on_replaced=self._teller(group), pictures=self._pictures)

    def save_recordings(self, folder: str) -> list[str]:
        """Writes the episodes of the last evaluation that were kept (`RecordedEpisode.save`). Returns: why there are
        no pictures of some."""
        recorders = [env for env in self._evaluate.values() if isinstance(env, EpisodeRecorder)]
        for recorder in recorders:
            for episode in recorder.take():
                episode.save(Path(folder))
        return list(dict.fromkeys(recorder.problem for recorder in recorders if recorder.problem))

    def _begin_segment(self, group: _Group) -> GroupObservation:
        seeds = group.segments.pop(0)
        group.counted, group.time = len(seeds), 0
        width = group.env.num_envs
        fields = None if group.is_evaluated else self._last_observations.pop(group.index, None)
        if fields is None:
            fillers = [self._settings.eval_seed] * (width - len(seeds))
            fields = self._read(group.env.reset(seeds + fillers))
        zeros = torch.zeros(width, dtype=torch.int64)
        return GroupObservation(
            group=group.index,
            time=0,
            fields=fields,
            final_fields=None,
            rewards=torch.zeros(width, self._settings.chunk_size),
            num_executed=zeros,
            terminated=zeros.bool(),
            truncated=zeros.bool(),
            is_last=False,
        )

    def _step(self, group: _Group, action: Action) -> GroupObservation:
        result: StepResult = group.env.step_chunk(_native(action.actions, group.env.action_spec))
        group.time += 1
        for episode in result.episodes:
            if episode.env_index < group.counted and not (group.is_evaluated and episode.episode_index):
                self._record_episode(episode, cut=bool(result.truncated[episode.env_index]))
        fields, is_last = self._read(result.observation), group.time == group.num_chunks
        if is_last and self._settings.continues and not group.is_evaluated:
            self._last_observations[group.index] = self._copy(fields)
        return GroupObservation(
            group=group.index,
            time=group.time,
            fields=fields,
            final_fields=self._read(result.final_observation) if result.episodes else None,
            rewards=result.rewards,
            num_executed=result.num_steps,
            terminated=result.terminated,
            truncated=result.truncated,
            is_last=is_last,
        )

    @staticmethod
    def _copy(fields: dict[str, Tensor]) -> dict[str, Tensor]:
        """Of one's own: what was sent lies in memory that is used again."""
        return {name: value.clone() for name, value in fields.items()}

    def _read(self, observation: Observation) -> dict[str, Tensor]:
        """What the policy reads of an observation."""
        values = {name: observation[name] for name in self._settings.reads}
        return {name: v if isinstance(v, Tensor) else text_tensor(v) for name, v in values.items()}

    def _record_episode(self, episode: EpisodeEnd, *, cut: bool) -> None:
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

    def demonstrate(self, seed: int) -> list[Demonstration]:
        """An episode of the scripted expert, by the first rank alone. Raises: EnvError where there is none."""
        return [] if self.rank else [record_expert(self._settings.spec, seed)]

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown()
        for env in [*self._train.values(), *self._evaluate.values()]:
            env.close()


def _native(actions: Tensor, spec: ActionSpec) -> Tensor:
    """[n, K, A] as the policy counts -> [n, K, *spec.shape] as the environment does: discrete actions begin at
    `low`."""
    shaped = actions.reshape(*actions.shape[:2], *spec.shape)
    return shaped if spec.kind == "continuous" else shaped + spec.low
