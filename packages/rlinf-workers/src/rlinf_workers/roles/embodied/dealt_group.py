"""A group of simulators that take the episodes of training steps from dealers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from threading import Lock

import torch
from torch import Tensor

from rlinf_envs import EpisodeEnd, EpisodeKeeper, KeptEpisode, Observation, StepResult, SupportsBegin
from rlinf_workers.roles.embodied.dealing import EpisodeBatch, EpisodeDealer
from rlinf_workers.roles.records.embodied import GroupObservation

NO_EPISODE = -1
"""In place of an episode's number, for a row at rest or in an episode of another step."""


class DealtStep:
    """The episodes of a training step that one process simulates.

    Args:
        lanes, seed_of: as in `EpisodeDealer`.
        groups: the groups whose rows take them.
    """

    def __init__(
        self, batch: EpisodeBatch, *, lanes: Sequence[int], seed_of: Callable[[int], int], groups: Sequence[int]
    ) -> None:
        self.ends: list[tuple[EpisodeEnd, bool]] = []
        """Of the episodes that were looked at, in their order, once all have ended: the end, and whether the time limit
        came first."""
        self.dealer = EpisodeDealer(
            batch, lanes=lanes, seed_of=seed_of, report=lambda end, cut: self.ends.append((end, cut))
        )
        self.running = set(groups)
        """Groups in which it goes on."""
        self.kept: dict[int, list[tuple[int, KeptEpisode]]] = {group: [] for group in groups}
        """Group -> its episodes with their numbers, in the order in which they ended; empty if none are kept."""

    def was_sent(self, observation: GroupObservation) -> None:
        """The policy has an observation; with the last one, the step ends in its group."""
        if observation.is_last:
            self.running.discard(observation.group)

    def kept_episodes(self, group: int) -> list[KeptEpisode]:
        """Those of a group that were looked at, with their starts as `env_index`, which therefore does not depend on
        simulators, and their places among the episodes of the start as `episode_index`."""
        size = self.dealer.batch.group_size
        numbered = ((*divmod(number, size), one) for number, one in self.kept[group])
        return [
            replace(one, end=replace(one.end, env_index=start, episode_index=member))
            for start, member, one in numbered
            if start in self.dealer.seen
        ]


@dataclass(eq=False)
class _Share:
    """A step in one group."""

    step: DealtStep
    has_begun: bool = False
    """Whether the policy has an observation of it."""
    time: int = 0
    """Executed chunks."""
    actions: Tensor | None = None
    """Of the next chunk; None: the policy has not chosen them yet."""
    rows: dict[int, int] = field(default_factory=dict)
    """Row -> the episode that it acts in."""
    needs_none: bool = False
    """Whether no episode is needed any more, as of this round."""

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to simulate in this group: every episode has begun that may be needed."""
        return self.needs_none or (not self.rows and self.step.dealer.all_begun)


Sent = list[tuple[DealtStep, GroupObservation]]
"""Observations, each with its step."""


@dataclass
class DealtGroup:
    """The rows of one group, which execute chunks together. A row whose episode ends takes the next one at once, or
    rests if there is none. Steps that overlap share the rows: those that the earlier step does not need take episodes
    of the later one. Safe to use from several threads.

    Args:
        read: the fields of an observation that the policy reads.
        chunk_size: actions per chunk (K).
        sends_finals: whether the policy needs the last observations of episodes, for their values.
    """

    index: int
    env: SupportsBegin
    read: Callable[[Observation], dict[str, Tensor]]
    chunk_size: int
    sends_finals: bool
    num_rounds: int = 0
    """Executed chunks."""
    num_simulated: int = 0
    """Chunks of rows that had an episode."""
    _shares: list[_Share] = field(default_factory=list)
    """Of the steps under way, in their order."""
    _lock: Lock = field(default_factory=Lock)

    def join(self, step: DealtStep) -> Sent:
        """Begins a step, whose episodes free rows take. Returns its first observation, unless all rows are in episodes
        of earlier steps: then a later round returns it."""
        with self._lock:
            is_first = not self._shares
            self._shares.append(_Share(step))
            rows, begun = self._refill(alone=is_first)
            fields = {}
            for name, values in begun.items():
                fields[name] = torch.zeros((self.env.num_envs, *values.shape[1:]), dtype=values.dtype)
                fields[name][rows] = values
            return self._sent([(share, self._first(share, fields)) for share in self._beginning()])

    def act(self, step: DealtStep, actions: Tensor) -> Sent:
        """Takes the next chunk of actions of a step, [n, K, *action shape]. If those of all steps are there, executes
        them and returns the observation after them for each step that has rows in this group."""
        with self._lock:
            next(share for share in self._shares if share.step is step).actions = actions
            acting = [share for share in self._shares if share.has_begun]
            if any(share.actions is None for share in acting):
                return []
            result = self.env.step_chunk(_merged(acting))
            self.num_rounds += 1
            self.num_simulated += sum(len(share.rows) for share in acting)
            acted = [list(share.rows) for share in acting]
            self._note_ends(result)
            fields = self.read(result.observation)
            rows, begun = self._refill(alone=False)
            if rows:
                fields = {name: value.clone() for name, value in fields.items()}
                for name, values in begun.items():
                    fields[name][rows] = values
            finals = self.read(result.final_observation) if result.episodes and self.sends_finals else None
            observed = [
                (share, self._next(share, of_share, result, fields, finals))
                for share, of_share in zip(acting, acted, strict=True)
            ]
            return self._sent(observed + [(share, self._first(share, fields)) for share in self._beginning()])

    def clear(self) -> None:
        """Drops all steps."""
        with self._lock:
            self._shares.clear()

    def free_rows(self) -> list[int]:
        """Rows that can take the next episodes."""
        busy = {row for share in self._shares if not share.needs_none for row in share.rows}
        return [row for row in range(self.env.num_envs) if row not in busy]

    def _note_ends(self, result: StepResult) -> None:
        """Frees the rows whose episodes have ended."""
        episodes = self.env.take(cuts=False) if isinstance(self.env, EpisodeKeeper) else [None] * len(result.episodes)
        for end, one in zip(result.episodes, episodes, strict=True):
            share = next((share for share in self._shares if end.env_index in share.rows), None)
            if share is None:  # an episode that no step needs any more
                continue
            episode = share.rows.pop(end.env_index)
            share.step.dealer.ended(episode, end, cut=bool(result.truncated[end.env_index]))
            if one is not None:
                share.step.kept[self.index].append((episode, one))

    def _refill(self, *, alone: bool) -> tuple[list[int], dict[str, Tensor]]:
        """Begins episodes in free rows, those of the earliest step first. Returns these rows, and what they show."""
        for share in self._shares:
            share.needs_none = share.step.dealer.is_done
        seeds: dict[int, int] = {}
        for share in self._shares:
            free = self.free_rows()
            for row, deal in zip(free, share.step.dealer.take(len(free)), strict=False):
                for other in self._shares:
                    other.rows.pop(row, None)
                share.rows[row], seeds[row] = deal.episode, deal.seed
        if not seeds and not alone:
            return [], {}
        begun = self.env.begin(seeds, alone=alone)
        return list(seeds), self.read(begun) if seeds else {}

    def _beginning(self) -> list[_Share]:
        """Steps of which the policy gets its first observation."""
        return [share for share in self._shares if not share.has_begun and (share.rows or share.is_over)]

    def _sent(self, observed: Sequence[tuple[_Share, GroupObservation]]) -> Sent:
        """Ends the steps that are over in this group."""
        for share, observation in observed:
            share.has_begun, share.actions = True, None
            if observation.is_last:
                self._shares.remove(share)
        return [(share.step, observation) for share, observation in observed]

    def _first(self, share: _Share, fields: dict[str, Tensor]) -> GroupObservation:
        num_envs = self.env.num_envs
        return GroupObservation(
            group=self.index,
            time=0,
            fields=fields,
            final_fields=None,
            rewards=torch.zeros(num_envs, self.chunk_size),
            num_executed=torch.zeros(num_envs, dtype=torch.int64),
            terminated=torch.zeros(num_envs, dtype=torch.bool),
            truncated=torch.zeros(num_envs, dtype=torch.bool),
            is_last=share.is_over,
            episodes=self._episodes_of(share),
            returns=torch.zeros(num_envs, dtype=torch.float64),
        )

    def _next(
        self,
        share: _Share,
        acted: list[int],
        result: StepResult,
        fields: dict[str, Tensor],
        finals: dict[str, Tensor] | None,
    ) -> GroupObservation:
        """The observation after a chunk in which these rows acted for the step."""
        share.time += 1
        own = torch.zeros(self.env.num_envs, dtype=torch.bool)
        own[acted] = True
        returns = torch.zeros(self.env.num_envs, dtype=torch.float64)
        for end in result.episodes:
            returns[end.env_index] = end.return_
        return GroupObservation(
            group=self.index,
            time=share.time,
            fields=fields,
            final_fields=finals,
            rewards=result.rewards,
            num_executed=result.num_steps,
            terminated=result.terminated & own,
            truncated=result.truncated & own,
            is_last=share.is_over,
            episodes=self._episodes_of(share),
            returns=returns,
        )

    def _episodes_of(self, share: _Share) -> Tensor:
        episodes = torch.full((self.env.num_envs,), NO_EPISODE)
        for row, episode in share.rows.items():
            episodes[row] = episode
        return episodes


def _merged(acting: Sequence[_Share]) -> Tensor:
    """The actions of all rows, [n, K, *action shape]."""
    chosen = [share.actions for share in acting if share.actions is not None]
    merged = chosen[0]
    for share, actions in zip(acting[1:], chosen[1:], strict=True):
        merged = merged.clone()
        merged[list(share.rows)] = actions[list(share.rows)]
    return merged
