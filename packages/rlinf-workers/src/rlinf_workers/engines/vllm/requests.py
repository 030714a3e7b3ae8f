"""Converts prompts and sampling settings to vLLM's requests, and its outputs to completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from rlinf_workers.engines.base import UnfinishedCompletion
from rlinf_workers.engines.completions import Completion, sampling_seed
from rlinf_workers.engines.sampling import SamplingSettings
from rlinf_workers.engines.segments import extended

NO_VERSION = "default"
"""vLLM's name of the weights before any that it was told."""
STOP_STRING = "a stop string"
"""The stop reason of a stop string; vLLM itself does not look for them."""


def request_parameters(
    request: UnfinishedCompletion, sampling: SamplingSettings, stop_token_ids: Sequence[int]
) -> dict[str, Any]:
    """Arguments of vLLM's `SamplingParams` for the rest of a completion.

    A continued completion gets a seed of its own, since vLLM's generator begins anew with each request.
    """
    key, num_tokens = request.noise, len(request.token_ids)
    return {
        "max_tokens": sampling.max_new_tokens - num_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "stop_token_ids": list(stop_token_ids),
        "ignore_eos": True,  # the ids above are all that end a completion
        "logprobs": 0,  # those of the sampled tokens
        "flat_logprobs": True,
        "detokenize": False,
        "seed": sampling_seed(key.seed, key.step, key.index, request.member, *([num_tokens] if num_tokens else [])),
    }


def answer_of(
    output: Any,
    request: UnfinishedCompletion,
    stop_token_ids: Sequence[int],
    *,
    max_new_tokens: int,
    policy_version: int,
    is_suspended: bool = False,
) -> Completion | UnfinishedCompletion:
    """Converts vLLM's output for the rest of a completion (`CompletionOutput`), and joins it with the tokens before.

    Args:
        policy_version: samples the tokens if the output does not list versions.
        is_suspended: whether vLLM may have been told to abort the request; it then returns an unfinished completion,
            unless the completion ended with its last token.

    Raises: ValueError for an unexpected finish reason.
    """
    new_ids, reason = list(output.token_ids), output.finish_reason
    token_ids = [*request.token_ids.tolist(), *new_ids]
    new_logprobs = [] if output.logprobs is None else list(output.logprobs.logprobs)
    if len(new_logprobs) != len(new_ids):
        raise ValueError(
            f"prompt {request.prompt.index}, completion {request.member}: vLLM returned {len(new_logprobs)} "
            f"log-probabilities of {len(new_ids)} tokens"
        )
    segments = request.segments
    for end, version in _versions(output, policy_version):
        segments = extended(segments, len(request.token_ids) + end, version)
    is_end = reason == "stop" and (output.stop_reason in stop_token_ids or output.stop_reason is STOP_STRING)
    is_truncated = reason == "length"
    logprobs = [*request.logprobs.tolist(), *new_logprobs]
    if is_suspended and reason == "abort":
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
            f"prompt {request.prompt.index}, completion {request.member}: vLLM ended it with {reason} "
            f"({output.stop_reason}), tokens {new_ids[-3:]}"
        )
    return Completion(
        index=request.prompt.index,
        member=request.member,
        token_ids=token_ids,
        logprobs=logprobs,
        truncated=not is_end,
        segments=segments,
    )


def cut_at(output: Any, length: int) -> Any:
    """Truncates an output to its first tokens, with a stop string as stop reason."""
    return replace(
        output,
        token_ids=list(output.token_ids)[:length],
        logprobs=output.logprobs[:length],
        finish_reason="stop",
        stop_reason=STOP_STRING,
    )


def _versions(output: Any, policy_version: int) -> list[tuple[int, int]]:
    """(end, version) of each part of an output that one version sampled."""
    num_tokens, spans = len(output.token_ids), output.weight_versions
    if not spans:
        return [(num_tokens, policy_version)]
    return [(min(span.end, num_tokens), -1 if span.version == NO_VERSION else int(span.version)) for span in spans]
