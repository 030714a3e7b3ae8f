"""Deals the episodes of a step to simulators: whichever is free takes the next one.

An episode is known by its number in the step. Its start, its noise and its place in the sums of training follow from
that number, so neither the number of simulators nor their speed changes a result.

Consecutive episodes are a group: they begin at the same start, and advantages compare them. With `dynamic_sampling`
(the word of DAPO, arXiv:2503.14476) groups whose returns are all equal are left out, and further starts take their
places: a step trains on the first groups whose returns differ, in the order of their starts. Simulators that would be
idle meanwhile begin starts that may turn out not to be needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from threading import Lock

from rlinf_comm import record
from rlinf_envs import EpisodeEnd


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeBatch:
    """The episodes of a step. Starts are dealt in turn to the shards of a training batch, and to lanes: with
    `dynamic_sampling` a shard is a lane, which decides for itself which of its groups are trained, so that no process
    has to know the episodes of another; otherwise each start is a lane, and there is nothing to decide.

    Example: 32 episodes in groups of 8 and 2 shards: shard 0 has the starts 0 and 2, shard 1 has 1 and 3.
    """

    num_episodes: int
    """A multiple of group_size * num_shards."""
    group_size: int = 1
    num_shards: int = 1
    dynamic_sampling: bool = False
    """Leave out groups whose returns are all equal."""
    oversampling: float = 1.0
    """With dynamic_sampling: at most this many times as many starts."""

    @property
    def num_lanes(self) -> int:
        return self.num_shards if self.dynamic_sampling else self.num_episodes // self.group_size

    @property
    def groups_per_lane(self) -> int:
        """Groups of a lane that are trained, at most."""
        return self.num_episodes // self.group_size // self.num_lanes

    def starts_of(self, lane: int) -> range:
        """The starts of a lane; those beyond the first `groups_per_lane` are for the places of others."""
        num_starts = self.groups_per_lane
        if self.dynamic_sampling:
            num_starts = max(num_starts, int(self.oversampling * num_starts))
        return range(lane, lane + num_starts * self.num_lanes, self.num_lanes)

    def chosen(self, lane: int, returns: Mapping[int, Sequence[float]]) -> tuple[list[int], list[int]] | None:
        """Returns the starts of a lane that are trained, and those that were looked at to find them, both in order;
        None if further episodes have to end first. A lane without any group to learn from trains on its first one,
        whose advantages are 0, so that no shard of a batch is empty.

        Args:
            returns: start -> the returns of its episodes, for starts of which all have ended.
        """
        chosen: list[int] = []
        seen: list[int] = []
        for start in self.starts_of(lane):
            if start not in returns:
                return None
            seen.append(start)
            if not self.dynamic_sampling or len(set(returns[start])) > 1:
                chosen.append(start)
            if len(chosen) == self.groups_per_lane:
                break
        return chosen or seen[:1], seen


@dataclass(frozen=True, kw_only=True, slots=True)
class Deal:
    """An episode that a simulator takes."""

    episode: int
    seed: int


@dataclass
class EpisodeDealer:
    """The episodes of a step that one process simulates: those of its lanes. Safe to use from several threads.

    Args:
        seed_of: start -> reset seed.
        report: called in the end for each episode that was looked at, in their order, with whether the time limit ended
            it.
    """

    batch: EpisodeBatch
    lanes: Sequence[int]
    seed_of: Callable[[int], int]
    report: Callable[[EpisodeEnd, bool], None]
    chosen: set[int] = field(default_factory=set)
    """Starts that are trained, of the lanes that have decided."""
    seen: set[int] = field(default_factory=set)
    """Starts that were looked at to find them."""
    all_begun: bool = False
    """Whether `take` has nothing left."""
    _lock: Lock = field(default_factory=Lock)
    _ends: dict[int, dict[int, tuple[EpisodeEnd, bool]]] = field(default_factory=dict)
    """Start -> episode -> its end, and whether the time limit came first."""

    def __post_init__(self) -> None:
        self._waiting = self._in_order()
        self._open = set(self.lanes)
        """Lanes of which further episodes have to end."""

    @property
    def is_done(self) -> bool:
        """Whether all episodes that are trained have ended."""
        return not self._open

    def take(self, num_free: int) -> list[Deal]:
        """The next episodes, for so many simulators that are free; fewer if there are no more."""
        with self._lock:
            episodes = list(islice(self._waiting, num_free))
            self.all_begun |= len(episodes) < num_free
        return [Deal(episode=each, seed=self.seed_of(each // self.batch.group_size)) for each in episodes]

    def ended(self, episode: int, end: EpisodeEnd, *, cut: bool) -> None:
        """Notes the end of an episode. `cut`: the time limit ended it."""
        start = episode // self.batch.group_size
        with self._lock:
            ends = self._ends.setdefault(start, {})
            ends[episode] = (end, cut)
            lane = start % self.batch.num_lanes
            if len(ends) == self.batch.group_size and lane in self._open:
                self._decide(lane)

    def _in_order(self) -> Iterator[int]:
        starts = (start for of_turn in zip(*map(self.batch.starts_of, self.lanes), strict=True) for start in of_turn)
        for start in starts:
            for member in range(self.batch.group_size):
                if start % self.batch.num_lanes in self._open:
                    yield start * self.batch.group_size + member

    def _decide(self, lane: int) -> None:
        ends_of = {start: self._ends.get(start, {}) for start in self.batch.starts_of(lane)}
        whole = {
            start: [end.return_ for end, _ in ends.values()]
            for start, ends in ends_of.items()
            if len(ends) == self.batch.group_size
        }
        if (decided := self.batch.chosen(lane, whole)) is None:
            return
        self._open.discard(lane)
        chosen, seen = decided
        self.chosen.update(chosen)
        self.seen.update(seen)
        if self.is_done:
            for start in sorted(self.seen):
                for _, (end, cut) in sorted(self._ends[start].items()):
                    self.report(end, cut)
