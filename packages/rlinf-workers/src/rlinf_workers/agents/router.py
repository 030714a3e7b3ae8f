"""The router: runs the episodes of several rollout ranks, and gives each turn to one of their engines.

    harness, tools, loop  <->  sessions (host.py)  <->  Router  <->  rollout/0, rollout/1, rollout/2: an engine each

A rank joins once its engine holds the weights of a stage, begins the episodes of its prompts, and samples turns of any
episode until those of all ranks are over. Then it takes other weights. Which engine samples a turn decides no number:
the noise of a turn follows from the tokens before it (noise.py).

Histories refer to pictures (pictures.py). A rank that samples a turn needs the pixels of those that it follows: the
router keeps what tools and requests add to episodes, asks an episode's rank for those of its task when another engine
samples, and sends each of them to an engine once in a stage.

Episodes live here and not in the ranks. If a rank is lost, or a stage is given up for another reason, turns under way
wait; when the stage is made again with the same weights, ranks that begin an episode find it where it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from rlinf_workers.agents.link import (
    Abandoned,
    Answer,
    Ask,
    Begin,
    Engine,
    EpisodeReport,
    FromAgents,
    JoinStage,
    NewPicture,
    PictureRequest,
    StageBroken,
    StageOver,
    Waiting,
)
from rlinf_workers.agents.pictures import RecentPictures, reference_of

KEPT_SHARE, KEPT_TURNS = 1.5, 4
"""An episode stays at its engine, which has computed the conversation before, up to this many times the turns of the
least loaded engine and so many more. A batch with four more rows takes about as long."""


class Episodes(Protocol):
    """What runs the episodes: `AgentHost`."""

    def begin(self, message: Begin) -> None: ...
    def answer(self, message: Answer) -> None: ...
    async def abandon(self) -> None: ...


@dataclass(eq=False)
class RankLink:
    """A rollout rank, and its engine.

    Args:
        send: puts a message on the connection to it.
    """

    name: str
    send: Callable[[FromAgents], None]
    stage: str = ""
    """In which it samples turns; empty: in none."""
    turns: dict[int, Ask] = field(default_factory=dict)
    """Those that it samples, by request."""
    pictures: RecentPictures[None] = field(default_factory=RecentPictures[None])
    """Those that it has from the router."""


@dataclass(eq=False)
class _Episode:
    owner: RankLink | None
    """The rank that began it; None: it was lost or has left."""
    number: int
    """Of the episode in that rank."""
    pictures: dict[int, str]
    """Digests of all its pictures, by reference."""
    engine: RankLink | None = None
    """That of its latest turn."""
    added: list[str] = field(default_factory=list)
    """Digests of those that its task does not have."""
    report: EpisodeReport | None = None
    """None: it is not over."""


class Router:
    """The episodes and engines of one stage at a time. Has no lock: all calls come from one event loop."""

    def __init__(self) -> None:
        self.episodes: Episodes
        self._stage, self._num_ranks = "", 0
        self._ranks: list[RankLink] = []
        self._by_task: dict[tuple[str, int], int] = {}
        """Task and noise of an episode -> its number here."""
        self._by_number: dict[int, _Episode] = {}
        self._num_begun = 0
        self._waiting: dict[int, Ask] = {}
        """Turns for which no engine is there, or no pixels, by request."""
        self._were_begun: set[int] = set()
        """Of these, requests that an engine had begun before it was lost or left."""
        self._ready: set[RankLink] = set()
        """Ranks that begin no further episodes."""
        self._pictures: dict[str, NewPicture] = {}
        """Those with pixels, by digest."""
        self._requested: set[str] = set()
        """Digests of those that an episode's rank will send."""

    # -- messages of ranks -----------------------------------------------------------------------------------------

    async def join(self, rank: RankLink, message: JoinStage) -> None:
        """A rank samples turns of a stage. Episodes of another stage are cancelled: other weights have sampled them."""
        if message.stage != self._stage:
            self._forget()
            self._stage = message.stage
            await self.episodes.abandon()
        for other in [one for one in self._ranks if one.name == rank.name and one is not rank]:
            self._take_back(other)  # replaced before its connection ended, as with a machine that is gone
        self._num_ranks = message.num_ranks
        rank.stage = message.stage
        rank.pictures.clear()
        if rank not in self._ranks:
            self._ranks.append(rank)
        self._route_waiting()

    def begin(self, rank: RankLink, message: Begin) -> None:
        """A rank begins an episode, or is its owner from now on if it has begun before."""
        task = message.task.name, message.noise
        number = self._by_task.get(task)
        if number is None:
            self._num_begun += 1
            number = self._by_task[task] = self._num_begun
            pictures = {reference_of(one.digest): one.digest for one in message.task.pictures}
            self._by_number[number] = _Episode(owner=rank, number=message.episode, pictures=pictures)
            return self.episodes.begin(msgspec.structs.replace(message, episode=number))
        episode = self._by_number[number]
        episode.owner, episode.number = rank, message.episode
        for digest in episode.added:
            self._send_picture(rank, digest, episode.number)
        if episode.report is not None:
            rank.send(msgspec.structs.replace(episode.report, episode=episode.number))
        self._route_waiting()

    def no_more(self, rank: RankLink) -> None:
        """A rank begins no further episodes."""
        self._ready.add(rank)
        self._end_if_over()

    def answer(self, rank: RankLink, message: Answer) -> None:
        """An engine has sampled a turn."""
        if rank.turns.pop(message.request, None) is not None:
            self.episodes.answer(message)

    def take_picture(self, message: NewPicture) -> None:
        """A rank has sent a picture of its prompts."""
        self._pictures[message.digest] = message
        self._requested.discard(message.digest)
        self._route_waiting()

    def leave(self, rank: RankLink, number: int) -> None:
        """A rank has given its stage up."""
        self._break_stage(rank, f"{rank.name} has left the stage")
        rank.send(Abandoned(number=number))

    def lost(self, rank: RankLink) -> None:
        """The connection to a rank has ended."""
        self._break_stage(rank, f"{rank.name} was lost")

    def _break_stage(self, rank: RankLink, text: str) -> None:
        """The stage ends for all its ranks, if this is one of them."""
        if rank not in self._ranks:
            return
        self._take_back(rank)
        self._ready.clear()
        for other in self._ranks:
            other.send(StageBroken(text=text))

    def _take_back(self, rank: RankLink) -> None:
        """Its turns wait for another engine, and its episodes for another owner."""
        self._ranks.remove(rank)
        self._ready.discard(rank)
        rank.stage = ""
        for episode in self._by_number.values():
            if episode.owner is rank:
                episode.owner = None
        self._waiting |= rank.turns
        self._were_begun |= rank.turns.keys()
        rank.turns = {}
        self._requested.clear()

    # -- messages of episodes --------------------------------------------------------------------------------------

    def heard(self, message: FromAgents) -> None:
        """An episode asks for a turn or is over, or the one that waits for longest is another."""
        if isinstance(message, Ask) and message.episode in self._by_number:
            self._route(message)
        elif isinstance(message, NewPicture) and (episode := self._by_number.get(message.episode)) is not None:
            self._add_picture(episode, message)
        elif isinstance(message, EpisodeReport) and (episode := self._by_number.get(message.episode)) is not None:
            episode.report = message
            if episode.owner is not None:
                episode.owner.send(msgspec.structs.replace(message, episode=episode.number))
            self._end_if_over()
        elif isinstance(message, Waiting):
            for rank in self._ranks:
                rank.send(message)

    def _route_waiting(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for ask in waiting.values():
            self._route(ask)

    def _route(self, ask: Ask) -> None:
        """Gives a turn to an engine, or has it wait for one, or for pixels."""
        episode = self._by_number[ask.episode]
        if episode.report is not None:  # nobody waits for the turn, and its pictures may be gone
            return
        engine = self._choose(episode)
        if engine is None or not self._pass_pictures(episode, ask, engine):
            self._waiting[ask.request] = ask
            return
        chosen: Engine = "" if episode.engine is None else "kept" if engine is episode.engine else "moved"
        if ask.request in self._were_begun:
            self._were_begun.remove(ask.request)
            chosen = "lost"
        episode.engine = engine
        engine.turns[ask.request] = ask
        engine.send(msgspec.structs.replace(ask, episode=0, engine=chosen))

    def _pass_pictures(self, episode: _Episode, ask: Ask, engine: RankLink) -> bool:
        """Sends an engine the pictures that a turn follows. Returns whether all are there; an episode's own rank has
        them, and is asked for those of its task."""
        if engine is episode.owner or not episode.pictures:
            return True
        digests = dict.fromkeys(episode.pictures[token] for token in ask.token_ids if token in episode.pictures)
        missing = [digest for digest in digests if digest not in self._pictures]
        for digest in missing:
            if episode.owner is not None and digest not in self._requested:
                self._requested.add(digest)
                episode.owner.send(PictureRequest(digest=digest))
        if missing:
            return False
        for digest in digests:
            self._send_picture(engine, digest, 0)
        return True

    def _add_picture(self, episode: _Episode, message: NewPicture) -> None:
        """A tool or a request has added a picture to an episode."""
        if message.arguments:
            self._pictures[message.digest] = message
        episode.pictures[reference_of(message.digest)] = message.digest
        episode.added.append(message.digest)
        if episode.owner is not None:
            self._send_picture(episode.owner, message.digest, episode.number)

    def _send_picture(self, rank: RankLink, digest: str, episode: int) -> None:
        """Sends a picture for an episode of the rank, or with 0 for the next turn; its pixels if they are not there."""
        picture = self._pictures[digest]
        has_pixels = digest in rank.pictures
        rank.pictures.use(digest, sum(len(one.content) for one in picture.arguments.values()), None)
        nothing = NewPicture(episode=episode, digest=digest)
        rank.send(nothing if has_pixels else msgspec.structs.replace(picture, episode=episode))

    def _choose(self, episode: _Episode) -> RankLink | None:
        """The engine of the episode's latest turn, or at first that of its owner, where its group begins; the least
        loaded one if that has much less to do. None: no engine is in the stage."""
        joined = [rank for rank in self._ranks if rank.stage == self._stage]
        if not joined:
            return None
        least = min(joined, key=lambda rank: len(rank.turns))
        preferred = episode.engine if episode.engine in joined else episode.owner
        if preferred is None or preferred not in joined:
            return least
        return least if len(preferred.turns) > KEPT_SHARE * len(least.turns) + KEPT_TURNS else preferred

    # -- the end of a stage ----------------------------------------------------------------------------------------

    def _end_if_over(self) -> None:
        if len(self._ready) < self._num_ranks or any(one.report is None for one in self._by_number.values()):
            return
        ranks = self._ranks
        self._forget()
        for rank in ranks:
            rank.send(StageOver())

    def _forget(self) -> None:
        """No stage, no episode and no rank."""
        for rank in self._ranks:
            rank.stage, rank.turns = "", {}
        self._stage, self._num_ranks, self._ranks = "", 0, []
        self._by_task, self._by_number = {}, {}
        self._waiting, self._were_begun, self._ready = {}, set(), set()
        self._pictures, self._requested = {}, set()
