"""From completions, as an engine finishes them, to whole groups."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from rlinf_workers.errors import WorkersError
from rlinf_workers.generation.base import Completions
from rlinf_workers.models.sequences import fit_width
from rlinf_workers.records.language import Prompt, SampleGroup


class OpenGroups:
    """Groups whose completions have not all come back; its length is their number."""

    def __init__(self, group_size: int) -> None:
        self._group_size = group_size
        self._prompts: dict[int, Prompt] = {}
        self._parts: dict[int, list[Completions]] = {}

    def __len__(self) -> int:
        return len(self._prompts)

    def open(self, prompts: Iterable[Prompt]) -> None:
        """Their completions are on their way."""
        for prompt in prompts:
            self._prompts[prompt.index] = prompt
            self._parts[prompt.index] = []

    def add(self, finished: Iterable[Completions]) -> list[SampleGroup]:
        """The groups that are whole now.

        Raises: WorkersError for completions that nobody waits for.
        """
        whole = []
        for part in finished:
            if part.index not in self._parts:
                raise WorkersError(f"the engine finished completions of prompt {part.index}, which is not under way")
            parts = self._parts[part.index]
            parts.append(part)
            if sum(len(one.members) for one in parts) >= self._group_size:
                whole.append(_group(self._prompts.pop(part.index), self._parts.pop(part.index), self._group_size))
        return whole


def _group(prompt: Prompt, parts: Sequence[Completions], group_size: int) -> SampleGroup:
    members = [member for part in parts for member in part.members]
    if sorted(members) != list(range(group_size)):
        raise WorkersError(f"prompt {prompt.index}: of {group_size} completions the engine finished {sorted(members)}")
    order = None if len(parts) == 1 and members == sorted(members) else torch.tensor(members).argsort()
    width = max(part.token_ids.shape[1] for part in parts)

    def join(name: str) -> Tensor:
        rows: list[Tensor] = [getattr(part, name) for part in parts]
        if order is None:
            return rows[0]
        return torch.cat([fit_width(row, width) if row.dim() > 1 else row for row in rows])[order]

    return SampleGroup(
        index=prompt.index,
        prompt_ids=prompt.token_ids,
        completion_ids=join("token_ids"),
        loss_mask=join("loss_mask"),
        rollout_logprobs=join("logprobs"),
        reference_answer=prompt.reference_answer,
        prompt_text=prompt.text,
        row_json=prompt.row_json,
        policy_version=min(part.policy_version for part in parts),
        truncated=join("truncated"),
    )
