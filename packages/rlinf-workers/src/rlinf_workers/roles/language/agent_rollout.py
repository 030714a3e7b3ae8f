"""AgentRollout: episodes of many turns in place of completions.

An agent process beside the rank runs the episodes of a step (agents/host.py) and asks for their turns; the engine
samples turns of all episodes together. A group is the episodes of a prompt.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import msgspec
import torch
from msgspec import convert, to_builtins

from rlinf_workers.agents.link import AgentTask, Answer, Ask, Begin, EpisodeReport, Script
from rlinf_workers.agents.noise import noise_of_episode
from rlinf_workers.agents.process import AgentProcess
from rlinf_workers.agents.records import Sampled, turns
from rlinf_workers.agents.replay import script_of
from rlinf_workers.agents.settings import LOOP
from rlinf_workers.engines.base import Completions, SupportsPause, UnfinishedCompletion
from rlinf_workers.engines.sampling import NoiseKey, SamplingSettings
from rlinf_workers.errors import SettingsRefused, WorkersError
from rlinf_workers.models.language_model import load_tokenizer, stop_token_ids
from rlinf_workers.roles.language.episodes import group_of
from rlinf_workers.roles.language.rollout import GroupsUnderWay, Rollout, RolloutSettings
from rlinf_workers.roles.records.language import Prompt, SampleGroup
from rlinf_workers.spans import now_ns

NO_TOKENS, NO_LOGPROBS = torch.zeros(0, dtype=torch.int64), torch.zeros(0)
MAX_SHOWN = 3
"""Failures of a step that an error shows."""


class AgentRollout(Rollout):
    """Runs a group of episodes for each prompt."""

    def __init__(self, settings: RolloutSettings) -> None:
        super().__init__(settings)
        if settings.agent is None:
            raise SettingsRefused("AgentRollout needs the settings of its episodes (RolloutSettings.agent)")
        if not isinstance(self._engine, SupportsPause):
            raise SettingsRefused(f"{settings.engine} takes no prompts while it generates, which episodes need")
        folder = settings.model.folder
        stop_ids = list(stop_token_ids(folder, load_tokenizer(folder)))
        self._episode_settings = settings.agent
        self._agents = AgentProcess(replace(settings.agent, stop_ids=stop_ids), self._engine.interrupt)
        self._turns: dict[int, Ask] = {}
        """Turns that the engine samples, by number of their request."""
        self._asks: deque[Ask] = deque()
        """Turns that wait for the engine."""
        self._num_episodes = 0
        self._causes: Counter[str] = Counter()
        self._failures: list[str] = []

    def sample(
        self, prompts: Sequence[Prompt], further_prompts: Callable[[int], Sequence[Prompt]] | None = None
    ) -> Iterator[list[SampleGroup]]:
        """Runs a group of episodes for each prompt, and yields groups as their last episodes end.

        Raises: WorkersError if too many episodes ended by what the policy cannot have caused.
        """
        sampling = self._settings.train if self.step.phase == "train" else self._settings.evaluate
        groups = OpenEpisodes(sampling.group_size)
        self._groups = groups
        scripts = self._scripts()
        waiting = deque(prompts)
        turns = replace(sampling, group_size=1)
        self._begin_episodes(waiting, groups, scripts)
        while groups:
            whole = self._take_messages(groups)
            self._begin_episodes(waiting, groups, scripts)
            self._submit_turns(turns)
            if self._turns:
                with self.asking():
                    finished = self._engine.finished()
                self._answer(finished)
            if whole:
                yield whole
        self._check_discarded()

    def _begin_episodes(
        self, waiting: deque[Prompt], groups: OpenEpisodes, scripts: dict[tuple[int, int], Script]
    ) -> None:
        """Begins the episodes of as many groups as may run at once; at least one group."""
        size, step = groups.group_size, self.step
        begins: list[Begin] = []
        while waiting and (
            not groups.num_episodes or groups.num_episodes + size <= self._episode_settings.max_episodes
        ):
            prompt = waiting.popleft()
            task = _task(prompt, step.step, step.phase)
            for member in range(size):
                self._num_episodes += 1
                groups.open(prompt, member, self._num_episodes)
                begins.append(
                    Begin(
                        episode=self._num_episodes,
                        task=msgspec.structs.replace(task, member=member),
                        noise=noise_of_episode(step.seed, step.step, prompt.index, member),
                        script=scripts.get((prompt.index, member)),
                    )
                )
        if begins:
            self._agents.begin(begins)

    def _take_messages(self, groups: OpenEpisodes) -> list[SampleGroup]:
        """Reads what the agents say, and waits for it if the engine has nothing to do. Returns the groups that are
        whole."""
        waits = not self._turns and not self._asks
        with self._host.waits.waiting("agents", processes=self._awaited, describe=lambda: self._agents.waits_for):
            messages = self._agents.take(waits=waits)
        whole = []
        for message in messages:
            if isinstance(message, Ask):
                self._asks.append(message)
            elif (group := groups.add(message)) is not None:
                prompt, reports = group
                whole.append(self._group(prompt, reports))
        return whole

    def _submit_turns(self, sampling: SamplingSettings) -> None:
        """Gives the engine as many turns as it has capacity for."""
        assert isinstance(self._engine, SupportsPause), "the constructor refuses others"
        num_turns = min(len(self._asks), self._engine.free_capacity(1))
        asks = [self._asks.popleft() for _ in range(num_turns)]
        if asks:
            self._turns |= {ask.request: ask for ask in asks}
            with self.asking():
                self._engine.submit_unfinished([_turn(ask) for ask in asks], sampling)

    def _answer(self, finished: Iterable[Completions]) -> None:
        answers = [
            Answer(request=one.index, sampled=_sampled(one, self._turns.pop(one.index).noise)) for one in finished
        ]
        if answers:
            self._agents.answer(answers)

    # -- groups ----------------------------------------------------------------------------------------------------

    def _group(self, prompt: Prompt, reports: Sequence[EpisodeReport]) -> SampleGroup:
        """The group of these episodes, in the order of their members; recorded."""
        trajectories = [report.trajectory for report in reports]
        agents = self._episode_settings.trained_agents
        group = group_of(prompt, trajectories, policy_version=self.policy_version, agents=agents)
        for member, report in enumerate(reports):
            self._record_episode(prompt.index, member, report)
        self._record(group, (self.step.step, group.index))
        return group

    def _record_episode(self, index: int, member: int, report: EpisodeReport) -> None:
        trajectory = report.trajectory
        self.record("agent/turns", sum(1 for _ in turns(trajectory)))
        self.record("agent/retries", report.num_retries)
        self.record("agent/outside_engine_s", report.idle_s)
        counts = report.counts
        self.record("agent/branches", counts.get("branches", 0) + counts.get("roots", 0))
        self.record("agent/malformed_calls", counts.get("malformed_calls", 0))
        if self._episode_settings.run == LOOP:
            self.record("agent/calls", counts.get("calls", 0))
            self.record("agent/failed_calls", counts.get("failed_calls", 0))
        self._causes[trajectory.cause] += 1
        if trajectory.is_discarded:
            self._failures.append(f"prompt {index}, episode {member}: {trajectory.cause}: {trajectory.detail}")
        if self.records:
            self.decide({"episode": [index, member], "script": to_builtins(script_of(trajectory))})

    def _scripts(self) -> dict[tuple[int, int], Script]:
        """The recorded episodes of the stage that is replayed."""
        return {
            (one["episode"][0], one["episode"][1]): convert(one["script"], Script)
            for _, one in self.recorded or ()
            if "episode" in one
        }

    def _check_discarded(self) -> None:
        causes, failures = self._causes, self._failures
        self._causes, self._failures = Counter(), []
        limit = self._episode_settings.max_discarded
        if len(failures) > limit * causes.total():
            first_failures = "\n".join(failures[:MAX_SHOWN])
            raise WorkersError(
                f"{len(failures)} of {causes.total()} episodes ended by what the policy cannot have caused; "
                f"rollout.agent.max_discarded={limit:g} allows fewer. The first of them:\n{first_failures}"
            )

    # -- the rest of a worker --------------------------------------------------------------------------------------

    def _awaited(self) -> Sequence[int]:
        return [self._agents.pid]

    def serving_processes(self) -> Sequence[int]:
        return (*super().serving_processes(), self._agents.pid)

    def abandon(self) -> None:
        self._agents.abandon()
        self._turns.clear()
        self._asks.clear()
        self._causes.clear()
        self._failures.clear()
        super().abandon()

    def close(self) -> None:
        self._agents.close()
        super().close()


class OpenEpisodes(GroupsUnderWay[dict[int, EpisodeReport]]):
    """Groups whose episodes have not all ended."""

    def __init__(self, group_size: int) -> None:
        super().__init__(group_size)
        self._members: dict[int, tuple[int, int]] = {}
        """Number of an open episode -> index of its prompt, and which of its episodes it is."""

    @property
    def num_episodes(self) -> int:
        """Episodes that have not ended."""
        return len(self._members)

    def open(self, prompt: Prompt, member: int, episode: int) -> None:
        """Registers an episode that begins."""
        self._open.setdefault(prompt.index, (prompt, {}))
        self._members[episode] = prompt.index, member
        self._began_ns.setdefault(prompt.index, now_ns())

    def add(self, report: EpisodeReport) -> tuple[Prompt, list[EpisodeReport]] | None:
        """Returns the group that is whole with this episode: its prompt, and its episodes in the order of members."""
        index, member = self._members.pop(report.episode)
        prompt, reports = self._open[index]
        reports[member] = report
        if len(reports) < self.group_size:
            return None
        del self._open[index]
        return prompt, [reports[number] for number in range(self.group_size)]


def _task(prompt: Prompt, step: int, phase: str) -> AgentTask:
    """That of the first member."""
    text = prompt.text or ""
    messages = json.loads(prompt.messages_json) if prompt.messages_json else [{"role": "user", "content": text}]
    return AgentTask(
        index=prompt.index,
        member=0,
        step=step,
        phase=phase,
        messages=messages,
        text=text,
        answer=prompt.reference_answer,
        row=json.loads(prompt.row_json) if prompt.row_json else {},
    )


def _turn(ask: Ask) -> UnfinishedCompletion:
    """A turn that has no token yet, with noise of its own."""
    token_ids = torch.tensor(ask.token_ids)
    return UnfinishedCompletion(
        prompt=Prompt(index=ask.request, token_ids=token_ids, reference_answer=""),
        member=0,
        token_ids=NO_TOKENS,
        logprobs=NO_LOGPROBS,
        segments=(),
        noise=NoiseKey(seed=ask.noise, step=0, index=0),
    )


def _sampled(one: Completions, noise: int) -> Sampled:
    num_tokens = int(one.loss_mask[0].sum())
    segments = one.segments[0] if one.segments else ()
    return Sampled(
        token_ids=one.token_ids[0, :num_tokens].tolist(),
        logprobs=one.logprobs[0, :num_tokens].tolist(),
        versions=[(s.num_tokens, s.policy_version) for s in segments] or [(num_tokens, one.policy_version)],
        truncated=bool(one.truncated[0]),
        noise=noise,
    )
