"""Converts prompts and sampling settings to SGLang's requests, and its outputs to completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from rlinf_workers.engines.base import UnfinishedCompletion
from rlinf_workers.engines.completions import Completion, sampling_seed
from rlinf_workers.engines.sampling import SamplingSettings
from rlinf_workers.engines.segments import extended

NO_VERSION = "default"
STOP_STRING = "a stop string"
"""The finish reason of a stop string; SGLang itself does not look for them."""


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
