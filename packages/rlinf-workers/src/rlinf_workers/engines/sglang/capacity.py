"""How many prompts an engine with a KV cache of a given size takes."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlinf_workers.engines.sampling import SamplingSettings
from rlinf_workers.roles.records.language import Prompt

FIRST_GUESS = 0.5
"""Share of max_new_tokens that completions are expected to have before one has ended."""
MEMORY = 0.98
"""Weight of what was known about lengths at each completion that ends: the last hundred or so count."""


@dataclass
class _Open:
    prompt_tokens: int
    sampling: SamplingSettings
    members: set[int]


@dataclass
class Capacity:
    """Counts the tokens that prompts and their completions need in a KV cache.

    A prompt counts once for its group, and each of its completions that has not ended with its expected length: the
    running mean of those that ended under the same settings. An engine that is handed too much on that account makes
    the last ones wait; it loses nothing.
    """

    num_tokens: int
    """What the KV cache holds."""
    max_sequences: int | None
    """Completions under way at most; None: as many as the cache holds."""
    _open: dict[int, _Open] = field(default_factory=dict)
    _lengths: dict[SamplingSettings, float] = field(default_factory=dict)
    _last: _Open | None = None

    @property
    def is_empty(self) -> bool:
        return not self._open

    def begin(self, prompt: Prompt, sampling: SamplingSettings) -> None:
        """A prompt is under way."""
        self._last = _Open(len(prompt.token_ids), sampling, set(range(sampling.group_size)))
        self._open[prompt.index] = self._last

    def end(self, index: int, member: int, num_tokens: int) -> None:
        """One of its completions has ended."""
        one = self._open[index]
        one.members.remove(member)
        if not one.members:
            del self._open[index]
        before = self._lengths.get(one.sampling, float(num_tokens))
        self._lengths[one.sampling] = MEMORY * before + (1 - MEMORY) * num_tokens

    def prompts(self, group_size: int) -> int:
        """How many more of `group_size` completions there is room for, as long as the last prompt was."""
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
