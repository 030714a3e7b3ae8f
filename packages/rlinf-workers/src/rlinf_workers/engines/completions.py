"""Completions of engines in front of a server, one request each, and the records that they become."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlinf_workers.engines.base import Completions, UnfinishedCompletion
from rlinf_workers.engines.segments import Segments, extended

NO_VERSION = "default"
"""The servers' name of the weights before any whose version they were told."""
STOP_STRING = "stop string"
"""The reason of an answer that was truncated after a stop string; the servers do not look for them."""


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


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerAnswer:
    """A server's output for one request, which asks for the rest of a completion; the same for every server."""

    token_ids: list[int]
    """Those that the request sampled."""
    logprobs: list[float]
    """Of the full distribution at the sampling temperature."""
    versions: list[tuple[int, str]]
    """(number of tokens up to its end, version) of each part that one version sampled; empty: the server does not
    report versions."""
    reason: str | None
    """Why the request ended: stop, length, abort, ...; None: it goes on."""
    details: int | str | None = None
    """The token of a stop, or the server's message."""
    experts: str | None = None
    """As the server encodes them."""

    def up_to(self, length: int) -> ServerAnswer:
        """Its first tokens, which end with a stop string."""
        return replace(
            self, token_ids=self.token_ids[:length], logprobs=self.logprobs[:length], reason=STOP_STRING, details=None
        )


def joined(
    request: UnfinishedCompletion,
    answer: ServerAnswer,
    stop_token_ids: Sequence[int],
    *,
    title: str,
    max_new_tokens: int,
    policy_version: int,
    is_suspended: bool = False,
) -> Completion | UnfinishedCompletion:
    """Joins the tokens of a request with those that the completion had before.

    Args:
        title: the server's name.
        policy_version: samples the tokens if the server does not report versions.
        is_suspended: whether the request may have been aborted; the completion is then unfinished, unless it ended
            with its last token.

    Raises: ValueError for a request that ended in any other way, or with tokens without log-probabilities.
    """
    before, new_ids = request.token_ids.tolist(), answer.token_ids
    token_ids, logprobs = [*before, *new_ids], [*request.logprobs.tolist(), *answer.logprobs]
    where = f"prompt {request.prompt.index}, completion {request.member}: {title}"
    if len(answer.logprobs) != len(new_ids):
        raise ValueError(f"{where} returned {len(answer.logprobs)} log-probabilities of {len(new_ids)} tokens")
    segments = request.segments
    for end, version in answer.versions or [(len(new_ids), str(policy_version))]:
        number = -1 if version == NO_VERSION else int(version)
        segments = extended(segments, len(before) + min(end, len(new_ids)), number)
    is_end = answer.reason == STOP_STRING or (answer.reason == "stop" and answer.details in stop_token_ids)
    is_truncated = answer.reason == "length"
    if is_suspended and answer.reason == "abort":
        is_end = bool(new_ids) and new_ids[-1] in stop_token_ids
        is_truncated = len(token_ids) >= max_new_tokens
        if not is_end and not is_truncated:
            return replace(
                request,
                token_ids=torch.tensor(token_ids, dtype=torch.int64),
                logprobs=torch.tensor(logprobs, dtype=torch.float32),
                segments=segments,
            )
    if not is_end and not is_truncated:
        raise ValueError(f"{where} ended it with {answer.reason} ({answer.details}), tokens {new_ids[-3:]}")
    return Completion(
        index=request.prompt.index,
        member=request.member,
        token_ids=token_ids,
        logprobs=logprobs,
        truncated=not is_end,
        segments=segments,
    )


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
