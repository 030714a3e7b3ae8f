"""AgentRollout: episodes of many turns in place of completions.

An agent process beside the rank runs the episodes of a step (agents/host.py) and asks for their turns; the engine
samples turns of all episodes together. With `EpisodeSettings.routed` a router (agents/router.py) runs the episodes of
several ranks, and the engine also samples turns of episodes that other ranks have begun. A group is the episodes of a
prompt. A partner, an agent with weights of its own that never change, has an engine of its own beside the policy's, and
so has each further policy that is trained.

Episodes of late groups (`max_lateness`) go on in the agent process when a step ends, and turns that have not ended are
suspended. Where an episode is not there any more, after a restart, its agent begins again, and is answered with the
turns that were sampled before as long as it asks for the same ones.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch

from rlinf_workers.agents.link import (
    AgentTask,
    Answer,
    Ask,
    Begin,
    EpisodeReport,
    FromEpisode,
    NewPicture,
    PictureRequest,
)
from rlinf_workers.agents.noise import noise_of_episode
from rlinf_workers.agents.picture_reader import picture_message, processed_file, processor_of
from rlinf_workers.agents.pictures import FIRST_REFERENCE, HistoryPicture, RecentPictures, reference_of
from rlinf_workers.agents.process import AgentLink, AgentProcess, RouterLink
from rlinf_workers.agents.records import turns
from rlinf_workers.agents.replay import (
    RecordedAgents,
    SaidAgain,
    ask_decision,
    picture_decision,
    report_decision,
)
from rlinf_workers.agents.settings import LOOP, EpisodeSettings, NamedAgent
from rlinf_workers.agents.turn_log import EpisodeKey, LoggedTurn
from rlinf_workers.engines.sampling import SamplingSettings
from rlinf_workers.errors import SettingsRefused, WorkersError
from rlinf_workers.execution.ports import Reader, Writer
from rlinf_workers.models.language_model import load_tokenizer, stop_token_ids
from rlinf_workers.roles.language.episodes import group_of
from rlinf_workers.roles.language.history_pictures import picture_of
from rlinf_workers.roles.language.late_groups import LateGroup
from rlinf_workers.roles.language.open_episodes import OpenEpisode, OpenEpisodes, PendingTurn, WholeGroup
from rlinf_workers.roles.language.rollout import Rollout, RolloutSettings
from rlinf_workers.roles.language.turn_queue import EndedTurn, TurnQueue
from rlinf_workers.roles.picture_pool import PicturePool
from rlinf_workers.roles.records.language import Prompt, SampleGroup
from rlinf_workers.roles.records.pictures import ProcessedPicture
from rlinf_workers.serving import ServedPolicy
from rlinf_workers.weight_sync.base import WeightTarget

ROUTER = "router"
"""Name of the worker group of routers in a flow (`SessionRouter`)."""
NO_PROMPT = torch.zeros(1, dtype=torch.int64)
"""Prompt of a policy none of whose agents had a turn: a token that every vocabulary has."""
PICTURES_BYTES = 64 << 30
"""Size of the address range for pictures that tools and requests add; memory is used only as far as those of the
groups under way reach."""
MAX_SHOWN = 3
"""Failures of a step that an error shows."""


class AgentRollout(Rollout):
    """Runs a group of episodes for each prompt."""

    def __init__(self, settings: RolloutSettings) -> None:
        super().__init__(settings)
        if settings.agent is None:
            raise SettingsRefused("AgentRollout needs the settings of its episodes (RolloutSettings.agent)")
        agents = settings.agent.agents
        _check_policies(settings.agent)
        self._policy = TurnQueue(self._engine, settings.engine)
        self._partners: dict[str, TurnQueue] = {}
        """Folder of a model that never changes -> the turns of its engine."""
        self._further: dict[str, TurnQueue] = {}
        """Worker group that trains a further policy -> the turns of its engine."""
        self._queue_of = {name: self._made_queue(agent) for name, agent in agents.items()}
        self._beside = [*self._partners.values(), *self._further.values()]
        """The turns of the engines beside the policy's."""
        self._queues = [self._policy, *self._beside]
        self._served_policies = {
            trainer: ServedPolicy(queue.engine, self.num_ranks) for trainer, queue in self._further.items()
        }
        self._unheard = set(agents)
        """Agents by name without a turn so far; empty after the first stage."""
        self._episode_settings = settings.agent
        self._router: RouterLink | None = None
        """None: this rank runs its own episodes."""
        self._agents: AgentLink
        if settings.agent.routed:
            address = partial(self.ask_driver, ROUTER)
            self._agents = self._router = RouterLink(self.name, address, self._interrupt)
        else:
            self._agents = AgentProcess(settings_of_agents(settings), self._interrupt)
        self._episodes: dict[int, OpenEpisode] = {}
        """Of this stage that are in the agent process, by number."""
        self._late_in_process: dict[EpisodeKey, tuple[int, dict[int, int]]] = {}
        """Episodes that outlived their stage -> their number, and the requests of the turns that they wait for."""
        self._held: list[FromEpisode] = []
        """What they said in an evaluation."""
        self._pictures: dict[int, dict[int, ProcessedPicture]] = {}
        """Number of an episode in the agent process -> pictures that its task does not have, by reference."""
        self._recent_pictures = RecentPictures[ProcessedPicture]()
        self._passed_pictures: dict[int, ProcessedPicture] = {}
        """By reference, those that the router has sent for the next turn that it asks for."""
        self._num_episodes = 0
        self._recorded_agents: RecordedAgents | None = None
        """In a replay, in place of the agent process."""
        self._first_step = 0
        """Decode steps of the engine before the stage."""
        self._causes: Counter[str] = Counter()
        self._failures: list[str] = []
        self._samples_for_others = False
        """Whether this rank's own episodes in the stage are over, while a router may have turns of others."""
        self._num_sampled = 0
        """Turns for a router in this stage."""
        self._unsent: list[tuple[int, SampleGroup]] = []
        """Whole groups that found no room in their channel yet."""

    def _made_queue(self, agent: NamedAgent) -> TurnQueue:
        """The turns of the engine that speaks for an agent, which is made for the first of its agents."""
        if agent.folder is None and not agent.trainer:
            return self._policy
        queues, key = (self._further, agent.trainer) if agent.trainer else (self._partners, agent.folder or "")
        if key not in queues:
            adapter = self._settings.further_adapters.get(key) if agent.trainer else None
            model = replace(self._settings.model, adapter=adapter)
            if agent.folder is not None:
                model = replace(model, folder=agent.folder, has_weights=True)
            queues[key] = TurnQueue(self._make_engine(model), self._settings.engine)
        return queues[key]

    def weight_target(self, source: str) -> WeightTarget:
        return self._served_policies.get(source, self)

    def sample(
        self, prompts: Sequence[Prompt], further_prompts: Callable[[int], Sequence[Prompt]] | None = None
    ) -> Iterator[list[SampleGroup]]:
        """Runs a group of episodes for each prompt, and yields groups as their last episodes end.

        Raises: WorkersError if too many episodes ended by what the policy cannot have caused.
        """
        sampling = self._settings.train if self.step.phase == "train" else self._settings.evaluate
        step, of_turn = self.step.step, replace(sampling, group_size=1)
        groups = self._open([_new(prompt, step) for prompt in prompts], sampling.group_size)
        self._begin_episodes(groups)
        while groups:
            whole = self._hear(groups)
            while further_prompts and (room := groups.room(self._episode_settings.max_episodes)):
                if not (further := further_prompts(room)):
                    break
                groups.open_all([_new(prompt, step) for prompt in further])
            self._begin_episodes(groups)
            self._submit_turns(of_turn)
            for group in whole:
                self._left(groups, group.index)
                self._record(group, (step, group.index))
            if whole:
                yield whole
            self._generate(groups)
        if self._router is None:
            self._suspend()
        self._check_discarded()

    def generate(self, prompts: Reader[Prompt], samples: Writer[SampleGroup]) -> None:
        super().generate(prompts, samples)
        if self._router is not None:
            self._sample_for_others(self._router, samples)
            samples.put_many(self._unsent)
            self._unsent = []

    def _send(self, samples: Writer[SampleGroup], groups: list[tuple[int, SampleGroup]]) -> None:
        """Keeps groups for which there is no room. A rank that waited for it would leave its devices, and others wait
        for turns that it samples, without which no reader gets the devices."""
        if self._router is None:
            return super()._send(samples, groups)
        self._unsent = samples.offer_many([*self._unsent, *groups])

    def _sample_for_others(self, router: RouterLink, samples: Writer[SampleGroup]) -> None:
        """Samples turns of episodes that other ranks have begun, until those of all ranks are over."""
        sampling = self._settings.train if self.step.phase == "train" else self._settings.evaluate
        of_turn = replace(sampling, group_size=1)
        nothing = self._open((), sampling.group_size)
        router.no_more()
        self._samples_for_others, idle_s = True, 0.0
        while not router.is_over:
            began_s = time.monotonic()
            self._hear(nothing)
            idle_s += time.monotonic() - began_s
            if self._unsent:
                self._send(samples, [])
            self._submit_turns(of_turn)
            self._generate(nothing)
        self._samples_for_others = False
        self._groups = OpenEpisodes(1, keeps_histories=False)
        if self.num_ranks > 1:
            self.record("router/engine_turns", self._num_sampled)
            self.record_spread("router/engine_turns_spread", self._num_sampled)
            self.record("router/drained_s", idle_s)
        self._num_sampled = 0

    def _sample_as_finished(self, prompts: Sequence[Prompt]) -> Iterator[list[tuple[int, SampleGroup]]]:
        sampling, first = self._settings.train, self.step.num_items
        of_turn = replace(sampling, group_size=1)
        late, submitted, departures = self._departures(prompts)
        groups = self._open([*late, *(_new(prompt, self.step.step) for prompt in prompts)], sampling.group_size)
        held: dict[int, SampleGroup] = {}
        whole = self._samples(groups.whole())
        self._begin_episodes(groups)
        while True:
            for group in whole:  # one by one: a replay hears of several at once
                held[group.index] = group
                leaving = departures.add([group.index])
                for index, _ in leaving:
                    self._left(groups, index)
                if leaving:
                    yield [
                        (key, self._leaves(held.pop(index), key, submitted[index], is_late=index >= first))
                        for index, key in leaving
                    ]
            if departures.all_left:
                break
            self._submit_turns(of_turn)
            self._generate(groups)
            whole = self._hear(groups)
            self._begin_episodes(groups)
        self._suspend()
        self._late = groups.left_over(submitted)
        self._late_in_process = {
            episode.key: (number, {one.turn.noise: one.request for one in episode.pending.values() if one.request})
            for number, episode in self._episodes.items()
            if episode.report is None
        }
        self._episodes.clear()
        self._groups = OpenEpisodes(1, keeps_histories=False)
        self._check_discarded()

    # -- a stage ---------------------------------------------------------------------------------------------------

    def _open(self, groups: Iterable[LateGroup], group_size: int) -> OpenEpisodes:
        """The groups of a stage; turns of late ones that are not finished go on first."""
        recorded, is_late = self.recorded, self._settings.max_lateness > 0 and self.step.phase == "train"
        self._recorded_agents = None
        if recorded is not None:
            decisions = (one for _, one in recorded)
            self._recorded_agents = RecordedAgents(decisions, is_timed=self._takes.is_open or is_late)
        self._first_step = self._pausing.num_steps
        if self._router is not None:
            versions = self.policy_version, *(one.version for one in self._served_policies.values())
            stage = f"{self.step.phase} {self.step.step}, weights {', '.join(map(str, versions))}"
            if self._router.join(stage, self.num_ranks):
                self._recent_pictures.clear()  # as the router does
        opened = OpenEpisodes(group_size, keeps_histories=self.records or is_late)
        self._groups = opened
        self._episodes.clear()
        opened.open_all(groups)
        return opened

    def _begin_episodes(self, groups: OpenEpisodes) -> None:
        """Begins the episodes of as many groups as may run at once, or goes on with them."""
        begins: list[Begin] = []
        for prompt, episode in groups.begin(self._episode_settings.max_episodes):
            number, requests = 0, {}
            if self._recorded_agents is None and self.step.phase == "train":
                number, requests = self._late_in_process.pop(episode.key, (0, {}))
            for turn in episode.log.turns:
                if not turn.has_ended:
                    history = episode.log.history(turn.noise)
                    self._queue(episode, turn, history, requests.get(turn.noise))
            if self._recorded_agents is None and not number:
                self._num_episodes += 1
                number = self._num_episodes
                begins.append(self._begin(prompt, episode, number))
            if number:
                episode.number = number
                episode.pictures.update(self._pictures.get(number, {}))
                self._episodes[number] = episode
        if begins:
            self._agents.begin(begins)

    def _begin(self, prompt: Prompt, episode: OpenEpisode, number: int) -> Begin:
        return Begin(
            episode=number,
            task=_task(prompt, episode.key, self.step.phase),
            noise=noise_of_episode(self.step.seed, *episode.key),
        )

    def _hear(self, groups: OpenEpisodes) -> list[SampleGroup]:
        """Takes new weights where they are due, and what the agents say; waits for it if the engine has nothing to do.
        Returns the groups that are whole, in the order in which they became it."""
        whole = self._hear_again(groups) if self._recorded_agents is not None else self._hear_agents(groups)
        self._answer(self._policy.ended(self._take_due_weights()))
        return self._samples(whole)

    def _hear_agents(self, groups: OpenEpisodes) -> list[WholeGroup]:
        held = [one for one in self._held if one.episode in self._episodes]
        self._held = [one for one in self._held if one.episode not in self._episodes]
        has_work = self._has_turns or held or not (groups.running or self._samples_for_others)
        if has_work:
            messages = self._agents.take(waits=False)
        else:
            with self._host.waits.waiting("agents", processes=self._awaited, describe=lambda: self._agents.waits_for):
                messages = self._agents.take(waits=True)
        whole: list[WholeGroup] = []
        for message in messages:
            if isinstance(message, NewPicture):
                self._take_picture(message)
            elif isinstance(message, PictureRequest):
                self._send_picture(message)
            elif isinstance(message, Ask) and not message.episode:
                self._sample_routed(message)
        for message in [*held, *messages]:
            if isinstance(message, PictureRequest) or not message.episode:
                continue
            if isinstance(message, NewPicture):
                self._record_picture(message)
                continue
            episode = self._episodes.get(message.episode)
            if episode is None:  # it outlived a stage of training, and this is an evaluation
                self._held.append(message)
            elif isinstance(message, Ask):
                self._asked(episode, message, message.request)
            else:
                whole += self._ended(groups, episode, message)
        return whole

    def _take_picture(self, message: NewPicture) -> None:
        """Keeps a picture that an episode has seen, or that a turn for the router follows, in memory that the trainer
        reads by reference."""
        reference = reference_of(message.digest)
        if message.arguments:
            picture = self._pool.place(picture_of(message))
        else:
            picture = self._recent_pictures[message.digest]
        self._recent_pictures.use(message.digest, picture.num_bytes, picture)
        if not message.episode:
            self._passed_pictures[reference] = picture
            return
        self._pictures.setdefault(message.episode, {})[reference] = picture
        if (episode := self._episodes.get(message.episode)) is not None:
            episode.pictures[reference] = picture

    def _send_picture(self, request: PictureRequest) -> None:
        """Sends the router a picture of this rank's prompts; without an episode that has it, nobody waits for it."""
        assert self._router is not None, "a router has asked"
        if (picture := self._own_picture(reference_of(request.digest))) is not None:
            self._router.send_picture(picture_message(0, picture))

    def _own_picture(self, reference: int) -> ProcessedPicture | None:
        """A picture of an episode that this rank has begun."""
        episodes = self._episodes.values()
        return next((one.pictures[reference] for one in episodes if reference in one.pictures), None)

    def _record_picture(self, message: NewPicture) -> None:
        """Puts a picture into the record of the step in which its episode goes on."""
        episode = self._episodes.get(message.episode)
        if episode is None:  # it outlived a stage of training, and this is an evaluation
            self._held.append(message)
        elif self.records:
            self.decide(picture_decision(episode.key, message, self._num_steps))

    @cached_property
    def _processor(self) -> Any:
        """In a replay, of the pictures in the record."""
        assert self._episode_settings.pictures is not None, "a record with pictures is of a model that reads them"
        return processor_of(self._episode_settings.pictures)

    @cached_property
    def _pool(self) -> PicturePool:
        return PicturePool(self.note, capacity_bytes=PICTURES_BYTES)

    def _hear_again(self, groups: OpenEpisodes) -> list[WholeGroup]:
        """As `_hear_agents`, from the record."""
        assert self._recorded_agents is not None, "in a replay"
        num_steps = self._num_steps if self._has_turns else None
        is_silent = True
        whole: list[WholeGroup] = []
        waiting = partial(groups.waiting, self._episode_settings.max_episodes)
        for one in self._recorded_agents.take(groups.logs, num_steps, waiting):
            is_silent = False
            episode = groups.running[one.episode]
            if one.picture:
                picture = self._pool.place(processed_file(self._processor, one.picture))
                episode.pictures[reference_of(picture.digest)] = picture
                if self.records:
                    message = NewPicture(episode=0, digest=picture.digest, token_ids=[], file=one.picture)
                    self.decide(picture_decision(episode.key, message, self._num_steps))
            elif one.trajectory is None:
                self._asked(episode, one, None)
            else:
                report = EpisodeReport(episode=0, trajectory=one.trajectory)
                whole += self._ended(groups, episode, report)
        if is_silent and num_steps is None and groups.running:
            raise WorkersError(
                f"the record does not say how {len(groups.running)} episodes of step {self.step.step} go on, such as "
                f"episode {min(groups.running)} (step, prompt, member)"
            )
        return whole

    def _asked(self, episode: OpenEpisode, ask: Ask | SaidAgain, request: int | None) -> None:
        """An episode asks for a turn, which may have been asked for before it was begun again."""
        turn = episode.log.get(ask.noise)
        if turn is None:
            turn = episode.log.add(ask.noise, ask.token_ids, ask.agent)
            if self.records:
                self.decide(ask_decision(episode.key, turn, self._num_steps))
            self._queue(episode, turn, ask.token_ids, request)
        elif not turn.has_ended:
            episode.pending[ask.noise].request = request
        elif request is not None and turn.sampled is not None:
            self._agents.answer([Answer(request=request, sampled=turn.sampled)])

    def _ended(self, groups: OpenEpisodes, episode: OpenEpisode, report: EpisodeReport) -> list[WholeGroup]:
        """An episode is over. Returns its group if it is whole now."""
        if self.records:
            self.decide(report_decision(episode.key, report, self._num_steps))
        self._episodes.pop(episode.number, None)
        self._pictures.pop(episode.number, None)
        return groups.end(episode.key, report)

    def _sample_routed(self, ask: Ask) -> None:
        """Samples a turn of any rank's episode; the router has the episode."""
        if ask.engine and self.num_ranks > 1:
            self.record("router/moved_turns", float(ask.engine == "moved"))
            self.record("router/lost_turns", float(ask.engine == "lost"))
        turn = LoggedTurn(noise=ask.noise, agent=ask.agent)
        pending = PendingTurn(
            episode=None, turn=turn, token_ids=ask.token_ids, pictures=self._passed(ask), request=ask.request
        )
        self._queue_of.get(ask.agent, self._policy).add(pending)

    def _passed(self, ask: Ask) -> dict[int, ProcessedPicture]:
        """The pictures of a turn: from the router, or, of an episode of this rank, its own."""
        passed, self._passed_pictures = self._passed_pictures, {}
        if self._episode_settings.pictures is not None:
            for reference in {token for token in ask.token_ids if token >= FIRST_REFERENCE} - passed.keys():
                if (picture := self._own_picture(reference)) is not None:
                    passed[reference] = picture
        return passed

    def _queue(self, episode: OpenEpisode, turn: LoggedTurn, token_ids: Sequence[int], request: int | None) -> None:
        pending = PendingTurn(
            episode=episode, turn=turn, token_ids=token_ids, pictures=episode.pictures, request=request
        )
        episode.pending[turn.noise] = pending
        self._unheard.discard(turn.agent)
        self._queue_of.get(turn.agent, self._policy).add(pending)

    @property
    def _has_turns(self) -> bool:
        """Whether a turn waits or runs."""
        return not all(queue.is_empty for queue in self._queues)

    def _submit_turns(self, sampling: SamplingSettings) -> None:
        """Gives each engine as many turns as it has capacity for; `sampling` is of groups of one completion."""
        for queue in self._queues:
            if queue.is_waiting:
                with self.asking():
                    queue.submit(sampling)

    def _interrupt(self) -> None:
        """Has the engine that samples return for messages of the agents; any thread."""
        for queue in self._queues:
            queue.interrupt()

    def _generate(self, groups: OpenEpisodes) -> None:
        """Computes until a turn of each engine ends or the agents say something; in a replay until they did."""
        for queue in self._beside:
            if queue.is_running:
                self._answer(queue.finished())
        if not self._policy.is_running:
            return
        if self._recorded_agents is not None:
            next_said = self._recorded_agents.next_step(groups.logs, self._num_steps)
            if next_said == self._num_steps:
                return
            stops = [] if next_said is None else [self._first_step + next_said]
            stops += [] if self._takes.next_step is None else [self._takes.next_step]
            if stops:
                self._pausing.interrupt(min(stops))
        with self.asking():
            ended = self._policy.finished()
        self._answer(ended)

    @property
    def _num_steps(self) -> int:
        """Decode steps since the stage began."""
        return self._pausing.num_steps - self._first_step

    def _answer(self, ended: Iterable[EndedTurn]) -> None:
        answers: list[Answer] = []
        for pending, sampled in ended:
            turn, episode = pending.turn, pending.episode
            if episode is not None:
                episode.log.end(turn.noise, sampled)
                del episode.pending[turn.noise]
            if pending.request is not None:
                answers.append(Answer(request=pending.request, sampled=sampled))
        if answers:
            if self._router is not None:
                self.check_weights()  # other ranks put what this one sampled
                self._num_sampled += len(answers)
            self._agents.answer(answers)

    def _suspend(self) -> None:
        """Takes back the turns that the engine has not finished; those of late groups go on later."""
        for queue in self._queues:
            with self.asking():
                ended = queue.suspend()
            self._answer(ended)

    # -- groups ----------------------------------------------------------------------------------------------------

    def _samples(self, groups: Iterable[WholeGroup]) -> list[SampleGroup]:
        agents, version = self._episode_settings.trained_agents, self.policy_version
        further = self._episode_settings.agents_by_trainer
        samples: list[SampleGroup] = []
        for prompt, reports, pictures in groups:
            episodes = [report.trajectory for report in reports]
            group = group_of(prompt, episodes, policy_version=version, agents=agents, pictures=pictures)
            if further:
                nothing, served = replace(prompt, token_ids=NO_PROMPT, pictures=None), self._served_policies
                parts = {
                    trainer: group_of(nothing, episodes, policy_version=served[trainer].version, agents=own)
                    for trainer, own in further.items()
                }
                group = replace(group, of_policies=parts)
            samples.append(group)
        return samples

    def _measure(self, group: SampleGroup, prefix: str = "") -> None:
        super()._measure(group, prefix)
        names = self._episode_settings.further_policies
        for trainer, part in group.of_policies.items():
            super()._measure(part, f"policy/{names[trainer]}/")

    def _left(self, groups: OpenEpisodes, index: int) -> None:
        """A whole group leaves; measures its episodes."""
        episodes = groups.leave(index)
        waits_s = [one.report.idle_s for one in episodes if one.report is not None]
        self.record("agent/group_outside_engine_s", max(waits_s))
        for episode in episodes:
            assert episode.report is not None, "the group is whole"
            trajectory = episode.report.trajectory
            self._unheard.difference_update(node.agent for node in trajectory.nodes)
            self.record("agent/turns", sum(1 for _ in turns(trajectory)))
            self.record("agent/retries", episode.report.num_retries)
            self.record("agent/outside_engine_s", episode.report.idle_s)
            counts = episode.report.counts
            self.record("agent/branches", counts.get("branches", 0) + counts.get("roots", 0))
            self.record("agent/malformed_calls", counts.get("malformed_calls", 0))
            if self._episode_settings.run == LOOP:
                self.record("agent/calls", counts.get("calls", 0))
                self.record("agent/failed_calls", counts.get("failed_calls", 0))
            self._causes[trajectory.cause] += 1
            if trajectory.is_discarded:
                which = f"prompt {episode.key[1]}, episode {episode.member}"
                self._failures.append(f"{which}: {trajectory.cause}: {trajectory.detail}")

    def _check_discarded(self) -> None:
        """Ends a stage. Raises: WorkersError if too many of its episodes were discarded."""
        causes, failures = self._causes, self._failures
        self._causes, self._failures = Counter(), []
        for name in sorted(self._unheard):
            self.note(f"{self.name}: no episode has asked the agent {name!r} for a turn; is its name misspelt?")
        self._unheard.clear()
        limit = self._episode_settings.max_discarded
        if len(failures) > limit * causes.total():
            first_failures = "\n".join(failures[:MAX_SHOWN])
            raise WorkersError(
                f"{len(failures)} of {causes.total()} episodes ended by what the policy cannot have caused; "
                f"rollout.agent.max_discarded={limit:g} allows fewer. The first of them:\n{first_failures}"
            )

    # -- the rest of a worker --------------------------------------------------------------------------------------

    def go_on_with(self, shares: Sequence[Sequence[LateGroup]]) -> None:
        super().go_on_with(shares)
        self._forget_late()

    def _forget_late(self) -> None:
        """Ends the episodes that outlived their stage; they begin again."""
        if self._late_in_process:
            self._agents.abandon()
            self._recent_pictures.clear()
        self._late_in_process.clear()
        self._held.clear()
        self._pictures.clear()

    def _awaited(self) -> Sequence[int]:
        return [self._agents.pid] if self._agents.pid else []

    def serving_processes(self) -> Sequence[int]:
        return (*super().serving_processes(), *(self._awaited() if self._router is None else ()))

    def onload(self) -> None:
        super().onload()
        for queue in self._beside:
            queue.engine.onload()

    def offload(self) -> None:
        super().offload()
        for queue in self._beside:
            queue.engine.offload()

    def discard(self) -> None:
        super().discard()
        for queue in self._beside:
            queue.engine.offload()

    def abandon(self) -> None:
        self._agents.abandon()
        for queue in self._beside:
            queue.suspend()
        if self._policy.is_running and not self._groups:  # of episodes that have ended
            self._pausing.suspend()
        self._policy.clear()
        self._late_in_process.clear()
        self._held.clear()
        self._pictures.clear()
        self._recent_pictures.clear()
        self._passed_pictures.clear()
        self._episodes.clear()
        self._causes.clear()
        self._failures.clear()
        self._samples_for_others, self._num_sampled, self._unsent = False, 0, []
        super().abandon()

    def close(self) -> None:
        self._agents.close()
        for queue in self._beside:
            queue.engine.close()
        super().close()


def _check_policies(settings: EpisodeSettings) -> None:
    """Raises: SettingsRefused if a policy would begin with two models, or the job's own policy would learn nothing."""
    if settings.agents_by_trainer and not settings.trained_agents:
        raise SettingsRefused("all agents that train have a policy of their own; the job's own policy would not train")
    folders: dict[str, str | None] = {}
    for name, agent in settings.agents.items():
        if agent.trainer and folders.setdefault(agent.trainer, agent.folder) != agent.folder:
            raise SettingsRefused(
                f"agent {name} speaks with the policy of {agent.trainer}, which begins with {folders[agent.trainer]}, "
                f"but has the model {agent.folder}"
            )


def _new(prompt: Prompt, step: int) -> LateGroup:
    """A group of which there is nothing yet."""
    return LateGroup(prompt=prompt, step=step, submitted_index=prompt.index, finished=(), unfinished=())


def _task(prompt: Prompt, episode: EpisodeKey, phase: str) -> AgentTask:
    step, index, member = episode
    text = prompt.text or ""
    messages = json.loads(prompt.messages_json) if prompt.messages_json else [{"role": "user", "content": text}]
    return AgentTask(
        index=index,
        member=member,
        step=step,
        phase=phase,
        messages=messages,
        text=text,
        answer=prompt.reference_answer,
        row=json.loads(prompt.row_json) if prompt.row_json else {},
        pictures=[
            HistoryPicture(digest=one.digest, token_ids=one.token_ids.tolist())
            for one in (() if prompt.pictures is None else prompt.pictures.pictures)
        ],
    )


def settings_of_agents(settings: RolloutSettings) -> EpisodeSettings:
    """The settings of the process that runs the episodes of a rollout."""
    assert settings.agent is not None, "a rollout of agents"
    agents = settings.agent.agents
    named = {name: replace(agent, stop_ids=_stop_ids(agent.folder)) for name, agent in agents.items()}
    return replace(settings.agent, stop_ids=_stop_ids(settings.model.folder), agents=named)


def _stop_ids(folder: str | None) -> list[int]:
    """Tokens at which an engine with this model ends a turn; none without a folder."""
    return [] if folder is None else list(stop_token_ids(folder, load_tokenizer(folder)))
