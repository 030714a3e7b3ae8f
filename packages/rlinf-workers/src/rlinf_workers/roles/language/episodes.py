"""From the episodes of an agent to a group to train on.

trees of nodes -> one row for each leaf, after the longest prompt that all rows have in common

A row that branched from an earlier one of its episode names the tokens that both have: they are computed once
(models/packed.py), and trained once, in the earlier row.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import accumulate
from math import nan

import numpy as np
import torch
from torch import Tensor

from rlinf_workers.agents.records import AgentTrajectory, TokenNode, shared_length
from rlinf_workers.errors import WorkersError
from rlinf_workers.roles.records.language import Prompt, SampleGroup, Segment


@dataclass(frozen=True, kw_only=True, slots=True)
class _Row:
    """A history from its first token to a leaf."""

    trajectory: int
    nodes: tuple[TokenNode, ...]
    turns: tuple[int, ...]
    """For each node, its place among the turns of the episode; -1: it is not the policy's, or an earlier row has it."""
    num_shared: int
    """Leading tokens, the prompt's included, of nodes that an earlier row has."""
    shared_with: int
    """That row, from the first of the group; -1: none."""

    @property
    def token_ids(self) -> list[int]:
        return [token for node in self.nodes for token in node.token_ids]

    @property
    def num_before_policy(self) -> int:
        """Tokens before the first that the policy wrote."""
        lengths = [0, *accumulate(len(node.token_ids) for node in self.nodes)]
        return next(
            (begin for begin, node in zip(lengths, self.nodes, strict=False) if node.author == "policy"), lengths[-1]
        )


def group_of(prompt: Prompt, trajectories: Sequence[AgentTrajectory], *, policy_version: int) -> SampleGroup:
    """The episodes of a prompt as a group.

    A leaf without a token of the policy is left out if its episode has another. The result's prompt has the tokens with
    which all histories begin, up to the first that a policy wrote; its other fields stay. Discarded episodes are one
    row without a loss, which shows what there was of them if it began with the prompt.

    Args:
        policy_version: version of the group if the policy has written nothing.

    Raises: WorkersError if a node contradicts itself, or if the histories do not begin with the same token.
    """
    where = f"prompt {prompt.index}"
    rows: list[_Row] = []
    for index, trajectory in enumerate(trajectories):
        _check(trajectory, f"{where}, episode {index}")
        rows += _rows(trajectory, index, len(rows))
    histories = [row.token_ids for row in rows]
    is_discarded = [trajectories[row.trajectory].is_discarded for row in rows]
    length = _prompt_length(rows, histories, is_discarded, where)
    if length is not None:
        first = next(row for row, discarded in enumerate(is_discarded) if not discarded)
        prompt = replace(prompt, token_ids=torch.tensor(histories[first][:length], dtype=torch.int64))
    return _group(prompt, trajectories, rows, histories, policy_version)


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


def _rows(trajectory: AgentTrajectory, index: int, num_earlier: int) -> list[_Row]:
    """The rows of an episode; `num_earlier`: rows of the group before them."""
    nodes = trajectory.nodes
    turns = {node: turn for turn, node in enumerate(n for n, one in enumerate(nodes) if one.author == "policy")}
    paths = [trajectory.path(leaf) for leaf in trajectory.leaves()]
    useful = [path for path in paths if any(node in turns and nodes[node].token_ids for node in path)]
    paths = (paths[:1] or [[]]) if trajectory.is_discarded else useful or paths[:1] or [[]]
    owner: dict[int, int] = {}
    rows = []
    for number, path in enumerate(paths, num_earlier):
        common = [node for node in path if node in owner]
        rows.append(
            _Row(
                trajectory=index,
                nodes=tuple(nodes[node] for node in path),
                turns=tuple(-1 if node in owner else turns.get(node, -1) for node in path),
                num_shared=sum(len(nodes[node].token_ids) for node in common),
                shared_with=owner[common[-1]] if common else -1,
            )
        )
        for node in path:
            owner.setdefault(node, number)
    return rows


def _prompt_length(
    rows: Sequence[_Row], histories: Sequence[list[int]], is_discarded: Sequence[bool], where: str
) -> int | None:
    """Number of tokens of the common prompt; None if all episodes are discarded."""
    counted = [number for number, discarded in enumerate(is_discarded) if not discarded]
    if not counted:
        return None
    length = min(rows[number].num_before_policy for number in counted)
    first = counted[0]
    for number in counted[1:]:
        common = shared_length(histories[first], histories[number])
        if common == 0:
            raise WorkersError(
                f"{where}: the histories of episodes {rows[first].trajectory} and {rows[number].trajectory} begin with "
                f"different tokens, {histories[first][:1]} and {histories[number][:1]}; all episodes of a group need a "
                "first token in common, such as that of a chat template"
            )
        length = min(length, common)
    if length == 0:
        raise WorkersError(f"{where}: a history begins with a turn of the policy; nothing predicts its first token")
    return length


def _group(
    prompt: Prompt,
    trajectories: Sequence[AgentTrajectory],
    rows: Sequence[_Row],
    histories: Sequence[list[int]],
    policy_version: int,
) -> SampleGroup:
    begin = len(prompt.token_ids)
    prompt_ids = prompt.token_ids.tolist()
    flat: list[dict[str, list[float]]] = []
    segments: list[tuple[Segment, ...]] = []
    for row, history in zip(rows, histories, strict=True):
        is_shown = history[:begin] == prompt_ids
        discarded = trajectories[row.trajectory].is_discarded
        flat.append(_tokens(row, begin if is_shown else len(history), has_loss=not discarded))
        segments.append(_segments(row.nodes, begin) if is_shown else ())
    shared = [max(0, row.num_shared - begin) for row in rows]
    shared_with = [row.shared_with if num_shared else -1 for row, num_shared in zip(rows, shared, strict=True)]
    turn_rewards, turn_states = _turns(trajectories)
    versions = [
        version
        for row in rows
        if not trajectories[row.trajectory].is_discarded
        for node in row.nodes
        if node.sampled is not None
        for _, version in node.sampled.versions
    ]
    return SampleGroup(
        prompt=prompt,
        completion_ids=_padded([columns["ids"] for columns in flat], np.int64, 0),
        loss_mask=_padded([columns["mask"] for columns in flat], np.float32, 0),
        rollout_logprobs=_padded([columns["logprobs"] for columns in flat], np.float32, 0),
        policy_version=min(versions, default=policy_version),
        truncated=torch.tensor([_is_cut(row) for row in rows]),
        segments=tuple(segments),
        lengths=torch.tensor([len(columns["ids"]) for columns in flat]),
        trajectories=torch.tensor([row.trajectory for row in rows]),
        shared=torch.tensor(shared),
        shared_with=torch.tensor(shared_with),
        rewards=torch.tensor([_reward(trajectory) for trajectory in trajectories]),
        causes=tuple(trajectory.cause for trajectory in trajectories),
        details=tuple(trajectory.detail for trajectory in trajectories),
        turns=_padded([columns["turns"] for columns in flat], np.int64, -1),
        turn_rewards=turn_rewards,
        turn_states=turn_states,
    )


def _tokens(row: _Row, begin: int, *, has_loss: bool) -> dict[str, list[float]]:
    """The columns of a row from its token `begin` on."""
    columns: dict[str, list[float]] = {"ids": [], "mask": [], "logprobs": [], "turns": []}
    for node, turn in zip(row.nodes, row.turns, strict=True):
        num_tokens, trains = len(node.token_ids), has_loss and turn >= 0
        columns["ids"] += node.token_ids
        columns["mask"] += [float(trains)] * num_tokens
        columns["logprobs"] += node.sampled.logprobs if trains and node.sampled else [0.0] * num_tokens
        columns["turns"] += [turn if trains else -1] * num_tokens
    return {name: values[begin:] for name, values in columns.items()}


def _segments(nodes: Iterable[TokenNode], begin: int) -> tuple[Segment, ...]:
    """The authors and versions of the tokens from `begin` on."""
    segments: list[Segment] = []
    for node in nodes:
        parts = [(len(node.token_ids), -1)] if node.sampled is None else node.sampled.versions
        for count, version in parts:
            skipped = min(begin, count)
            begin -= skipped
            num_tokens = count - skipped
            last = segments[-1] if segments else None
            if last is not None and (last.author, last.policy_version) == (node.author, version):
                segments[-1] = replace(last, num_tokens=last.num_tokens + num_tokens)
            elif num_tokens:
                segments.append(Segment(num_tokens=num_tokens, policy_version=version, author=node.author))
    return tuple(segments)


def _is_cut(row: _Row) -> bool:
    sampled = next((node.sampled for node in reversed(row.nodes) if node.sampled is not None), None)
    return sampled is not None and sampled.truncated


def _reward(trajectory: AgentTrajectory) -> float:
    rewards = [node.reward for node in trajectory.nodes if node.reward is not None]
    if trajectory.reward is not None:
        rewards.append(trajectory.reward)
    return nan if trajectory.is_discarded or not rewards else sum(rewards)


def _turns(trajectories: Sequence[AgentTrajectory]) -> tuple[Tensor, Tensor]:
    """Rewards and states of the turns, [G, S] each. Without a name, the state of a turn is all tokens before it."""
    numbers: dict[str | bytes, int] = {}
    rewards, states = [], []
    for trajectory in trajectories:
        turns = (
            [] if trajectory.is_discarded else [n for n, one in enumerate(trajectory.nodes) if one.author == "policy"]
        )
        before = _digests_before(trajectory.nodes)
        rewards.append([trajectory.nodes[turn].reward or 0.0 for turn in turns])
        keys = [trajectory.nodes[turn].state or before[turn] for turn in turns]
        states.append([numbers.setdefault(key, len(numbers)) for key in keys])
    return _padded(rewards, np.float32, 0), _padded(states, np.int64, -1)


def _digests_before(nodes: Sequence[TokenNode]) -> list[bytes]:
    """For each node, a digest of the tokens of its history before it."""
    digests, after = [], []
    for node in nodes:
        tokens = after[node.parent].copy() if node.parent >= 0 else sha256()
        digests.append(tokens.digest())
        tokens.update(array("q", node.token_ids).tobytes())
        after.append(tokens)
    return digests


def _padded(rows: Sequence[Sequence[float]], dtype: type[np.generic], value: float) -> Tensor:
    """[len(rows), longest], at least one column."""
    padded = np.full((len(rows), max([1, *map(len, rows)])), value, dtype)
    for place, row in zip(padded, rows, strict=True):
        place[: len(row)] = row
    return torch.from_numpy(padded)
