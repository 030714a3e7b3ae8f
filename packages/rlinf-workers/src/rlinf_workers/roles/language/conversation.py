"""A row of an episode as texts, each with who wrote it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlinf_workers.roles.records.language import SampleGroup


def conversation(
    samples: SampleGroup, row: int, tokenizers: Mapping[str, Any], begin: int = 0
) -> list[dict[str, str | int]]:
    """The segments of a row of episodes from its token `begin` on: text, author, number of tokens, and the agent and
    the version of the policy where there is one.

    Args:
        tokenizers: of agents by name; `""` for those that are not named.
    """
    segments: list[dict[str, str | int]] = []
    ids, place = samples.completion_ids[row].tolist(), 0
    speaker = next((one.agent for one in samples.segments[row] if one.agent), "")
    tokenizer = tokenizers.get(speaker, tokenizers[""])
    for one in samples.segments[row]:
        first, place = max(place, begin), place + one.num_tokens
        if first < place:
            text = tokenizer.decode(ids[first:place], skip_special_tokens=False)
            segments.append({"author": one.author, "text": text, "num_tokens": place - first})
            if one.agent:
                segments[-1]["agent"] = one.agent
            if one.author == "policy" and one.policy_version >= 0:
                segments[-1]["version"] = one.policy_version
    return segments
