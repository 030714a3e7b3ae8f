"""Converts prompts and sampling settings to SGLang's requests, and its outputs to completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlinf_workers.engines.base import Completions, UnfinishedCompletion
from rlinf_workers.engines.sampling import SamplingSettings
from rlinf_workers.engines.segments import Segments, extended

NO_VERSION = "default"
STOP_STRING = "a stop string"
"""The finish reason of a stop string; SGLang itself does not look for them."""


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


def request_parameters(
    request: UnfinishedCompletion, sampling: SamplingSettings, stop_token_ids: Sequence[int]
) -> dict[str, Any]:
    """The sampling parameters of the rest of a completion.

    `sampling_seed` only matters with enable_deterministic_inference; otherwise SGLang's processes sample from one
    generator each, and numbers depend on the batch.
    """
    key = request.noise
    return {
        "max_new_tokens": sampling.max_new_tokens - len(request.token_ids),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "stop_token_ids": list(stop_token_ids),
        "skip_special_tokens": False,
        "sampling_seed": sampling_seed(key.seed, key.step, key.index, request.member),
    }


def sampling_seed(seed: int, step: int, index: int, member: int) -> int:
    """[0, 2**63): the seed of a completion, independent of its place and batch."""
    return int(np.random.SeedSequence([seed, step, index, member]).generate_state(1, np.uint64)[0] >> np.uint64(1))


def answer_of(
    output: Mapping[str, Any],
    request: UnfinishedCompletion,
    stop_token_ids: Sequence[int],
    *,
    max_new_tokens: int,
    policy_version: int,
    is_suspended: bool = False,
) -> Completion | UnfinishedCompletion:
    """Converts SGLang's output for the rest of a completion, and joins it with the tokens before.

    SGLang returns the log-probability of a sampled token in the distribution at the request's temperature, before
    top_p, top_k and min_p, and at temperature 1 for greedy sampling.

    Args:
        policy_version: samples the tokens if the output does not list versions.
        is_suspended: whether SGLang may have been told to abort the request; it then returns an unfinished completion,
            unless the completion ended with its last token.

    Raises: ValueError for an unexpected finish reason.
    """
    new_ids, about = output["output_ids"], output["meta_info"]
    reason, token_ids = about["finish_reason"], [*request.token_ids.tolist(), *new_ids]
    logprobs = request.logprobs.tolist()
    logprobs += [logprob for logprob, _, _ in about.get("output_token_logprobs", ())]
    segments = request.segments
    for end, version in _versions(about, len(new_ids), policy_version):
        segments = extended(segments, len(request.token_ids) + end, version)
    is_end = reason["type"] == "stop" and (reason["matched"] in stop_token_ids or reason["matched"] is STOP_STRING)
    is_truncated = reason["type"] == "length"
    if is_suspended and reason["type"] == "abort":
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
        raise ValueError(
            f"prompt {request.prompt.index}, completion {request.member}: SGLang ended it with {reason}, tokens "
            f"{new_ids[-3:]}"
        )
    return Completion(
        index=request.prompt.index,
        member=request.member,
        token_ids=token_ids,
        logprobs=logprobs,
        truncated=not is_end,
        segments=segments,
    )


def _versions(about: Mapping[str, Any], num_tokens: int, policy_version: int) -> list[tuple[int, int]]:
    """(end, version) of each part of an output that one version sampled. SGLang names versions by strings; the one
    before any that it was told is `default`."""
    spans = about.get("weight_versions") or [{"version": str(policy_version), "end": num_tokens}]
    return [
        (min(span["end"], num_tokens), -1 if span["version"] == NO_VERSION else int(span["version"])) for span in spans
    ]


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


def cut_at(output: Mapping[str, Any], length: int) -> dict[str, Any]:
    """Truncates an output to its first tokens, with a stop string as finish reason."""
    about = output["meta_info"]
    return {
        "output_ids": output["output_ids"][:length],
        "meta_info": {
            "finish_reason": {"type": "stop", "matched": STOP_STRING},
            "output_token_logprobs": about["output_token_logprobs"][:length],
            "weight_versions": about.get("weight_versions"),
        },
    }
