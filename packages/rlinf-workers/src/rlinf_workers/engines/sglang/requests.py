"""Converts prompts and sampling settings to SGLang's requests, and its outputs to completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rlinf_workers.engines.base import Completions
from rlinf_workers.engines.sampling import SamplingSettings

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
    policy_version: int


def request_parameters(
    sampling: SamplingSettings, stop_token_ids: Sequence[int], *, seed: int, step: int, index: int
) -> list[dict[str, Any]]:
    """The sampling parameters of each completion of a prompt.

    `sampling_seed` only matters with enable_deterministic_inference; otherwise SGLang's processes sample from one
    generator each, and numbers depend on the batch.
    """
    common: dict[str, Any] = {
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "stop_token_ids": list(stop_token_ids),
        "skip_special_tokens": False,
    }
    return [
        {**common, "sampling_seed": sampling_seed(seed, step, index, member)} for member in range(sampling.group_size)
    ]


def sampling_seed(seed: int, step: int, index: int, member: int) -> int:
    """[0, 2**63): the seed of a completion, independent of its place and batch."""
    return int(np.random.SeedSequence([seed, step, index, member]).generate_state(1, np.uint64)[0] >> np.uint64(1))


def answer_of(
    output: Mapping[str, Any], stop_token_ids: Sequence[int], *, index: int, member: int, policy_version: int
) -> Completion:
    """Converts SGLang's output for one request.

    SGLang returns the log-probability of a sampled token in the distribution at the request's temperature, before
    top_p, top_k and min_p, and at temperature 1 for greedy sampling.

    Raises: ValueError for an unexpected finish reason.
    """
    token_ids, about = output["output_ids"], output["meta_info"]
    reason = about["finish_reason"]
    is_end = reason["type"] == "stop" and (reason["matched"] in stop_token_ids or reason["matched"] is STOP_STRING)
    if not is_end and reason["type"] != "length":
        raise ValueError(f"prompt {index}, completion {member}: SGLang ended it with {reason}, tokens {token_ids[-3:]}")
    logprobs = [logprob for logprob, _, _ in about["output_token_logprobs"]]
    return Completion(
        index=index,
        member=member,
        token_ids=token_ids,
        logprobs=logprobs,
        truncated=not is_end,
        policy_version=policy_version,
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
        policy_version=answers[0].policy_version,
    )


def cut_at(output: Mapping[str, Any], length: int) -> dict[str, Any]:
    """Truncates an output to its first tokens, with a stop string as finish reason."""
    about = output["meta_info"]
    return {
        "output_ids": output["output_ids"][:length],
        "meta_info": {
            "finish_reason": {"type": "stop", "matched": STOP_STRING},
            "output_token_logprobs": about["output_token_logprobs"][:length],
        },
    }
