"""Converts prompts and sampling settings to SGLang's requests, and its outputs to answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlinf_workers.engines.base import UnfinishedCompletion
from rlinf_workers.engines.completions import ServerAnswer, sampling_seed
from rlinf_workers.engines.sampling import SamplingSettings


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


def answer_of(output: Mapping[str, Any]) -> ServerAnswer:
    """Converts SGLang's output for a request.

    SGLang returns the log-probability of a sampled token in the distribution at the request's temperature, before
    top_p, top_k and min_p, and at temperature 1 for greedy sampling.
    """
    about = output["meta_info"]
    reason = about["finish_reason"] or {"type": None}
    return ServerAnswer(
        token_ids=list(output["output_ids"]),
        logprobs=[logprob for logprob, _, _ in about.get("output_token_logprobs") or ()],
        versions=[(span["end"], span["version"]) for span in about.get("weight_versions") or ()],
        reason=reason["type"],
        details=reason.get("matched", reason.get("message")),
        experts=about.get("routed_experts"),
    )
