"""Sessions: conversations whose tokens are kept exactly as they were served.

A request brings its whole history as messages. Where it begins with a conversation that the session has served, the
tokens of that conversation are taken as they are, and only what was added is encoded. Where it does not, because the
harness has edited, compressed or branched it, a branch begins at the deepest turn that still agrees, and the node says
what differed first.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import msgspec

from rlinf_workers.agents.histories import ServedTurn, ServedTurns, TokenTree
from rlinf_workers.agents.messages import (
    Message,
    RequestRefused,
    ToolCall,
    digest_with,
    digests,
    read_messages,
    read_tools,
)
from rlinf_workers.agents.pictures import HistoryPicture, PictureSource
from rlinf_workers.agents.records import AgentTrajectory, Cause, EpisodeEnded, Sampled, cut
from rlinf_workers.agents.templates import AuthoredTokens, ChatTemplate, TokenText
from rlinf_workers.agents.templates.tokens import PICTURE
from rlinf_workers.agents.tools import EpisodeTools
from rlinf_workers.engines.stopping import StopStrings
from rlinf_workers.models.picture_files import PictureError

FinishReason = Literal["stop", "length", "tool_calls"]
MAX_SAMPLES = 128
"""Of one request."""


class TokenSource(Protocol):
    """What a session asks tokens of: an engine, or a stand-in for one."""

    async def sample(
        self, session: str, token_ids: Sequence[int], *, max_new_tokens: int | None, seed: int | None, agent: str
    ) -> Sampled:
        """Samples one turn after these tokens. Cancelling the call cancels the sampling.

        Args:
            session: its id; requests of one session share their beginning.
            agent: whose turn it is; "": the job has no agents by name.
            max_new_tokens: None: the limit of the recipe.
            seed: of the request.

        Raises: EpisodeEnded.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class SessionLimits:
    """What an episode may use."""

    max_turns: int | None
    """Requests that are sampled; `n` samples of one request are one turn. None: any number."""
    max_context_tokens: int
    """Tokens of a history, the last turn included."""
    max_new_tokens: int
    """Tokens of a turn."""


class TurnsExhausted(EpisodeEnded):
    """No turn is left."""

    def __init__(self, max_turns: int) -> None:
        super().__init__("turns", f"all {max_turns} turns of the episode are used")


class ContextFull(EpisodeEnded):
    """No token is left for a turn."""

    def __init__(self, num_tokens: int, max_context_tokens: int) -> None:
        super().__init__(
            "tokens", f"the history has {num_tokens} tokens, and at most {max_context_tokens} fit with the next turn"
        )


@dataclass(frozen=True, kw_only=True)
class AssistantTurn:
    """A turn of the policy.

    Example, hermes: text = 'Let me see.\\n<tool_call>...</tool_call>', content = "Let me see.",
        tool_calls = (ToolCall("4k...", "add", '{"a": 1}'),), finish_reason = "tool_calls"
    """

    node: int
    """Index of its node in the trajectory."""
    text: str
    """All that the policy wrote, without the end token."""
    content: str
    """The answer: neither thoughts nor well-formed calls. It ends before a stop string."""
    reasoning: str
    """Thoughts."""
    tool_calls: tuple[ToolCall, ...]
    """The malformed ones too, which are also part of the content."""
    finish_reason: FinishReason
    token_ids: list[int]
    """As sampled; up to the token that completes a stop string."""
    logprobs: list[float]
    versions: list[tuple[int, int]]
    num_prompt_tokens: int
    token_texts: tuple[str, ...] = ()
    """Text of each token by itself, where a request needs it (`AgentSession.token_texts`)."""
    stop: str = ""
    """The stop string that ended it."""

    def message(self) -> dict[str, Any]:
        """The turn as a message of OpenAI's chat form. Append it to the history as it is."""
        return self.as_message().for_template(arguments_as_text=True)

    def as_message(self) -> Message:
        """`message` as a record."""
        calls = tuple(call for call in self.tool_calls if not call.malformed)
        return Message("assistant", self.content, self.reasoning, calls)


class _Speaker:
    """An agent: its template, and the conversations that it can go on with."""

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template
        self.served = ServedTurns()
        self.texts: list[tuple[str, int]] = []
        """(text that a completion request may continue, node) of each turn."""


class AgentSession:
    """The conversations of an episode. With agents by name each has conversations of its own: what another agent said
    is a text to it, which it did not write.

    Args:
        session_id: passed to the source.
        template: of the only agent.
        source: samples the turns.
        tokens_of_task: tokens of the first prompt, if they are known; they replace what the template gives for the
            first request.
        missing_thoughts: what a history is whose turns lack the thoughts that they were returned with. `branch`:
            another one, since the harness has removed them. `continue`: the same; the policy goes on seeing them.
        agents: agents by name, and the template of each; empty: there is one, without a name.
        pictures: reads those of messages; None: the model reads text alone.

    Attributes:
        counts: what happened: `continued`, `branches`, `roots`, `malformed_calls`, `calls` and `failed_calls` of tools
            that the loop made, `stopped` (at a stop string), `ignored_NAME` for parameters of requests, and for each
            declared rule of the template the turns that it concerned.
        next_state: of the next turn, see `TokenNode.state`; used once.
        end: the last EpisodeEnded that a request met.
        agents: names of the agents; empty: there is one, without a name.
        tools: of the recipe, for an agent in RLinf's process.
    """

    def __init__(
        self,
        session_id: str,
        template: ChatTemplate,
        source: TokenSource,
        limits: SessionLimits,
        *,
        tokens_of_task: Sequence[int] | None = None,
        missing_thoughts: Literal["branch", "continue"] = "branch",
        agents: Mapping[str, ChatTemplate] | None = None,
        pictures: PictureSource | None = None,
    ) -> None:
        self.id = session_id
        self.template = template
        self.limits = limits
        self.counts: Counter[str] = Counter()
        self.next_state = ""
        self.end: EpisodeEnded | None = None
        self.tools = EpisodeTools((), session_id)
        self.agents = tuple(agents or ())
        self._speakers = {name: _Speaker(one) for name, one in (agents or {"": template}).items()}
        self._rewards: dict[str, float] = {}
        self._source, self._picture_source = source, pictures
        self._pictures: dict[str, HistoryPicture] = {}
        """Those of messages, by their digest there."""
        self._tokens_of_task = None if tokens_of_task is None else tuple(tokens_of_task)
        self._compares_thoughts = missing_thoughts == "branch"
        self._tree = TokenTree()
        self._turn_nodes: list[int] = []
        self._num_turns = 0

    # -- requests --------------------------------------------------------------------------------------------------

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        n: int = 1,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        seed: int | None = None,
        agent: str = "",
    ) -> list[AssistantTurn]:
        """Samples `n` next turns of a conversation.

        Args:
            messages: in OpenAI's chat form.
            tools: in OpenAI's chat form.
            max_tokens: of a turn.
            stop: a turn ends with the first token after which its text contains one of these.
            seed: sample i uses seed + i.
            agent: whose turn it is, in a job with agents by name.

        Raises: RequestRefused; EpisodeEnded: TurnsExhausted and ContextFull, or one of the source.
        """
        speaker = self._speaker(agent)
        history, declared = read_messages(messages), read_tools(tools)
        await self._read_pictures(history)
        prefixes = digests(history, declared, thoughts=self._compares_thoughts)
        parent = self._place(speaker, history, declared, prefixes)
        sampled, stops = await self._sample(agent, parent, n=n, max_tokens=max_tokens, stop=stop, seed=seed)
        state, self.next_state = self.next_state, ""
        pairs = zip(sampled, stops, strict=True)
        turns = [self._turn(agent, parent, one, string, declared, state) for one, string in pairs]
        for turn in turns:
            message = turn.as_message()
            digest = digest_with(prefixes[-1], message, thoughts=self._compares_thoughts)
            speaker.served.add(digest, ServedTurn((*history, message), turn.node))
        return turns

    async def complete(
        self,
        prompt: str | Sequence[int],
        *,
        n: int = 1,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        seed: int | None = None,
        agent: str = "",
    ) -> list[AssistantTurn]:
        """Samples `n` continuations of a text, or of tokens. The arguments and errors are those of `chat`.

        A prompt that begins with an earlier one and the text returned for it continues that turn; tokens continue the
        longest path of the tree that they begin with.
        """
        speaker = self._speaker(agent)
        parent = self._place_text(speaker, prompt) if isinstance(prompt, str) else self._place_tokens(agent, prompt)
        sampled, stops = await self._sample(agent, parent, n=n, max_tokens=max_tokens, stop=stop, seed=seed)
        state, self.next_state = self.next_state, ""
        pairs = zip(sampled, stops, strict=True)
        turns = [self._turn(agent, parent, one, string, (), state, is_plain=True) for one, string in pairs]
        before = prompt if isinstance(prompt, str) else speaker.template.text.decode(prompt)
        speaker.texts += [(before + turn.content, turn.node) for turn in turns]
        return turns

    def token_texts(self, turn: AssistantTurn) -> tuple[str, ...]:
        """Text of each token of a turn."""
        text = self._speakers[self._tree.nodes[turn.node].agent].template.text
        return tuple(text.decode([token]) for token in turn.token_ids)

    # -- what an episode leaves ------------------------------------------------------------------------------------

    def trajectory(
        self, reward: float | None = None, cause: Cause = "", detail: str = "", printed: str = ""
    ) -> AgentTrajectory:
        """Everything that was served so far."""
        nodes, rewards = list(self._tree.nodes), dict(self._rewards)
        return AgentTrajectory(nodes=nodes, reward=reward, rewards=rewards, cause=cause, detail=detail, printed=printed)

    def reward(self, value: float, *, agent: str) -> None:
        """Gives an agent a reward of its own in this episode; a later call replaces it. Agents without one have the
        reward of the episode.

        Raises: RequestRefused if there is no such agent, or the reward is not a finite number.
        """
        self._speaker(agent)
        self._rewards[agent] = _finite(value)

    def reward_turn(self, turn: AssistantTurn, value: float) -> None:
        """Gives a turn a reward of its own. Raises: RequestRefused if it is not a finite number."""
        self._tree.set_reward(turn.node, _finite(value))

    def reward_numbered_turn(self, number: int, value: float) -> None:
        """`reward_turn` for the turn that was sampled as number 0, 1, ...; negative numbers count from the last one.

        Raises: RequestRefused if there is no such turn, or the reward is not a finite number.
        """
        if not -len(self._turn_nodes) <= number < len(self._turn_nodes):
            raise RequestRefused(f"there is no turn {number} to reward: the session has {len(self._turn_nodes)}")
        self._tree.set_reward(self._turn_nodes[number], _finite(value))

    def raise_end(self) -> None:
        """Raises the EpisodeEnded that a request met, if one did, for callers whose harness has swallowed it."""
        if self.end is not None:
            raise self.end

    # -- pictures --------------------------------------------------------------------------------------------------

    async def _read_pictures(self, history: Sequence[Message]) -> None:
        """Reads the pictures of messages that no earlier request had. Raises: RequestRefused."""
        for index, message in enumerate(history):
            for picture in message.pictures:
                if picture.digest in self._pictures:
                    continue
                where = f"messages[{index}].content"
                if self._picture_source is None:
                    raise RequestRefused(f"{where} has a picture, and the model reads text alone")
                try:
                    self._pictures[picture.digest] = await self._picture_source.read(picture)
                except PictureError as error:
                    raise RequestRefused(f"{where}: the picture {error}") from error

    def _with_pictures(self, pieces: Sequence[AuthoredTokens], messages: Sequence[Message]) -> list[AuthoredTokens]:
        """The tokens of messages with those of their pictures."""
        pictures = [self._pictures[one.digest] for message in messages for one in message.pictures]
        if not pictures:
            return list(pieces)
        following = iter(pictures)
        whole = [
            AuthoredTokens(
                piece.author,
                tuple(
                    token for one in piece.token_ids for token in (next(following).tokens if one == PICTURE else (one,))
                ),
            )
            for piece in pieces
        ]
        assert next(following, None) is None, "the template has checked their number"
        return whole

    # -- places in the tree ----------------------------------------------------------------------------------------

    def _speaker(self, agent: str) -> _Speaker:
        """Raises: RequestRefused if there is no such agent."""
        if agent in self._speakers:
            return self._speakers[agent]
        if not self.agents:
            raise RequestRefused(f"agent={agent!r}: this job has no agents by name (rollout.agent.agents)")
        raise RequestRefused(
            f"agent={agent!r} is none of this job's agents, {', '.join(self.agents)}; a request names one as its model"
        )

    def _place(
        self,
        speaker: _Speaker,
        history: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        prefixes: Sequence[bytes],
    ) -> int:
        """Adds the tokens that stand before the next turn, and returns their last node.

        Args:
            prefixes: `digests` of the history.
        """
        self._check_turns()
        turn = speaker.served.deepest(prefixes)
        if turn is None:
            pieces = self._with_pictures(self._first_prompt(speaker, history, tools), history)
            parent, is_new = -1, bool(speaker.served.turns)
        else:
            last_id = (self._tree.nodes[turn.node].token_ids or [None])[-1]
            whole = [
                *turn.messages,
                *history[len(turn.messages) :],
            ]  # the turns' calls with the ids that they have here
            pieces = speaker.template.suffix(whole, tools, len(turn.messages), last_id)
            pieces = self._with_pictures(pieces, history[len(turn.messages) :])
            parent, is_new = turn.node, turn.num_continued > 0
            turn.num_continued += 1
        num_nodes = len(self._tree.nodes)
        node = self._tree.add(parent, pieces, speaker.served.difference(history) if is_new else "")
        if not is_new:
            self.counts["continued"] += turn is not None
        elif len(self._tree.nodes) > num_nodes:
            self.counts["roots" if turn is None else "branches"] += 1
        self._count_declared(speaker.template, history, tools)
        return node

    def _first_prompt(
        self, speaker: _Speaker, history: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> list[AuthoredTokens]:
        if self._tokens_of_task is not None and not speaker.served.turns:
            return [AuthoredTokens("user", self._tokens_of_task)]
        return speaker.template.prompt(history, tools)

    def _place_text(self, speaker: _Speaker, prompt: str) -> int:
        self._check_turns()
        begun = [(text, node) for text, node in speaker.texts if prompt.startswith(text)]
        text, parent = max(begun, key=lambda entry: len(entry[0]), default=("", -1))
        rest = tuple(speaker.template.text.encode(prompt[len(text) :]))
        return self._tree.add(parent, [AuthoredTokens("user", rest)])

    def _place_tokens(self, agent: str, prompt: Sequence[int]) -> int:
        self._check_turns()
        prompt_ids, deepest, length = list(prompt), -1, 0
        for index, node in enumerate(self._tree.nodes):
            if node.author == "policy" and node.agent == agent:
                begun = self._tree.token_ids(index)
                if length < len(begun) <= len(prompt_ids) and prompt_ids[: len(begun)] == begun:
                    deepest, length = index, len(begun)
        rest = tuple(prompt_ids[length:])
        return self._tree.add(deepest, [AuthoredTokens("user", rest)] if rest else [])

    def _count_declared(
        self, template: ChatTemplate, history: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> None:
        declared = template.declared
        if "thoughts" in declared and any(message.thoughts for message in history[:-1]):
            self.counts["declared_thoughts"] += 1
        if "tools" in declared and tools and any(message.role == "assistant" for message in history):
            self.counts["declared_tools"] += 1

    # -- sampling --------------------------------------------------------------------------------------------------

    def _check_turns(self) -> None:
        if self.limits.max_turns is not None and self._num_turns >= self.limits.max_turns:
            self.end = TurnsExhausted(self.limits.max_turns)
            raise self.end

    async def _sample(
        self, agent: str, parent: int, *, n: int, max_tokens: int | None, stop: Sequence[str], seed: int | None
    ) -> tuple[list[Sampled], list[str]]:
        """`n` turns after a node, each up to its first stop string, and that string."""
        if not 1 <= n <= MAX_SAMPLES:
            raise RequestRefused(f"n={n} is not between 1 and {MAX_SAMPLES}")
        if max_tokens is not None and max_tokens < 1:
            raise RequestRefused(f"max_tokens={max_tokens} is not positive")
        if any(not one for one in stop):
            raise RequestRefused("a stop string is empty")
        if parent < 0:
            raise RequestRefused("the prompt has no tokens")
        token_ids = self._tree.token_ids(parent)
        left = self.limits.max_context_tokens - len(token_ids)
        if left < 1:
            self.end = ContextFull(len(token_ids), self.limits.max_context_tokens)
            raise self.end
        most = min(left, max_tokens or left)
        max_new_tokens = most if most < self.limits.max_new_tokens else None
        self._num_turns += 1
        seeds = [None if seed is None else seed + index for index in range(n)]
        samples = [
            self._source.sample(self.id, token_ids, max_new_tokens=max_new_tokens, seed=one, agent=agent)
            for one in seeds
        ]
        try:
            sampled = await _all(samples)
        except BaseException as error:
            self._num_turns -= 1  # nothing was served
            self.end = error if isinstance(error, EpisodeEnded) else self.end
            raise
        text = self._speakers[agent].template.text
        cuts = [self._stopped(text, one, stop) for one in sampled]
        return [one for one, _ in cuts], [string for _, string in cuts]

    def _stopped(self, reader: TokenText, sampled: Sampled, stop: Sequence[str]) -> tuple[Sampled, str]:
        """What was sampled up to the token that completes a stop string, and that string."""
        end = StopStrings(reader, stop).end(sampled.token_ids) if stop else None
        if end is None:
            return sampled, ""
        self.counts["stopped"] += 1
        text = reader.decode(sampled.token_ids[:end])
        first = min((one for one in stop if one in text), key=text.index)
        return msgspec.structs.replace(cut(sampled, end, truncated=False), truncated=False), first

    def _turn(
        self,
        agent: str,
        parent: int,
        sampled: Sampled,
        stop: str,
        tools: Sequence[Mapping[str, Any]],
        state: str,
        *,
        is_plain: bool = False,
    ) -> AssistantTurn:
        """Adds a turn to the tree, and reads it.

        Args:
            is_plain: it is a text's continuation, without thoughts or calls.
        """
        history = self._tree.token_ids(parent)
        node = self._tree.add_turn(parent, sampled, state, agent)
        self._turn_nodes.append(node)
        read = self._speakers[agent].template.read(sampled.token_ids, tools, history)
        content = read.text if is_plain else read.content
        if stop:
            content = content.partition(stop)[0]
        calls = () if is_plain else read.calls
        self.counts["malformed_calls"] += sum(bool(call.malformed) for call in calls)
        has_calls = any(not call.malformed for call in calls)
        return AssistantTurn(
            node=node,
            text=read.text,
            content=content,
            reasoning="" if is_plain else read.thoughts,
            tool_calls=calls,
            finish_reason="tool_calls" if has_calls else "length" if sampled.truncated and not stop else "stop",
            token_ids=list(sampled.token_ids),
            logprobs=list(sampled.logprobs),
            versions=list(sampled.versions),
            num_prompt_tokens=len(history),
            stop=stop,
        )


async def _all(samples: Sequence[Coroutine[Any, Any, Sampled]]) -> list[Sampled]:
    """What they return; if one fails, the others are cancelled."""
    if len(samples) == 1:  # without a task of its own
        return [await samples[0]]
    tasks = [asyncio.ensure_future(one) for one in samples]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for one in tasks:
            one.cancel()
        raise


def _finite(reward: float) -> float:
    """Raises: RequestRefused."""
    if not math.isfinite(reward):
        raise RequestRefused(f"the reward {reward} is not a finite number")
    return reward
