"""Converts prompts and sampling settings to vLLM's requests, and its outputs to answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlinf_workers.engines.base import UnfinishedCompletion
from rlinf_workers.engines.completions import ServerAnswer, sampling_seed
from rlinf_workers.engines.sampling import SamplingSettings


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


def answer_of(output: Any) -> ServerAnswer:
    """Converts vLLM's output for a request (`CompletionOutput`)."""
    return ServerAnswer(
        token_ids=list(output.token_ids),
        logprobs=[] if output.logprobs is None else list(output.logprobs.logprobs),
        versions=[(span.end, span.version) for span in output.weight_versions or ()],
        reason=output.finish_reason,
        details=output.stop_reason,
    )
