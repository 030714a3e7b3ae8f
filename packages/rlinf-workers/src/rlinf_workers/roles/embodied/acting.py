"""ActingWorker: the common base of rollouts, whose policy maps observations to actions. They differ in what they record
for training."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Mapping
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from rlinf_workers.execution.ports import Reader, Writer
from rlinf_workers.policies.base import Policy, PolicySettings, make_policy
from rlinf_workers.roles.records.embodied import Action, GroupObservation, LabelledSegment, Trajectory, Transitions
from rlinf_workers.serving import ServedModule, ServingWorker

Segment = TypeVar("Segment", Trajectory, Transitions, LabelledSegment)


class ActingWorker(ServingWorker, Generic[Segment]):
    """Serves a policy. A group is always served by the same rank.

    Args:
        num_groups: environment groups, which end at different times if a step is whole episodes; 0: they end together.
    """

    def __init__(self, settings: PolicySettings, num_groups: int = 0) -> None:
        self._num_groups = num_groups
        self._policy: Policy = make_policy(settings, self.device)
        self._served = ServedModule(self._policy, self.device)

    def act(
        self, observations: Reader[GroupObservation], actions: Writer[Action], trajectories: Writer[Segment]
    ) -> None:
        """Stage: receives observations; sends actions at once, and the records of training segments and episodes when
        they are complete. If it is ahead, the actor may not read its records before the step before is complete, which
        waits for actions of this one; so they wait here for room in the channel."""
        num_running = len(range(self.identity.replica, self._num_groups, self.identity.num_replicas))
        records: deque[Segment] = deque()
        self.begin_acting()
        while chunk := observations.next_chunk(at_most=1 if self.is_ahead else num_running):
            actions_of_chunk: list[tuple[int, Action]] = []
            for observation in chunk:
                action, complete = self.act_on(observation)
                if action is not None:
                    actions_of_chunk.append((action.group, action))
                elif observation.episodes is not None:
                    num_running -= 1
                records.extend(complete)
                _put(records, trajectories, waits=not self.is_ahead)
            actions.put_many(actions_of_chunk)
            if self.is_ahead and not num_running:  # env goes on with the next step before it closes the channel
                break
        _put(records, trajectories, waits=True)
        self.end_acting()

    def begin_acting(self) -> None:
        """Called when the stage begins, with the weights of its run if it is ahead."""

    def end_acting(self) -> None:
        """Called when the stage ends."""

    @abstractmethod
    def act_on(self, observation: GroupObservation) -> tuple[Action | None, list[Segment]]:
        """Returns the actions to execute (None at the end of a segment, or of a group's episodes) and the records of
        the training segment or the episodes that have just ended."""

    def _here(self, fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: value.to(self.device) for name, value in fields.items()}

    def _generator(self, observation: GroupObservation) -> np.random.Generator:
        """The random numbers of an answer: they depend on seed, step, group and time alone."""
        return self.step.generator(observation.group, observation.time)

    def _check_version(self, observation: GroupObservation, began_with: int) -> None:
        """Asserts that one version of the policy acts in a whole segment."""
        assert began_with == self._version, (
            f"environment group {observation.group} began its segment with policy version {began_with}, and at time "
            f"{observation.time} version {self._version} acts"
        )

    def _noise(self, observation: GroupObservation, num_rows: int) -> Tensor:
        values = self._generator(observation).standard_normal((num_rows, self._policy.noise_size))
        return torch.from_numpy(values).float().to(self.device)


def _put(records: deque[Segment], trajectories: Writer[Segment], *, waits: bool) -> None:
    """Puts records, as far as there is room unless it `waits` for more, and removes them from the queue."""
    while records:
        if waits:
            trajectories.put(records[0], key=records[0].group)
        elif not trajectories.offer(records[0], key=records[0].group):
            return
        records.popleft()
