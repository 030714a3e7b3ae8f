"""A policy's answers to frames under alternatives, each computed once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlinf.conventions.alternative import Alternative
from rlinf.conventions.frames import ComparedFrames
from rlinf_workers import WeightFilesError
from rlinf_workers.policies import Policy, PolicyError

ROWS_AT_ONCE, ROWS_OF_A_SMALL_MODEL = 16, 160
SMALL_MODEL = 10**8
"""Parameters below which several variants of a policy stay in memory."""
MakePolicy = Callable[[Mapping[str, Any]], Policy]
"""Changed options -> the policy with the same weights. Raises: PolicyError or WeightFilesError if it has no such
variant."""


class Answers:
    """The answers of one policy to frames.

    Only one variant of a large policy is in memory at a time, so callers sort by options.

    Attributes:
        refused: change -> why the policy has no such variant.
    """

    def __init__(self, make: MakePolicy, frames: ComparedFrames) -> None:
        self._make, self.frames = make, frames
        self._answers: dict[tuple[int, ...], Tensor] = {}
        self._policies: dict[str, Policy] = {}
        self.refused: dict[str, str] = {}

    def on(self, frames: ComparedFrames) -> Answers:
        """The answers of the same policy to other frames; the variants in memory are shared."""
        others = Answers(self._make, frames)
        others._policies, others.refused = self._policies, self.refused
        return others

    def as_configured(self) -> Policy:
        """The policy without changes. Raises: PolicyError or WeightFilesError."""
        return self._policy({})

    def of(self, alternatives: Sequence[Alternative]) -> Tensor | None:
        """[F, A]: the first action of every answer, unclipped, as it is under all alternatives; None if the policy has
        no such variant. Options and observations change before the policy answers, actions after it."""
        actions = self._answered([one for one in alternatives if one.needs_forward])
        for one in alternatives:
            if actions is not None and one.convert is not None:
                actions = one.convert(actions, self.frames)
        return actions

    def _answered(self, alternatives: Sequence[Alternative]) -> Tensor | None:
        key = tuple(sorted(map(id, alternatives)))
        names = " and ".join(one.change for one in alternatives)
        if any(one.change in self.refused for one in alternatives):
            return None
        if key not in self._answers and names not in self.refused:
            try:
                fields = self.frames.fields
                for one in alternatives:
                    fields = one.observe(fields) if one.observe is not None else fields
                rest = [one for one in alternatives if one.options]
                if len(rest) < len(alternatives) and _are_same(fields, self.frames.fields):  # texts were in that form
                    return self._answered(rest)
                options = {name: value for one in alternatives for name, value in one.options.items()}
                self._answers[key] = _acted(self._policy(options), fields)
            except (PolicyError, WeightFilesError, KeyError) as error:
                self.refused[names] = str(error)
            except torch.OutOfMemoryError:
                self.refused[names] = "the device has not enough memory for it"
                self._policies.clear()
        return self._answers.get(key)

    def _policy(self, options: dict[str, Any]) -> Policy:
        key = repr(sorted(options.items()))
        if key not in self._policies:
            if any(not _is_small(policy) for policy in self._policies.values()):
                self._policies.clear()  # frees their memory first
            self._policies[key] = self._make(options)
        return self._policies[key]


def _are_same(fields: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> bool:
    return all(value is others[name] or torch.equal(value, others[name]) for name, value in fields.items())


def _is_small(policy: Policy) -> bool:
    return sum(parameter.numel() for parameter in policy.parameters()) < SMALL_MODEL


@torch.no_grad()
def _acted(policy: Policy, fields: Mapping[str, Tensor]) -> Tensor:
    device = next(policy.parameters()).device
    num_frames = len(next(iter(fields.values())))
    actions, size = [], ROWS_OF_A_SMALL_MODEL if _is_small(policy) else ROWS_AT_ONCE
    for first in range(0, num_frames, size):
        rows = {name: values[first : first + size].to(device) for name, values in fields.items()}
        actions.append(policy.act(rows, None).actions[:, 0].float().cpu())
    return torch.cat(actions)
