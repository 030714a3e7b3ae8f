"""Late groups: those that outlive their training step. A step ends when enough groups are whole, and the others go on
in the next one with its weights.

In every step as many groups leave a rank as prompts come in. The rank has further groups under way, with which the
run begins. Groups leave in the order in which they become whole, but at most `max_lateness` steps after they were
submitted: places are kept free for those that would be too late otherwise.

Example: max_lateness 1; prompts 0 and 1 come in, and group L, which is slow, came in a step earlier. Group 1 becomes
whole and leaves as 0. Group 0 becomes whole, but the last place is kept for L, which leaves as 1. Group 0 leaves in the
next step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from rlinf_comm import record
from rlinf_workers.engines.base import Completions, UnfinishedCompletion, not_begun
from rlinf_workers.engines.sampling import NoiseKey
from rlinf_workers.roles.records.language import Prompt
from rlinf_workers.roles.records.pictures import ProcessedPicture
from rlinf_workers.worker import StepContext


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class LateGroup:
    """A group that goes on in the next step."""

    prompt: Prompt
    step: int
    """In which its prompt was submitted."""
    submitted_index: int
    """With which it was submitted."""
    finished: tuple[Completions, ...]
    """Completions that have ended."""
    unfinished: tuple[UnfinishedCompletion, ...]
    """Those that go on."""
    episodes: bytes = b""
    """Of an agent, in place of completions (`agents.turn_log.pack_episodes`); empty: none has begun."""
    pictures: tuple[ProcessedPicture, ...] = ()
    """Those of the episodes beside the prompt's."""

    def numbered(self, index: int) -> LateGroup:
        """The same group as prompt `index` of a step."""
        prompt = replace(self.prompt, index=index)
        return replace(
            self,
            prompt=prompt,
            finished=tuple(replace(one, index=index) for one in self.finished),
            unfinished=tuple(replace(one, prompt=prompt) for one in self.unfinished),
        )


def late_from_start(prompt: Prompt, step: StepContext, group_size: int) -> LateGroup:
    """A group that no engine has begun yet, submitted in this step."""
    noise = NoiseKey(seed=step.seed, step=step.step, index=prompt.index)
    return LateGroup(
        prompt=prompt,
        step=step.step,
        submitted_index=prompt.index,
        finished=(),
        unfinished=not_begun(prompt, group_size, noise),
    )


class Departures:
    """Which groups leave in a step, and as which prompts of the step.

    Args:
        keys: indices of the prompts that come in, which those that leave take over. As many come in every step.
        steps_left: index of each group that is under way -> steps by which it may still be late; 0: it has to leave in
            this one.
    """

    def __init__(self, keys: Sequence[int], steps_left: Mapping[int, int]) -> None:
        self._keys = sorted(keys)
        self._num_each_step = len(self._keys)
        self._steps_left = dict(steps_left)
        self._held: list[int] = []
        """Whole groups without a place, in the order in which they became whole."""

    @property
    def all_left(self) -> bool:
        """Whether as many groups have left as prompts came in."""
        return not self._keys

    def add(self, whole: Iterable[int]) -> list[tuple[int, int]]:
        """Takes note of groups that have become whole. Returns those that leave, each with the index that it takes
        over."""
        self._held += sorted(whole)
        leaving: list[tuple[int, int]] = []
        for index in list(self._held):
            if self._keys and self._are_in_time_without(index):
                self._held.remove(index)
                del self._steps_left[index]
                leaving.append((index, self._keys.pop(0)))
        return leaving

    def _are_in_time_without(self, index: int) -> bool:
        """Whether all others can still leave in time if this one leaves next: by each deadline there are places for all
        that are due by then."""
        deadlines = sorted(left for other, left in self._steps_left.items() if other != index)
        num_places = len(self._keys) - 1
        return all(number <= num_places + self._num_each_step * left for number, left in enumerate(deadlines, start=1))
