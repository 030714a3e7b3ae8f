"""A group of environments that simulates segments: all of its rows act for the same number of chunks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rlinf_envs import BatchedEnv, EpisodeEnd, Observation, StepResult, has_expert
from rlinf_workers.roles.embodied.expert_queries import GroupQueries
from rlinf_workers.roles.embodied.native_actions import native_actions, policy_actions
from rlinf_workers.roles.records.embodied import Action, ExpertAnswer, GroupObservation


@dataclass
class SegmentGroup:
    """One group within the segments of a run of the flow.

    Args:
        read: the fields of an observation that the policy reads.
        report: is told each episode that ends and counts, and whether the time limit came first.
        segments: reset seeds of the remaining segments; one with fewer seeds than rows counts only the first rows.
        num_chunks: chunks of a segment.
        chunk_size: actions per chunk (K).
        filler_seed: resets the rows that do not count.
        fields: what the group shows already, with which its first segment begins; None: it begins with a reset.
        queries: what an expert is asked in the segment; None: nothing.
        is_evaluated: count only the first episode of each row, the one that its seed defines.
    """

    index: int
    env: BatchedEnv
    read: Callable[[Observation], dict[str, Tensor]]
    report: Callable[[EpisodeEnd, bool], None]
    segments: list[list[int]]
    num_chunks: int
    chunk_size: int
    filler_seed: int
    fields: dict[str, Tensor] | None = None
    queries: GroupQueries | None = None
    is_evaluated: bool = False
    _time: int = 0
    """Executed chunks of the current segment."""
    _counted: int = 0
    """Rows of the current segment that count."""

    @property
    def ends_segment(self) -> bool:
        """Whether the current segment is over."""
        return self._time == self.num_chunks

    def begin(self) -> GroupObservation:
        """Begins the next segment; returns its first observation."""
        seeds, width = self.segments.pop(0), self.env.num_envs
        self._counted, self._time = len(seeds), 0
        fields, self.fields = self.fields, None
        if fields is None:
            fields = self.read(self.env.reset(seeds + [self.filler_seed] * (width - len(seeds))))
        zeros = torch.zeros(width, dtype=torch.int64)
        return GroupObservation(
            group=self.index,
            time=0,
            fields=fields,
            final_fields=None,
            rewards=torch.zeros(width, self.chunk_size),
            num_executed=zeros,
            terminated=zeros.bool(),
            truncated=zeros.bool(),
            is_last=False,
            expert=self._ask(),
        )

    def act(self, action: Action) -> GroupObservation:
        """Executes one chunk of actions; returns the observation after it."""
        result: StepResult = self.env.step_chunk(native_actions(action.actions, self.env.action_spec))
        self._time += 1
        for end in result.episodes:
            if end.env_index < self._counted and not (self.is_evaluated and end.episode_index):
                self.report(end, bool(result.truncated[end.env_index]))
        return GroupObservation(
            group=self.index,
            time=self._time,
            fields=self.read(result.observation),
            final_fields=self.read(result.final_observation) if result.episodes else None,
            rewards=result.rewards,
            num_executed=result.num_steps,
            terminated=result.terminated,
            truncated=result.truncated,
            is_last=self.ends_segment,
            expert=None if self.ends_segment else self._ask(),
        )

    def _ask(self) -> ExpertAnswer | None:
        """The answers of the expert to the present observation."""
        if self.queries is None or not (rows := self.queries.labels[self._time].nonzero()[:, 0]).numel():
            return None
        assert has_expert(self.env), "the job accepts only environments with an expert, if it is asked"
        actions = self.env.expert_actions(rows.tolist(), self.chunk_size)
        return ExpertAnswer(
            rows=rows,
            actions=policy_actions(actions, self.env.action_spec),
            acts=self.queries.acts[self._time][rows],
        )
