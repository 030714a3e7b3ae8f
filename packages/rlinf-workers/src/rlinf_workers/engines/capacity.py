"""How many prompts an engine with a KV cache of a given size accepts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from rlinf_workers.engines.sampling import SamplingSettings
from rlinf_workers.roles.records.language import Prompt

FIRST_GUESS = 0.5
"""Expected length of completions, as a fraction of max_new_tokens, before one has ended."""
MEMORY = 0.98
"""Decay of the running mean length at each completion that ends: about the last hundred count."""


@dataclass
class _Open:
    prompt_tokens: int
    sampling: SamplingSettings
    members: set[int]


@dataclass
class Capacity:
    """Counts the tokens that prompts and their completions need in a KV cache.

    A prompt counts once for its group, and each of its running completions with its expected length: the running mean
    of completed ones with the same settings. If the estimate is too low, the last requests wait in the engine; nothing
    is lost.
    """

    num_tokens: int
    """Capacity of the KV cache."""
    max_sequences: int | None
    """Maximum number of completions in flight; None: as many as the cache holds."""
    _open: dict[int, _Open] = field(default_factory=dict)
    _lengths: dict[SamplingSettings, float] = field(default_factory=dict)
    _last: _Open | None = None

    @property
    def is_empty(self) -> bool:
        return not self._open

    @property
    def samplings(self) -> set[SamplingSettings]:
        """The settings of the completions in flight."""
        return {one.sampling for one in self._open.values()}

    def begin(self, prompt: Prompt, sampling: SamplingSettings, members: Iterable[int] | None = None) -> None:
        """Counts a submitted prompt with these completions; None: all of its group."""
        own = set(range(sampling.group_size) if members is None else members)
        if prompt.index in self._open:  # others of its group have ended, and not been taken yet
            own |= self._open[prompt.index].members
        self._last = self._open[prompt.index] = _Open(len(prompt.token_ids), sampling, own)

    def end(self, index: int, member: int, num_tokens: int) -> None:
        """Removes one of its completions, which has ended."""
        one = self.drop(index, member)
        before = self._lengths.get(one.sampling, float(num_tokens))
        self._lengths[one.sampling] = MEMORY * before + (1 - MEMORY) * num_tokens

    def drop(self, index: int, member: int) -> _Open:
        """Removes one of its completions, which was suspended. Returns its prompt."""
        one = self._open[index]
        one.members.remove(member)
        if not one.members:
            del self._open[index]
        return one

    def prompts(self, group_size: int) -> int:
        """Free capacity in prompts with this group size, assuming the length of the last prompt."""
        if self._last is None:
            return 1
        need = self._last.prompt_tokens + group_size * self._expected(self._last.sampling)
        taken = sum(one.prompt_tokens + len(one.members) * self._expected(one.sampling) for one in self._open.values())
        room = int((self.num_tokens - taken) / need)
        if self.max_sequences is not None:
            running = sum(len(one.members) for one in self._open.values())
            room = min(room, (self.max_sequences - running) // group_size)
        return max(room, 0 if self._open else 1)

    def _expected(self, sampling: SamplingSettings) -> float:
        return self._lengths.get(sampling, FIRST_GUESS * sampling.max_new_tokens)
