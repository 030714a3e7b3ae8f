"""Which observations of a training step DAgger's expert is asked about, and where it acts in place of the policy.

Both are functions of the seed, the step and the environment group, and the number of questions is one of the step
alone. So they do not depend on the plan, processes agree about what is left of the budget without a message, and a
resumed run asks what it would have asked.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rlinf_algos import DaggerAlgorithm
from rlinf_comm import record

record(DaggerAlgorithm)


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupQueries:
    """The questions of one group in one segment: T answers of each of its n environments."""

    labels: Tensor
    """[T, n] bool: the expert names its actions."""
    acts: Tensor
    """[T, n] bool: they are executed."""


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertQueries:
    """The questions of a run.

    Example: 2 groups of 4 environments, 10 answers a segment, query_rate 0.1: 4 of 40 observations of each group.
    """

    algorithm: DaggerAlgorithm
    num_groups: int
    num_envs: int
    """Environments of a group."""
    num_answers: int
    """Answers in a segment of an environment."""
    chunk_size: int
    """K, the actions of an answer."""

    def of_group(self, seed: int, step: int, group: int) -> GroupQueries:
        """The questions of a training step."""
        shape = self.num_answers, self.num_envs
        generator = np.random.Generator(np.random.Philox(key=[seed, (step << 40) | group]))
        is_driven = np.zeros(shape, bool)
        takeovers = self.algorithm.takeovers(step, self.num_envs, self.num_answers)
        for env, first in zip(generator.permutation(self.num_envs), takeovers, strict=False):
            is_driven[first:, env] = True
        others = generator.permutation(np.flatnonzero(~is_driven))
        in_turn = np.concatenate([np.flatnonzero(is_driven), others])[: self._num_asked(step, group)]
        labels = np.zeros(shape, bool)
        labels.flat[in_turn] = True
        return GroupQueries(labels=torch.from_numpy(labels), acts=torch.from_numpy(labels & is_driven))

    def _num_asked(self, step: int, group: int) -> int:
        """Questions of a group, of which a budget leaves equally many to each, or one more."""
        num_asked = self.algorithm.num_asked(step, self.num_envs, self.num_answers)
        if self.algorithm.max_expert_actions is None:
            return num_asked
        left = self.algorithm.max_expert_actions // self.chunk_size
        for before in range(step):
            left -= self.num_groups * self.algorithm.num_asked(before, self.num_envs, self.num_answers)
            if left <= 0:
                return 0
        return min(num_asked, left // self.num_groups + (group < left % self.num_groups))
