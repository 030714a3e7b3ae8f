"""Groups of episodes while they run: which episodes there are, what the engine samples for them, and what is left of
them when a step ends."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rlinf_workers.agents.link import EpisodeReport
from rlinf_workers.agents.turn_log import (
    EpisodeKey,
    LateEpisode,
    LoggedTurn,
    TurnLog,
    pack_episodes,
    unpack_episodes,
)
from rlinf_workers.roles.language.history_pictures import PicturesByReference, by_reference, pictures_of_prompt
from rlinf_workers.roles.language.late_groups import LateGroup
from rlinf_workers.roles.language.rollout import GroupsUnderWay
from rlinf_workers.roles.records.language import Prompt
from rlinf_workers.roles.records.pictures import ProcessedPicture
from rlinf_workers.spans import now_ns


@dataclass(kw_only=True, slots=True)
class PendingTurn:
    """A turn that the engine samples, or will."""

    episode: OpenEpisode | None
    """None: a router has it."""
    turn: LoggedTurn
    token_ids: Sequence[int]
    """What it follows."""
    pictures: PicturesByReference
    """Those that it may refer to."""
    request: int | None
    """Of the agent that waits for it; None: there is none, in a replay or until the agent has begun again."""


@dataclass(kw_only=True, slots=True)
class OpenEpisode:
    """An episode of a group that has not left."""

    key: EpisodeKey
    index: int
    """Of its group in this stage."""
    log: TurnLog
    number: int = 0
    """In the agent process; 0: it is not there."""
    pictures: dict[int, ProcessedPicture] = field(default_factory=dict)
    """Those that its histories may refer to, by reference; the prompt's are among them."""
    pending: dict[int, PendingTurn] = field(default_factory=dict)
    """By noise."""
    report: EpisodeReport | None = None
    """None: it has not ended."""

    @property
    def member(self) -> int:
        """Which of the episodes of its prompt it is."""
        return self.key[2]


Episodes = list[OpenEpisode]
"""Those of a group, in the order of their members."""
WholeGroup = tuple[Prompt, list[EpisodeReport], PicturesByReference]
"""Its prompt, its episodes in the order of their members, and their pictures."""


class OpenEpisodes(GroupsUnderWay[Episodes]):
    """Groups whose episodes have not all ended, and whole ones until `leave`.

    Args:
        keeps_histories: as in `TurnLog`.
    """

    def __init__(self, group_size: int, *, keeps_histories: bool) -> None:
        super().__init__(group_size)
        self._keeps_histories = keeps_histories
        self._waiting: deque[Prompt] = deque()
        """Of groups that have not begun."""
        self._running: dict[EpisodeKey, OpenEpisode] = {}
        """Those that have begun and not ended."""
        self._whole: dict[int, tuple[Prompt, Episodes]] = {}

    @property
    def running(self) -> Mapping[EpisodeKey, OpenEpisode]:
        """Episodes that have begun and not ended."""
        return self._running

    def waiting(self, max_episodes: int) -> list[EpisodeKey]:
        """Episodes of groups that have not begun; none if `begin` would begin none."""
        if not self._has_place(max_episodes):
            return []
        groups = (self._open[prompt.index][1] for prompt in self._waiting if prompt.index in self._open)
        return [episode.key for episodes in groups for episode in episodes if episode.report is None]

    def room(self, max_episodes: int) -> int:
        """Further groups whose episodes may run at once with those that run; 0 while others wait to begin."""
        return 0 if self._waiting else max(0, max_episodes - len(self._running)) // self.group_size

    def open_all(self, groups: Iterable[LateGroup]) -> None:
        """Takes groups up, in this order."""
        for group in groups:
            self.open(group)

    def open(self, group: LateGroup) -> None:
        """Takes a group up, with what there is of it."""
        there = {one.member: one for one in unpack_episodes(group.episodes)}
        episodes = []
        pictures = pictures_of_prompt(group.prompt) | by_reference(group.pictures)
        for member in range(self.group_size):
            late = there.get(member, LateEpisode(member=member))
            episodes.append(
                OpenEpisode(
                    key=(group.step, group.submitted_index, member),
                    index=group.prompt.index,
                    log=TurnLog(late.turns, keeps_histories=self._keeps_histories),
                    pictures=dict(pictures),
                    report=late.report,
                )
            )
        self._open[group.prompt.index] = group.prompt, episodes
        self._waiting.append(group.prompt)

    def begin(self, max_episodes: int) -> Iterator[tuple[Prompt, OpenEpisode]]:
        """Begins as many groups as may run at once, at least one. Returns their episodes that have not ended."""
        while self._waiting and self._has_place(max_episodes):
            prompt = self._waiting.popleft()
            if prompt.index not in self._open:  # it was whole before
                continue
            self._began_ns[prompt.index] = now_ns()
            for episode in self._open[prompt.index][1]:
                if episode.report is None:
                    self._running[episode.key] = episode
                    yield prompt, episode

    def _has_place(self, max_episodes: int) -> bool:
        """Whether a further group may run."""
        return not self._running or len(self._running) + self.group_size <= max_episodes

    @property
    def logs(self) -> dict[EpisodeKey, TurnLog]:
        """What the running episodes have asked for."""
        return {key: one.log for key, one in self._running.items()}

    def end(self, key: EpisodeKey, report: EpisodeReport) -> list[WholeGroup]:
        """An episode has ended. Returns its group if it is whole now."""
        episode = self._running.pop(key)
        episode.report = report
        return self.whole([episode.index])

    def whole(self, indices: Iterable[int] | None = None) -> list[WholeGroup]:
        """Those of these groups that are whole now; of all by default."""
        groups = []
        for index in list(self._open) if indices is None else indices:
            prompt, episodes = self._open[index]
            reports = [one.report for one in episodes if one.report is not None]
            if len(reports) == self.group_size:
                self._whole[index] = self._open.pop(index)
                groups.append((prompt, reports, _pictures(episodes)))
        return groups

    def leave(self, index: int) -> Episodes:
        """A whole group leaves. Returns its episodes."""
        return self._whole.pop(index)[1]

    def left_over(self, submitted: Mapping[int, tuple[int, int]]) -> list[LateGroup]:
        """The groups that go on in the next step, those that are open and those that are whole.

        Args:
            submitted: index of a group -> step and index with which its prompt was submitted.
        """
        left = []
        for index, (prompt, episodes) in {**self._open, **self._whole}.items():
            step, submitted_index = submitted[index]
            of_prompt = pictures_of_prompt(prompt)
            late = [
                LateEpisode(member=one.member, report=one.report, turns=[] if one.report is not None else one.log.turns)
                for one in episodes
            ]
            left.append(
                LateGroup(
                    prompt=prompt,
                    step=step,
                    submitted_index=submitted_index,
                    finished=(),
                    unfinished=(),
                    episodes=pack_episodes(late),
                    pictures=tuple(
                        picture for reference, picture in _pictures(episodes).items() if reference not in of_prompt
                    ),
                )
            )
        return sorted(left, key=lambda one: (one.step, one.prompt.index))


def _pictures(episodes: Episodes) -> dict[int, ProcessedPicture]:
    """Those of all episodes of a group."""
    return {reference: picture for one in episodes for reference, picture in one.pictures.items()}
