"""Segments: which version of the weights sampled which tokens of a completion."""

from __future__ import annotations

from dataclasses import replace

from rlinf_workers.roles.records.language import Segment

Segments = tuple[Segment, ...]


def extended(segments: Segments, num_tokens: int, policy_version: int) -> Segments:
    """The segments of a completion that has `num_tokens` tokens now, of which `policy_version` sampled those after
    `segments`."""
    num_new = num_tokens - sum(one.num_tokens for one in segments)
    if not num_new:
        return segments
    if segments and segments[-1].policy_version == policy_version:
        return (*segments[:-1], replace(segments[-1], num_tokens=segments[-1].num_tokens + num_new))
    return (*segments, Segment(num_tokens=num_new, policy_version=policy_version))
