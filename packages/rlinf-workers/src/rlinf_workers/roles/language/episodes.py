"""From the episodes of an agent to a group to train on.

trees of nodes -> one row for each leaf, after the longest prompt that all rows have in common

A row that branched from an earlier one of its episode names the tokens that both have: they are computed once
(models/packed.py), and trained once, in the earlier row.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import accumulate, groupby
from math import nan
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlinf_workers.agents.pictures import FIRST_REFERENCE
from rlinf_workers.agents.records import AgentTrajectory, Sampled, TokenNode, shared_length
from rlinf_workers.errors import WorkersError
from rlinf_workers.roles.language.history_pictures import (
    PicturesByReference,
    history_of_prompt,
    pictures_of_prompt,
    placed,
    read_history,
)
from rlinf_workers.roles.records.language import PlacedPicture, Prompt, SampleGroup, Segment
from rlinf_workers.roles.records.pictures import ProcessedPicture


@dataclass(frozen=True, kw_only=True, slots=True)
class _Row:
    """A history from its first token to a leaf."""

    trajectory: int
    agent: int
    """Of those that train; -1: of another, or of nobody."""
    is_aside: bool
    """It has no loss: its episode is discarded, or an agent speaks that does not train."""
    is_frozen: bool
    """It is the conversation of an agent that does not train."""
    nodes: tuple[TokenNode, ...]
    token_ids: list[int]
    turns: tuple[int, ...]
    """For each node, its place among the turns of the episode that train; -1: it is no such turn, or an earlier row has
    it."""
    num_shared: int
    """Leading tokens, the prompt's included, of nodes that an earlier row has."""
    shared_with: int
    """That row, from the first of the group; -1: none."""

    @property
    def num_before_policy(self) -> int:
        """Tokens before the first that the policy wrote."""
        lengths = [0, *accumulate(len(node.token_ids) for node in self.nodes)]
        return next(
            (begin for begin, node in zip(lengths, self.nodes, strict=False) if node.author == "policy"), lengths[-1]
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedAgents:
    """The agents whose turns have a loss."""

    names: tuple[str, ...] = ()
    """Empty: there is one agent, without a name."""

    def number(self, node: TokenNode) -> int:
        """Of the agent whose turn a node is; -1: it is no turn, or one without a loss."""
        if node.author != "policy":
            return -1
        return 0 if not self.names else self.names.index(node.agent) if node.agent in self.names else -1


def group_of(
    prompt: Prompt,
    trajectories: Sequence[AgentTrajectory],
    *,
    policy_version: int,
    agents: Sequence[str] = (),
    pictures: PicturesByReference | None = None,
) -> SampleGroup:
    """The episodes of a prompt as a group.

    A leaf without a token of the policy is left out if its episode has another. The result's prompt has the tokens with
    which all histories begin, up to the first that a policy wrote; its other fields stay. Discarded episodes are one
    row without a loss, which shows what there was of them if it began with the prompt. Conversations of agents that do
    not train are rows without a loss, whole if they do not begin with the prompt.

    Args:
        policy_version: version of the group if the policy has written nothing.
        agents: names of the agents that train; empty: there is one, without a name.
        pictures: those of the episodes; None: of the prompt alone.

    Raises: WorkersError if a node contradicts itself, if the histories do not begin with the same token, or if one has
        a picture that is not among these.
    """
    where, trained = f"prompt {prompt.index}", TrainedAgents(names=tuple(agents))
    rows: list[_Row] = []
    for index, trajectory in enumerate(trajectories):
        _check(trajectory, f"{where}, episode {index}")
        rows += _rows(trajectory, index, len(rows), trained)
    pictures = pictures_of_prompt(prompt) if pictures is None else pictures
    prompt_ids, common = history_of_prompt(prompt), _common_prompt(rows, where)
    if common is not None and common != prompt_ids:
        prompt_ids, (token_ids, seen) = common, read_history(common, pictures)
        prompt = replace(prompt, token_ids=token_ids, pictures=seen)
    return _group(prompt, prompt_ids, trajectories, rows, policy_version, trained, pictures)


def _check(trajectory: AgentTrajectory, where: str) -> None:
    for index, node in enumerate(trajectory.nodes):
        if not -1 <= node.parent < index:
            raise WorkersError(f"{where}: node {index} continues node {node.parent}, which is not an earlier one")
        if node.author != "policy":
            continue
        sampled, num_tokens = node.sampled, len(node.token_ids)
        if sampled is None or sampled.token_ids != node.token_ids:
            raise WorkersError(f"{where}: node {index} is the policy's, but its tokens are not those that were sampled")
        num_versioned = sum(count for count, _ in sampled.versions)
        if len(sampled.logprobs) != num_tokens or num_versioned != num_tokens:
            raise WorkersError(
                f"{where}: node {index} has {num_tokens} tokens, {len(sampled.logprobs)} log-probabilities, and "
                f"versions for {num_versioned} tokens; the three must be equal"
            )


def _rows(trajectory: AgentTrajectory, index: int, num_earlier: int, trained: TrainedAgents) -> list[_Row]:
    """The rows of an episode; `num_earlier`: rows of the group before them."""
    nodes = trajectory.nodes
    speakers = [trained.number(node) for node in nodes]
    turns = {node: turn for turn, node in enumerate(n for n, speaker in enumerate(speakers) if speaker >= 0)}
    paths = [trajectory.path(leaf) for leaf in trajectory.leaves()]
    useful = [path for path in paths if any(nodes[node].author == "policy" and nodes[node].token_ids for node in path)]
    paths = (paths[:1] or [[]]) if trajectory.is_discarded else useful or paths[:1] or [[]]
    owner: dict[int, int] = {}
    rows = []
    for number, path in enumerate(paths, num_earlier):
        common = [node for node in path if node in owner]
        agent = max((speakers[node] for node in path), default=-1)
        is_frozen = agent < 0 and any(nodes[node].author == "policy" for node in path)
        rows.append(
            _Row(
                trajectory=index,
                agent=agent,
                is_aside=is_frozen or trajectory.is_discarded,
                is_frozen=is_frozen,
                nodes=tuple(nodes[node] for node in path),
                token_ids=[token for node in path for token in nodes[node].token_ids],
                turns=tuple(-1 if node in owner else turns.get(node, -1) for node in path),
                num_shared=sum(len(nodes[node].token_ids) for node in common),
                shared_with=owner[common[-1]] if common else -1,
            )
        )
        for node in path:
            owner.setdefault(node, number)
    return rows


def _common_prompt(rows: Sequence[_Row], where: str) -> list[int] | None:
    """The tokens with which all rows with a loss begin; None if there is no such row."""
    counted = [row for row in rows if not row.is_aside]
    if not counted:
        return None
    length, first = min(row.num_before_policy for row in counted), counted[0]
    for row in counted[1:]:
        common = shared_length(first.token_ids, row.token_ids)
        if common == 0:
            raise WorkersError(
                f"{where}: the histories of episodes {first.trajectory} and {row.trajectory} begin with different "
                f"tokens, {first.token_ids[:1]} and {row.token_ids[:1]}; all episodes of a group need a first token in "
                "common, such as that of a chat template"
            )
        length = min(length, common)
    if length == 0:
        raise WorkersError(f"{where}: a history begins with a turn of the policy; nothing predicts its first token")
    return first.token_ids[:length]


def _group(
    prompt: Prompt,
    prompt_ids: list[int],
    trajectories: Sequence[AgentTrajectory],
    rows: Sequence[_Row],
    policy_version: int,
    trained: TrainedAgents,
    pictures: PicturesByReference,
) -> SampleGroup:
    begin = len(prompt_ids)
    starts = [_start(row, prompt_ids, trajectories[row.trajectory]) for row in rows]
    lengths = [len(row.token_ids) - start for row, start in zip(rows, starts, strict=True)]
    shape = len(rows), max([1, *lengths])
    ids, mask, logprobs = np.zeros(shape, np.int64), np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    turns = np.full(shape, -1, np.int64)
    placed_pictures: list[list[tuple[int, ProcessedPicture]]] = [[] for _ in rows]
    for number, (row, start) in enumerate(zip(rows, starts, strict=True)):
        ids[number, : lengths[number]] = row.token_ids[start:]
        for place in (ids[number] >= FIRST_REFERENCE).nonzero()[0].tolist():
            ((_, picture),) = placed(row.token_ids[start + place : start + place + 1], pictures)
            ids[number, place] = int(picture.token_ids[0])
            if not row.is_aside:
                placed_pictures[number].append((place, picture))
        for place, turn, sampled in () if row.is_aside else _trained(row, start):
            mask[number, place], logprobs[number, place], turns[number, place] = 1, sampled.logprobs, turn
    shared = [0 if row.is_frozen else max(0, row.num_shared - begin) for row in rows]
    shared_with = [row.shared_with if num_shared else -1 for row, num_shared in zip(rows, shared, strict=True)]
    versions = [
        version
        for row in rows
        if not row.is_aside
        for node in row.nodes
        if node.sampled is not None
        for _, version in node.sampled.versions
    ]
    return SampleGroup(
        prompt=prompt,
        completion_ids=torch.from_numpy(ids),
        loss_mask=torch.from_numpy(mask),
        rollout_logprobs=torch.from_numpy(logprobs),
        policy_version=min(versions, default=policy_version),
        truncated=_vector([not row.is_frozen and _is_cut(row) for row in rows], np.bool_),
        segments=tuple(_segments(row.nodes, start) for row, start in zip(rows, starts, strict=True)),
        lengths=_vector(lengths, np.int64),
        trajectories=_vector([row.trajectory for row in rows], np.int64),
        shared=_vector(shared, np.int64),
        shared_with=_vector(shared_with, np.int64),
        rewards=_vector([_reward(trajectory, trained.names) for trajectory in trajectories], np.float32),
        causes=tuple(trajectory.cause for trajectory in trajectories),
        details=tuple(trajectory.detail for trajectory in trajectories),
        turns=torch.from_numpy(turns),
        pictures={picture.digest: picture for row in placed_pictures for _, picture in row},
        placed_pictures=tuple(
            tuple(PlacedPicture(begin=place, digest=picture.digest) for place, picture in row)
            for row in placed_pictures
        )
        if any(placed_pictures)
        else (),
        **_turns(trajectories, trained),
        **(_by_agent(trajectories, rows, trained.names) if trained.names else {}),
    )


def _start(row: _Row, prompt_ids: list[int], trajectory: AgentTrajectory) -> int:
    """Tokens of a history before those that the group shows as its row."""
    if row.token_ids[: len(prompt_ids)] == prompt_ids:
        return len(prompt_ids)
    return len(row.token_ids) if trajectory.is_discarded else 0


def _trained(row: _Row, begin: int) -> Iterator[tuple[slice, int, Sampled]]:
    """Where the turns are whose tokens have a loss, counted from token `begin` on, their numbers, and what was sampled
    for them."""
    end = -begin
    for node, turn in zip(row.nodes, row.turns, strict=True):
        at, end = end, end + len(node.token_ids)
        if turn >= 0 and node.sampled is not None:
            assert at >= 0, "turns follow the prompt"
            yield slice(at, end), turn, node.sampled


def _segments(nodes: Iterable[TokenNode], begin: int) -> tuple[Segment, ...]:
    """The authors and versions of the tokens from `begin` on."""
    segments: list[Segment] = []
    for node in nodes:
        parts = [(len(node.token_ids), -1)] if node.sampled is None else node.sampled.versions
        for count, version in parts:
            skipped = min(begin, count)
            begin -= skipped
            if num_tokens := count - skipped:
                segments.append(
                    Segment(num_tokens=num_tokens, policy_version=version, author=node.author, agent=node.agent)
                )
    return tuple(_joined(segments))


def _joined(segments: Iterable[Segment]) -> Iterator[Segment]:
    """Neighbours of one author and version as one."""
    for _, alike in groupby(segments, lambda one: (one.policy_version, one.author, one.agent)):
        first, *others = alike
        yield replace(first, num_tokens=first.num_tokens + sum(one.num_tokens for one in others)) if others else first


def _is_cut(row: _Row) -> bool:
    sampled = next((node.sampled for node in reversed(row.nodes) if node.sampled is not None), None)
    return sampled is not None and sampled.truncated


def _reward(trajectory: AgentTrajectory, agents: Sequence[str]) -> float:
    """The reward of an episode; the mean of its agents' rewards if it has none itself but each agent has."""
    rewards = [node.reward for node in trajectory.nodes if node.reward is not None]
    if trajectory.reward is not None:
        rewards.append(trajectory.reward)
    if trajectory.is_discarded:
        return nan
    if not rewards and agents and all(agent in trajectory.rewards for agent in agents):
        return sum(trajectory.rewards[agent] for agent in agents) / len(agents)
    return sum(rewards) if rewards else nan


def _agent_rewards(trajectory: AgentTrajectory, agents: Sequence[str]) -> list[float]:
    """The reward of each agent; NaN if it has none of its own and the episode has none yet."""
    rewards = []
    for agent in agents:
        own = [node.reward for node in trajectory.nodes if node.agent == agent and node.reward is not None]
        base = trajectory.rewards.get(agent, trajectory.reward)
        parts = own if base is None else [*own, base]
        rewards.append(nan if trajectory.is_discarded or not parts else sum(parts))
    return rewards


def _by_agent(trajectories: Sequence[AgentTrajectory], rows: Sequence[_Row], names: tuple[str, ...]) -> dict[str, Any]:
    """The fields of agents by name but those of their turns."""
    rewards = [_agent_rewards(trajectory, names) for trajectory in trajectories]
    return {
        "agents": names,
        "row_agents": torch.tensor([row.agent for row in rows]),
        "agent_rewards": torch.tensor(rewards),
    }


def _turns(trajectories: Sequence[AgentTrajectory], trained: TrainedAgents) -> dict[str, Tensor]:
    """Rewards, states and agents of the turns that train, [G, S] each. Without a name, the state of a turn is all
    tokens before it."""
    numbers: dict[str | bytes, int] = {}
    rewards, states, agents = [], [], []
    for trajectory in trajectories:
        speakers = [trained.number(node) for node in trajectory.nodes]
        turns = [] if trajectory.is_discarded else [n for n, speaker in enumerate(speakers) if speaker >= 0]
        agents.append([speakers[turn] for turn in turns])
        before = _digests_before(trajectory.nodes)
        rewards.append([trajectory.nodes[turn].reward or 0.0 for turn in turns])
        keys = [trajectory.nodes[turn].state or before[turn] for turn in turns]
        states.append([numbers.setdefault(key, len(numbers)) for key in keys])
    columns = {"turn_rewards": _padded(rewards, np.float32, 0), "turn_states": _padded(states, np.int64, -1)}
    return columns | ({"turn_agents": _padded(agents, np.int64, -1)} if trained.names else {})


def _digests_before(nodes: Sequence[TokenNode]) -> list[bytes]:
    """For each node, a digest of the tokens of its history before it."""
    digests, after = [], []
    for node in nodes:
        tokens = after[node.parent].copy() if node.parent >= 0 else sha256()
        digests.append(tokens.digest())
        tokens.update(array("q", node.token_ids).tobytes())
        after.append(tokens)
    return digests


def _vector(values: Sequence[float], dtype: type[np.generic]) -> Tensor:
    """[len(values)]; in a third of the time that `torch.tensor` takes."""
    return torch.from_numpy(np.array(values, dtype))


def _padded(rows: Sequence[Sequence[float]], dtype: type[np.generic], value: float) -> Tensor:
    """[len(rows), longest], at least one column."""
    padded = np.full((len(rows), max([1, *map(len, rows)])), value, dtype)
    for place, row in zip(padded, rows, strict=True):
        place[: len(row)] = row
    return torch.from_numpy(padded)
