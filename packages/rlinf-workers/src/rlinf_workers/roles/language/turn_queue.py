"""The turns of an engine: those that wait for it, and those that it samples."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import torch

from rlinf_workers.agents.records import Sampled
from rlinf_workers.engines.base import Completions, GenerationEngine, SupportsPause, UnfinishedCompletion
from rlinf_workers.engines.sampling import NoiseKey, SamplingSettings
from rlinf_workers.errors import SettingsRefused
from rlinf_workers.roles.language.history_pictures import read_history
from rlinf_workers.roles.language.open_episodes import PendingTurn
from rlinf_workers.roles.records.language import Prompt, Segment

NO_TOKENS, NO_LOGPROBS = torch.zeros(0, dtype=torch.int64), torch.zeros(0)
EndedTurn = tuple[PendingTurn, Sampled]
"""A turn, and all that was sampled for it."""


class TurnQueue:
    """Gives an engine as many turns as it has capacity for.

    Args:
        name: of the engine, for messages.

    Raises: SettingsRefused if the engine takes no prompts while it generates.
    """

    def __init__(self, engine: GenerationEngine, name: str) -> None:
        if not isinstance(engine, SupportsPause):
            raise SettingsRefused(f"{name} takes no prompts while it generates, which episodes need")
        self.engine, self._pausing = engine, engine
        self._waiting: deque[PendingTurn] = deque()
        self._running: dict[int, PendingTurn] = {}
        """By number."""
        self._num_turns = 0

    @property
    def is_empty(self) -> bool:
        """Whether no turn waits or runs."""
        return not self._waiting and not self._running

    @property
    def is_waiting(self) -> bool:
        """Whether a turn waits."""
        return bool(self._waiting)

    @property
    def is_running(self) -> bool:
        """Whether the engine samples a turn."""
        return bool(self._running)

    def add(self, turn: PendingTurn) -> None:
        """Adds a turn."""
        self._waiting.append(turn)

    def submit(self, sampling: SamplingSettings) -> None:
        """Gives the engine turns.

        Args:
            sampling: of groups of one completion.
        """
        while self._waiting and (num_turns := min(len(self._waiting), self.engine.free_capacity(1))) > 0:
            submitted = []
            for _ in range(num_turns):
                self._num_turns += 1
                self._running[self._num_turns] = turn = self._waiting.popleft()
                submitted.append(_unfinished(self._num_turns, turn))
            self._pausing.submit_unfinished(submitted, sampling)

    def finished(self) -> list[EndedTurn]:
        """The turns that ended; waits for one, or until the engine is interrupted."""
        return self.ended(self.engine.finished())

    def ended(self, completions: Iterable[Completions]) -> list[EndedTurn]:
        """The turns that end with these completions of the engine."""
        pairs = [(self._running.pop(one.index), one) for one in completions]
        return [(turn, _sampled(one, turn.turn.noise)) for turn, one in pairs]

    def suspend(self) -> list[EndedTurn]:
        """Takes back all turns, with what there is of them. Returns those that have ended meanwhile."""
        ended: list[EndedTurn] = []
        if self._running:
            unfinished = self._pausing.suspend()
            ended = self.finished()
            for one in unfinished:
                turn = self._running[one.prompt.index].turn
                turn.sampled = _so_far(one, turn.noise) if len(one.token_ids) else None
        self.clear()
        return ended

    def clear(self) -> None:
        """Forgets all turns; the engine has none."""
        self._waiting.clear()
        self._running.clear()

    def interrupt(self) -> None:
        """Makes `finished` return soon; any thread."""
        self._pausing.interrupt()


def _unfinished(number: int, pending: PendingTurn) -> UnfinishedCompletion:
    """A turn for the engine, with the tokens that it has already, and noise of its own."""
    sampled = pending.turn.sampled
    token_ids, pictures = read_history(pending.token_ids, pending.pictures)
    return UnfinishedCompletion(
        prompt=Prompt(index=number, token_ids=token_ids, reference_answer="", pictures=pictures),
        member=0,
        token_ids=torch.tensor(sampled.token_ids) if sampled else NO_TOKENS,
        logprobs=torch.tensor(sampled.logprobs) if sampled else NO_LOGPROBS,
        segments=tuple(
            Segment(num_tokens=count, policy_version=version)
            for count, version in (sampled.versions if sampled else ())
        ),
        noise=NoiseKey(seed=pending.turn.noise, step=0, index=0),
    )


def _so_far(one: UnfinishedCompletion, noise: int) -> Sampled:
    """What there is of a suspended turn."""
    return Sampled(
        token_ids=one.token_ids.tolist(),
        logprobs=one.logprobs.tolist(),
        versions=[(segment.num_tokens, segment.policy_version) for segment in one.segments],
        noise=noise,
    )


def _sampled(one: Completions, noise: int) -> Sampled:
    num_tokens = int(one.loss_mask.sum())
    segments = one.segments[0] if one.segments else ()
    return Sampled(
        token_ids=one.token_ids.tolist()[0][:num_tokens],
        logprobs=one.logprobs.tolist()[0][:num_tokens],
        versions=[(s.num_tokens, s.policy_version) for s in segments] or [(num_tokens, one.policy_version)],
        truncated=bool(one.truncated),
        noise=noise,
    )
