"""Messages between a rollout rank and the process that runs its episodes, its own or a router: frames of a length (4
bytes, big-endian) and msgpack."""

from __future__ import annotations

import struct
from typing import Any, Literal

import msgspec

from rlinf_workers.agents.pictures import HistoryPicture
from rlinf_workers.agents.records import AgentTrajectory, Author, Cause, Sampled

_LENGTH = struct.Struct(">I")
MAX_BYTES = 1 << 28
"""Of a frame: a trajectory of millions of tokens."""
RECEIVE_BYTES = 1 << 16
"""Taken from the socket at a time."""


class AgentTask(msgspec.Struct, frozen=True, kw_only=True):
    """The task of an episode."""

    index: int
    """Of the prompt in its step or evaluation."""
    member: int
    """Which of the episodes of this prompt it is, from 0."""
    step: int
    phase: str
    messages: list[dict[str, Any]]
    """The conversation so far, as OpenAI's chat interface writes it."""
    text: str
    """The task as text."""
    answer: str
    """The reference answer; may be empty."""
    row: dict[str, Any] = {}
    """All columns of the row that the task comes from."""
    pictures: list[HistoryPicture] = []
    """Those that the messages refer to (`pictures.PICTURE_URL`)."""

    @property
    def name(self) -> str:
        """Unique among the episodes that a rank has open."""
        return f"{self.phase}-{self.step}-{self.index}-{self.member}"


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """A node of a recorded episode, as far as a replay needs it."""

    parent: int
    author: Author
    token_ids: list[int] = []
    """Empty for the policy, which samples again, and for what a turn of it follows, which its request has."""
    num_tokens: int
    """Tokens that the episode kept."""
    noise: int = 0
    """Of the policy: with which they were sampled."""
    truncated: bool = False
    """Of the policy: the turn ended at a limit."""
    agent: str = ""
    """Of the policy: whose turn it was."""
    reward: float | None = None
    state: str = ""
    differs: str = ""


class Script(msgspec.Struct, frozen=True, kw_only=True):
    """A recorded episode without the tokens of its policy."""

    steps: list[Step]
    reward: float | None = None
    rewards: dict[str, float] = {}
    cause: Cause = ""
    detail: str = ""


class Begin(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To the agent process: run an episode."""

    episode: int
    """Number of the episode on this rank."""
    task: AgentTask
    noise: int
    """Seeds the noise of its turns."""


class Answer(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To the agent process: what the engine sampled."""

    request: int
    sampled: Sampled


class AbandonAll(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To the agent process: cancel all episodes; none of them is reported. To a router: the rank leaves its stage and
    samples no more; the episodes stay."""

    number: int
    """Comes back with `Abandoned`."""


class JoinStage(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To a router: the engine of this rank holds the weights of a stage and samples turns."""

    stage: str
    """Phase, step and versions of the weights; episodes of another stage are cancelled."""
    num_ranks: int
    """Ranks that take part in the stage."""


class NoMoreEpisodes(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To a router: this rank begins no further episodes in the stage."""


class AgentsReady(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From the agent process: it takes episodes."""


Engine = Literal["", "kept", "moved", "lost"]
"""The engine of a turn: kept, the one before in this episode; moved, a less loaded one; lost, another one because the
engine that was sampling the turn was lost. Empty: the first turn of an episode, or there is one engine."""


class Ask(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From the agent process: sample a turn."""

    request: int
    episode: int
    """0: of whichever rank; the answer goes to the router."""
    token_ids: list[int]
    noise: int
    agent: str = ""
    """Whose turn it is."""
    engine: Engine = ""
    """From a router: how the engine was chosen."""


class PictureTensor(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor in host memory."""

    dtype: str
    """Of NumPy."""
    shape: list[int]
    content: bytes


class NewPicture(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From the agent process: turns of this episode may follow a picture that its task does not have. It is sent before
    the first of them. To a router: the picture of a `PictureRequest`."""

    episode: int
    """0: from a router, the next turn follows the picture; to a router, of any."""
    digest: str
    token_ids: list[int] = []
    """Empty: as `arguments`."""
    arguments: dict[str, PictureTensor] = {}
    """Of the model; empty: the rank has them from an earlier message."""
    position_ids: PictureTensor | None = None
    file: bytes = b""
    """Its file, where `PictureSettings.sends_files`."""


class PictureRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From a router: send a picture of this rank's prompts, because another engine samples a turn that follows it."""

    digest: str


class StageOver(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From a router: all episodes of all ranks are over."""


class StageBroken(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From a router: another rank was lost or has left the stage, which therefore ends."""

    text: str


class EpisodeReport(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From the agent process: an episode is over."""

    episode: int
    trajectory: AgentTrajectory
    num_retries: int = 0
    idle_s: float = 0.0
    """Time that it spent outside the engine."""
    counts: dict[str, int] = {}
    """Of its last attempt; see `AgentSession.counts`."""


class Waiting(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From the agent process, once a second: the episode that has been outside the engine for longest."""

    text: str
    """Which one, and what it waits for; empty if none has been for a second."""


class Abandoned(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From the agent process: all episodes that began before are cancelled. From a router: the rank has left."""

    number: int


class AgentsRefused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From the agent process: it cannot run with these settings."""

    text: str


ToAgents = Begin | Answer | AbandonAll | JoinStage | NoMoreEpisodes | NewPicture
FromEpisode = Ask | NewPicture | EpisodeReport
ForRank = FromEpisode | PictureRequest
FromAgents = AgentsReady | ForRank | Waiting | Abandoned | AgentsRefused | StageOver | StageBroken

_encode = msgspec.msgpack.Encoder().encode
to_agents = msgspec.msgpack.Decoder(ToAgents).decode
from_agents = msgspec.msgpack.Decoder(FromAgents).decode


def frame(message: ToAgents | FromAgents) -> bytes:
    """The bytes of a message on the socket."""
    body = _encode(message)
    return _LENGTH.pack(len(body)) + body


class Frames:
    """Finds messages in a stream of bytes, however it arrives."""

    def __init__(self) -> None:
        self._rest = bytearray()
        """Received bytes of a message that is not complete."""

    def feed(self, received: bytes) -> list[bytes]:
        """The bytes of each message that is complete with these.

        Raises: ValueError if a message has more than `MAX_BYTES`.
        """
        rest, bodies, begin = self._rest, [], 0
        rest += received
        while len(rest) - begin >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(rest, begin)
            if length > MAX_BYTES:
                raise ValueError(f"a message of {length} bytes between a rollout and its agents; at most {MAX_BYTES}")
            end = begin + _LENGTH.size + length
            if len(rest) < end:
                break
            bodies.append(bytes(rest[begin + _LENGTH.size : end]))
            begin = end
        del rest[:begin]
        return bodies
