"""Completions of engines in front of a server, one request each, and the records that they become."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlinf_workers.engines.base import Completions
from rlinf_workers.engines.segments import Segments


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """One finished completion."""

    index: int
    member: int
    token_ids: list[int]
    logprobs: list[float]
    truncated: bool
    segments: Segments
    prompt_experts: Tensor | None = None
    """[L, layers, k]; None: not recorded."""
    experts: Tensor | None = None
    """[tokens - 1, layers, k]"""

    @property
    def policy_version(self) -> int:
        """Of the first token."""
        return self.segments[0].policy_version


def sampling_seed(seed: int, step: int, index: int, member: int, *more: int) -> int:
    """[0, 2**63): the seed of a completion, independent of its place and batch; `more` numbers give other seeds."""
    (number,) = np.random.SeedSequence([seed, step, index, member, *more]).generate_state(1, np.uint64)
    return int(number >> np.uint64(1))


def completions_of(answers: Sequence[Completion]) -> list[Completions]:
    """Joins completions of one prompt and version into one record."""
    groups: dict[tuple[int, int], list[Completion]] = {}
    for answer in answers:
        groups.setdefault((answer.index, answer.policy_version), []).append(answer)
    return [_join(group) for group in groups.values()]


def _join(answers: Sequence[Completion]) -> Completions:
    width = max(len(answer.token_ids) for answer in answers)
    token_ids = torch.zeros(len(answers), width, dtype=torch.int64)
    logprobs, loss_mask = torch.zeros(len(answers), width), torch.zeros(len(answers), width)
    for row, answer in enumerate(answers):
        length = len(answer.token_ids)
        token_ids[row, :length] = torch.tensor(answer.token_ids)
        logprobs[row, :length] = torch.tensor(answer.logprobs, dtype=torch.float32)
        loss_mask[row, :length] = 1.0
    return Completions(
        index=answers[0].index,
        members=tuple(answer.member for answer in answers),
        token_ids=token_ids,
        loss_mask=loss_mask,
        logprobs=logprobs,
        truncated=torch.tensor([answer.truncated for answer in answers]),
        prompt_experts=answers[0].prompt_experts,
        experts=_padded([answer.experts for answer in answers if answer.experts is not None]),
        policy_version=answers[0].policy_version,
        segments=tuple(answer.segments for answer in answers) if any(len(one.segments) > 1 for one in answers) else (),
    )


def _padded(experts: Sequence[Tensor]) -> Tensor | None:
    """[N, E, layers, k], zeros after the end of a row; None if nothing was recorded."""
    return pad_sequence(list(experts), batch_first=True) if experts else None
