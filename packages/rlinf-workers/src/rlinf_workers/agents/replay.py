"""What the agents of a stage said, recorded, and said again: the policy samples anew, everything else is read from the
record.

Decisions of a rank (Worker.decide), in the order in which it has heard them:

    {"said": [step, index, member], "after": decode steps, "ask": noise, "agent", "base", "num_kept", "added"}
    {"said": [step, index, member], "after": decode steps, "script": {...}}
    {"said": [step, index, member], "after": decode steps, "picture": base64 of the file}

Tokens of the policy are in none: a turn names the earlier turn that its history continues (turn_log.py). A picture that
a history has beside those of the task is there before the turn, as its file, which is processed again.
"""

from __future__ import annotations

import base64
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import convert, to_builtins

from rlinf_workers.agents.link import EpisodeReport, NewPicture, Script, Step
from rlinf_workers.agents.records import AgentTrajectory, Sampled, TokenNode, cut
from rlinf_workers.agents.turn_log import EpisodeKey, LoggedTurn, TurnLog


def script_of(trajectory: AgentTrajectory) -> Script:
    """What a replay needs of an episode beside its turns. Tokens that a turn of the policy follows are left out."""
    followed: set[int] = set()
    for index, node in enumerate(trajectory.nodes):
        if node.sampled:
            followed.update(trajectory.path(index)[:-1])
    return Script(
        steps=[
            Step(
                parent=node.parent,
                author=node.author,
                token_ids=[] if node.sampled or index in followed else node.token_ids,
                num_tokens=len(node.token_ids),
                noise=node.sampled.noise if node.sampled else 0,
                truncated=bool(node.sampled and node.sampled.truncated),
                agent=node.agent,
                reward=node.reward,
                state=node.state,
                differs=node.differs,
            )
            for index, node in enumerate(trajectory.nodes)
        ],
        reward=trajectory.reward,
        rewards=trajectory.rewards,
        cause=trajectory.cause,
        detail=trajectory.detail,
    )


def trajectory_of(
    script: Script, sampled: Callable[[int], Sampled], history: Callable[[int], list[int]]
) -> AgentTrajectory:
    """The episode of a script with turns that were sampled anew.

    Args:
        sampled: noise of a turn -> the turn.
        history: noise of a turn -> the tokens that it follows.
    """
    trajectory = AgentTrajectory(
        nodes=[], reward=script.reward, rewards=script.rewards, cause=script.cause, detail=script.detail
    )
    for step in script.steps:
        turn = None
        if step.author == "policy":
            turn = cut(sampled(step.noise), step.num_tokens, truncated=step.truncated)
        trajectory.nodes.append(
            TokenNode(
                parent=step.parent,
                author=step.author,
                token_ids=list(turn.token_ids if turn else step.token_ids),
                sampled=turn,
                agent=step.agent,
                reward=step.reward,
                state=step.state,
                differs=step.differs,
            )
        )
    for index, step in enumerate(script.steps):
        if step.author == "policy":
            _fill_in(trajectory, trajectory.path(index)[:-1], script.steps, history(step.noise))
    return trajectory


def _fill_in(trajectory: AgentTrajectory, path: Sequence[int], steps: Sequence[Step], history: list[int]) -> None:
    """Gives the nodes before a turn the tokens that were left out."""
    begin = 0
    for node in path:
        end = begin + steps[node].num_tokens
        if trajectory.nodes[node].sampled is None:
            trajectory.nodes[node].token_ids[:] = history[begin:end]
        begin = end


def ask_decision(episode: EpisodeKey, turn: LoggedTurn, after: int) -> dict[str, Any]:
    """A turn was asked for, so many decode steps after the stage began."""
    history = {"base": turn.base, "num_kept": turn.num_kept, "added": turn.added}
    return {"said": list(episode), "after": after, "ask": turn.noise, "agent": turn.agent, **history}


def report_decision(episode: EpisodeKey, report: EpisodeReport, after: int) -> dict[str, Any]:
    """An episode ended, so many decode steps after the stage began."""
    return {"said": list(episode), "after": after, "script": to_builtins(script_of(report.trajectory))}


def picture_decision(episode: EpisodeKey, picture: NewPicture, after: int) -> dict[str, Any]:
    """An episode has a picture that its task does not have."""
    return {"said": list(episode), "after": after, "picture": base64.b64encode(picture.file).decode()}


@dataclass(frozen=True, kw_only=True, slots=True)
class SaidAgain:
    """What an episode says: a turn to sample after these tokens, a picture, or its end."""

    episode: EpisodeKey
    noise: int = 0
    token_ids: Sequence[int] = ()
    agent: str = ""
    """Whose turn it is."""
    trajectory: AgentTrajectory | None = None
    """Of one that has ended."""
    picture: bytes = b""
    """The file of a picture that its histories have from now on."""


class _Said:
    """A decision in the record."""

    __slots__ = ("added", "after", "agent", "base", "noise", "num_kept", "picture", "place", "script")

    def __init__(self, place: int, one: Mapping[str, Any]) -> None:
        self.place, self.after = place, one["after"]
        self.script = convert(one["script"], Script) if "script" in one else None
        self.noise, self.base, self.num_kept = one.get("ask", 0), one.get("base", 0), one.get("num_kept", 0)
        self.added: list[int] = one.get("added", [])
        self.agent: str = one.get("agent", "")
        self.picture = base64.b64decode(one.get("picture", ""))

    def is_ready(self, log: TurnLog) -> bool:
        """Whether the turns that must come first have been sampled."""
        if self.script is None:
            return log.can_continue(self.base, self.num_kept)
        turns = (log.get(step.noise) for step in self.script.steps if step.author == "policy")
        return all(turn is not None and turn.has_ended for turn in turns)


class RecordedAgents:
    """Says what the agents of a recorded stage have said, in the same order.

    Args:
        decisions: of all ranks in the stage.
        is_timed: also at the same decode steps; otherwise as soon as what an episode waits for is there.
    """

    def __init__(self, decisions: Iterable[Mapping[str, Any]], *, is_timed: bool) -> None:
        self._is_timed = is_timed
        self._said: dict[EpisodeKey, deque[_Said]] = {}
        for place, one in enumerate(decisions):
            if "said" in one:
                step, index, member = one["said"]
                message = _Said(place, one)
                message.after = message.after if is_timed else 0
                self._said.setdefault((step, index, member), deque()).append(message)

    def take(
        self,
        logs: Mapping[EpisodeKey, TurnLog],
        num_steps: int | None,
        waiting: Callable[[], Iterable[EpisodeKey]] = tuple,
    ) -> Iterator[SaidAgain]:
        """What is said now, one after the other; each may depend on those before.

        Args:
            logs: the open episodes.
            num_steps: decode steps since the stage began; None: the engine has nothing to do until something is said.
            waiting: returns episodes that begin next. With times, one that has something to say by now begins before
                anything else is said: a stage that ended before would never hear it.
        """
        if num_steps is None:
            num_steps = min((message.after for message, _, _ in self._heads(logs)), default=0)
        while due := [head for head in self._heads(logs) if head[0].after <= num_steps and head[0].is_ready(head[2])]:
            message, episode, log = min(due, key=lambda head: head[0].place)
            begins = (first[0] for key in waiting() if self._is_timed and (first := self._said.get(key)))
            if any(one.after <= num_steps for one in begins):
                return
            self._said[episode].popleft()
            yield _again(message, episode, log)

    def next_step(self, logs: Mapping[EpisodeKey, TurnLog], num_steps: int) -> int | None:
        """The next decode step at which one of the open episodes says something, which may be the present one; None:
        there is none."""
        steps = (
            max(message.after, num_steps)
            for message, _, log in self._heads(logs)
            if message.after > num_steps or message.is_ready(log)
        )
        return min(steps, default=None)

    def _heads(self, logs: Mapping[EpisodeKey, TurnLog]) -> Iterator[tuple[_Said, EpisodeKey, TurnLog]]:
        """What each open episode says next."""
        return ((message[0], episode, log) for episode, log in logs.items() if (message := self._said.get(episode)))


def _again(message: _Said, episode: EpisodeKey, log: TurnLog) -> SaidAgain:
    if message.picture:
        return SaidAgain(episode=episode, picture=message.picture)
    if message.script is None:
        before = log.through(message.base)[: message.num_kept] if message.base else []
        return SaidAgain(episode=episode, noise=message.noise, token_ids=[*before, *message.added], agent=message.agent)
    sampled = {turn.noise: turn.sampled for turn in log.turns if turn.sampled is not None}
    return SaidAgain(episode=episode, trajectory=trajectory_of(message.script, sampled.__getitem__, log.history))
