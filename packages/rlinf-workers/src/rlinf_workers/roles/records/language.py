"""Items of language flows. Legend: G completions or episodes of a prompt, R rows, L prompt tokens, T completion tokens.

A group has one row for each completion (R = G), unless its episodes have several turns: a row is then everything after
the prompt that leads to one leaf of an episode's tree, and an episode that branched has several rows.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from rlinf_comm import record
from rlinf_workers.agents.records import NOT_OF_POLICY, Author, Cause
from rlinf_workers.roles.records.kept_tokens import KeptTokens
from rlinf_workers.roles.records.pictures import Pictures, ProcessedPicture, pictures_of
from rlinf_workers.worker import DIGEST_LENGTH


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One problem for the rollout. Fed by the driver."""

    index: int
    """Index of the prompt in this run, from 0; its key on every channel."""
    token_ids: Tensor
    """[L] int64, no padding."""
    reference_answer: str
    """The correct answer; read by the reward alone."""
    text: str | None = None
    """The problem as the user wrote it, without the chat's special tokens; for rewards that read the prompt. None:
    decode the tokens."""
    opening: str = ""
    """The beginning of the completion that the chat template adds, such as `<think>\\n`; rewards read it before the
    completion."""
    row_json: str | None = None
    """All columns of the data row as a JSON object, for rewards that read them; None if none does."""
    messages_json: str | None = None
    """The conversation that an agent goes on with, a JSON list of {"role", "content"}; None: there is no agent."""
    pictures: Pictures | None = None
    """What a vision-language model sees; None: the prompt is text alone."""
    picture_files: tuple[Tensor, ...] = ()
    """[bytes] uint8 each, the files of the pictures, for rewards that read them; empty if none does."""


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedPicture:
    """A picture among the tokens of a row after its prompt."""

    begin: int
    """Its first token, counted from the row's first."""
    digest: str


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """Consecutive tokens of a row that one version of the weights sampled, or that another author wrote."""

    num_tokens: int
    """At least 1."""
    policy_version: int
    """-1: the policy did not sample them."""
    author: Author = "policy"
    agent: str = ""
    """Of the policy's tokens: the agent whose turn they belong to; "": the job has no agents by name."""


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class SampleGroup:
    """The completions sampled for one prompt, or the episodes of an agent.

    Example: G = 2 completions, T = 3 tokens, the second one ended after 2:
        completion_ids = [[5, 9, 2], [5, 2, 0]], loss_mask = [[1, 1, 1], [1, 1, 0]]

    Example: one episode. The policy wrote [5, 2], a tool [7]; from there two turns were sampled, [8, 2] and [9, 2]:
        completion_ids = [[5, 2, 7, 8, 2], [5, 2, 7, 9, 2]], loss_mask = [[1, 1, 0, 1, 1], [0, 0, 0, 1, 1]],
        trajectories = [0, 0], shared = [0, 3], shared_with = [-1, 0], turns = [[0, 0, -1, 1, 1], [-1, -1, -1, 2, 2]]
    """

    prompt: Prompt
    completion_ids: Tensor
    """[R, T] int64; arbitrary beyond `row_lengths`."""
    loss_mask: Tensor
    """[R, T] float32; 1 on sampled tokens, the end token included. Each sampled token has a 1 in one row at most."""
    rollout_logprobs: Tensor
    """[R, T] float32, nats, by the engine that sampled, at its temperature, among the `kept_tokens`; 0 where
    loss_mask is 0."""
    ref_logprobs: Tensor | None = None
    """[R, T] float32, by the frozen reference; set by the reference stage if the flow has one."""
    policy_version: int
    """Version of the weights that sampled the first tokens, the oldest among the completions; counts optimizer steps
    from 0."""
    truncated: Tensor | None = None
    """[R] bool; the completion, or the last turn of the row, reached its token limit without ending. None: not
    known."""
    segments: tuple[tuple[Segment, ...], ...] = ()
    """For each row, the authors and versions of all its tokens, from the first token on; empty: `policy_version`
    sampled all tokens of the group."""
    prompt_experts: Tensor | None = None
    """[L, layers, k] uint8, int16 for more than 256 experts; the experts that the engine's routers chose for each token
    of the prompt (models/router_replay.py). None: not recorded."""
    experts: Tensor | None = None
    """[R, E, layers, k], as `prompt_experts`, for the first E tokens of each row, E at most T. The engine computes no
    experts for the last token of a completion; from there on they are 0."""
    kept_tokens: KeptTokens | None = None
    """The tokens that top_p, top_k and min_p left, of the R rows; log-probabilities are among these. None: each token
    was drawn from all."""
    lengths: Tensor | None = None
    """[R] int64, tokens of each row, those of other authors included; None: the policy sampled all of them, and
    loss_mask is 1 up to the end."""
    trajectories: Tensor | None = None
    """[R] int64, the episode that each row belongs to; rows of an episode are neighbours. None: row i is episode i."""
    shared: Tensor | None = None
    """[R] int64, number of leading tokens that the row has in common with the earlier row `shared_with`, from which its
    episode branched; its loss_mask is 0 on them. None: every row is computed by itself."""
    shared_with: Tensor | None = None
    """[R] int64; -1: with no row."""
    rewards: Tensor | None = None
    """[G] float32, the sum of the rewards that the harness returned for an episode and its turns; NaN: the job's reward
    scores its last turn, or the episode is discarded. None: the job's reward scores all of them."""
    causes: tuple[Cause, ...] = ()
    """[G], why each episode ended; empty: by their own decision. See `agents.records.Cause`."""
    details: tuple[str, ...] = ()
    """[G], the messages that go with the causes."""
    turns: Tensor | None = None
    """[R, T] int64, the turn of its episode that a token with a loss belongs to, from 0 in the order of sampling; -1
    where loss_mask is 0. None: a completion is one turn."""
    turn_rewards: Tensor | None = None
    """[G, S] float32, rewards of the turns alone, at most S in an episode; 0 where there is none."""
    turn_states: Tensor | None = None
    """[G, S] int64; turns of the group with equal numbers began in equal states. -1: the episode has no such turn."""
    agents: tuple[str, ...] = ()
    """[K], the agents by name that train; empty: there is one, without a name. Then the next three are None."""
    row_agents: Tensor | None = None
    """[R] int64, the agent, of `agents`, whose conversation a row is; -1: it does not train."""
    agent_rewards: Tensor | None = None
    """[G, K] float32, as `rewards` for each agent: its own reward, or else the episode's, and those of its own turns.
    NaN: the reward of the episode, once that is known."""
    turn_agents: Tensor | None = None
    """[G, S] int64, the agent of each turn; -1: the episode has no such turn."""
    pictures: dict[str, ProcessedPicture] = field(default_factory=dict)
    """By digest, those that rows have after the prompt."""
    placed_pictures: tuple[tuple[PlacedPicture, ...], ...] = ()
    """[R], of each row, in order; empty: no row has one."""
    of_policies: dict[str, SampleGroup] = field(default_factory=dict)
    """Worker group that trains a further policy -> the same episodes as that policy learns from them: agents of other
    policies do not train there, and the prompt is what its own histories begin with. The reward stage parts them."""

    @property
    def index(self) -> int:
        return self.prompt.index

    @property
    def num_episodes(self) -> int:
        """G"""
        if self.rewards is not None:
            return len(self.rewards)
        return len(self.loss_mask) if self.trajectories is None else int(self.trajectories.max()) + 1

    @property
    def row_lengths(self) -> Tensor:
        """[R] int64, number of tokens of each row."""
        return self.loss_mask.sum(-1).long() if self.lengths is None else self.lengths

    @property
    def extents(self) -> Tensor:
        """[R] int64, number of tokens of each row up to the last with a loss; nothing is computed for later ones."""
        if self.lengths is None:
            return self.loss_mask.sum(-1).long()
        numbers = torch.arange(1, self.loss_mask.shape[1] + 1)
        return numbers.where(self.loss_mask != 0, 0).amax(-1)

    @property
    def is_discarded(self) -> Tensor:
        """[G] bool; the episode ended by what the policy cannot have caused, so nothing is learned from it."""
        if not self.causes:
            return torch.zeros(self.num_episodes, dtype=torch.bool)
        return torch.tensor([cause in NOT_OF_POLICY for cause in self.causes])

    @property
    def num_counted(self) -> int:
        """Episodes that are not discarded."""
        return self.num_episodes - sum(cause in NOT_OF_POLICY for cause in self.causes)

    @property
    def computed_ids(self) -> Tensor:
        """[R, T] int64, `completion_ids` without those of agents that do not train: they may be of a model with another
        vocabulary."""
        if self.row_agents is None:
            return self.completion_ids
        return self.completion_ids.masked_fill((self.row_agents < 0)[:, None], 0)

    def pictures_of_row(self, row: int, first: int = 0, end: int | None = None) -> Pictures | None:
        """The pictures of a row after its prompt, among its tokens from `first` to before `end`; their places are
        counted from the row's first token."""
        placed = self.placed_pictures[row] if self.placed_pictures else ()
        there = (one for one in placed if first <= one.begin and (end is None or one.begin < end))
        return pictures_of((one.begin, self.pictures[one.digest]) for one in there)

    @property
    def has_pictures(self) -> bool:
        """Whether the prompt or a row has pictures."""
        return self.prompt.pictures is not None or bool(self.pictures)

    def by_episode(self, values: Tensor) -> Tensor:
        """[G], sums over the rows of each episode of values [R]."""
        if self.trajectories is None or len(values) == self.num_episodes:
            return values
        return values.new_zeros(self.num_episodes).index_add_(0, self.trajectories, values)

    def token_versions(self) -> Tensor:
        """[R, T] int64, the version of the weights that sampled each token; arbitrary where loss_mask is 0."""
        versions = torch.full(self.loss_mask.shape, self.policy_version, dtype=torch.int64)
        for row, segments in zip(versions, self.segments, strict=False):
            begin = 0
            for segment in segments:
                row[begin : begin + segment.num_tokens] = segment.policy_version
                begin += segment.num_tokens
        return versions

    def tokens_by_version(self) -> dict[int, int]:
        """Policy version -> number of tokens that its weights sampled."""
        if not self.segments:  # most groups; every step asks each of them
            num_tokens = int(self.loss_mask.sum())
            return {self.policy_version: num_tokens} if num_tokens else {}
        versions, counts = self.token_versions()[self.loss_mask.bool()].unique(return_counts=True)
        return dict(zip(versions.tolist(), counts.tolist(), strict=True))

    def digest(self) -> str:
        """Hexadecimal digest of the prompt with its pictures, the sampled tokens, their log-probabilities, the versions
        that sampled them, and their experts and what sampling left, if these were recorded; if other authors have
        written some, of all tokens, and of the rewards and causes."""
        mask, sha = self.loss_mask.bool(), hashlib.sha256(str(self.index).encode())
        parts = [self.prompt.token_ids, mask.sum(-1)]
        if self.prompt.pictures is not None:
            sha.update(self.prompt.pictures.digest.encode())
        sha.update("".join(f"{one.begin} {one.digest}" for row in self.placed_pictures for one in row).encode())
        if self.lengths is not None:
            is_token = torch.arange(mask.shape[1]) < self.lengths[:, None]
            parts += [self.lengths, mask[is_token], self.completion_ids[is_token]]
            sha.update("|".join(self.causes).encode())
        parts += [one for one in (self.rewards, self.row_agents, self.agent_rewards) if one is not None]
        parts += [one[mask] for one in (self.completion_ids, self.rollout_logprobs, self.token_versions())]
        if self.prompt_experts is not None and self.experts is not None:
            parts += [self.prompt_experts, self.experts[mask[:, : self.experts.shape[1]]]]
        if self.kept_tokens is not None:
            parts += [self.kept_tokens.ids, self.kept_tokens.counts]
        for part in parts:
            sha.update(part.contiguous().numpy().tobytes())
        for name, group in self.of_policies.items():
            sha.update(f"{name}|{group.digest()}".encode())
        return sha.hexdigest()[:DIGEST_LENGTH]

    def subset(self, rows: slice) -> SampleGroup:
        """A subset of the rows, with the same prompt and the same episodes. A row whose shared tokens are in a row
        outside the subset has them by itself."""
        names = (
            "completion_ids",
            "loss_mask",
            "rollout_logprobs",
            "ref_logprobs",
            "truncated",
            "segments",
            "experts",
            "lengths",
            "trajectories",
            "turns",
            "row_agents",
            "placed_pictures",
        )
        taken = {name: getattr(self, name) for name in names}
        taken = {name: None if value is None else value[rows] for name, value in taken.items()}
        taken["kept_tokens"] = None if self.kept_tokens is None else self.kept_tokens.rows(rows)
        if self.shared is not None and self.shared_with is not None:
            first, shared_with = rows.start or 0, self.shared_with[rows]
            is_inside = shared_with >= first
            taken["shared"] = self.shared[rows].where(is_inside, 0)
            taken["shared_with"] = (shared_with - first).where(is_inside, -1)
        return replace(self, **taken)


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredGroup:
    """A group with its rewards. Made by the reward stage."""

    samples: SampleGroup
    rewards: Tensor
    """[G] float32; NaN for a discarded episode."""
    agent_rewards: Tensor | None = None
    """[G, K] float32, the reward of each agent, see `SampleGroup.agents`; NaN for a discarded episode."""
    completions: tuple[str, ...]
    """[G], the completions as text, end token removed; of an episode its last turn."""
    outcomes: tuple[str, ...] = ()
    """[G], the outcome of each check, see rlinf_algos.rewards.Outcome; "" for an episode that the rule did not score;
    empty if nothing was checked."""
    answers: tuple[str | None, ...] = ()
    """The answer extracted from each completion; None if there was none."""
    parts: Tensor | None = None
    """[G, K] float32, the components of a weighted reward without their weights, NaN for a discarded episode; None: the
    reward has no components."""
    part_weights: Tensor | None = None
    """[K] float32"""

    @property
    def counted_rewards(self) -> Tensor:
        """The rewards of the episodes that are not discarded; there may be none."""
        return self.rewards[~self.samples.is_discarded] if self.samples.causes else self.rewards


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedGroup:
    """A group with the actor's log-probabilities of its tokens. Sent by the actor for `rlinf check`."""

    samples: SampleGroup
    actor_logprobs: Tensor
    """[G, T] float32, nats, at the rollout's temperature; 0 where loss_mask is 0."""
    quantized_logprobs: Tensor | None = None
    """The same with the weights that the engine serves, if it serves the actor's in quantized form."""
    policy_version: int
    """The actor's policy version when it computed them."""


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class ExampleBatch:
    """One shard of a batch for supervised training. Fed by the driver."""

    shard: int
    token_ids: Tensor
    """[B, L + T] int64, prompt and answer, right-padded."""
    loss_mask: Tensor
    """[B, L + T] float32; 1 on the tokens to learn."""
    pictures: tuple[Pictures | None, ...] = ()
    """[B], those of the prompts; empty: all are text alone."""

    def to(self, device: torch.device) -> ExampleBatch:
        return replace(self, token_ids=self.token_ids.to(device), loss_mask=self.loss_mask.to(device))


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """A text to imitate, for supervised training. Fed by the driver.

    Example: a prompt of two tokens and an answer of two: token_ids = [7, 8, 5, 2], loss_mask = [0, 0, 1, 1]
    """

    index: int
    """Place among the examples of its step or evaluation, from 0; its key on every channel."""
    token_ids: Tensor
    """[L] int64, no padding."""
    loss_mask: Tensor
    """[L] float32; 1 on the tokens to learn, which need not be neighbours. The first token has none, since nothing
    predicts it."""
    pictures: Pictures | None = None
    """What a vision-language model sees; None: the text is all."""


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class Preference:
    """Two answers to a prompt, of which the first is preferred. Fed by the driver."""

    index: int
    """Place among the pairs of its step or evaluation, from 0; its key on every channel."""
    pictures: Pictures | None = None
    """Those of the prompt, for a vision-language model; None: it is text alone."""
    prompt_ids: Tensor
    """[L] int64, no padding."""
    completion_ids: Tensor
    """[2, T] int64, the preferred answer and the other; arbitrary where loss_mask is 0."""
    loss_mask: Tensor
    """[2, T] float32; 1 on the tokens of each answer, then 0."""
    ref_logprobs: Tensor | None = None
    """[2] float64, nats, log-probability of each answer by the reference; None: not known yet."""

    def group(self) -> SampleGroup:
        """The pair as a group of two completions, which are batched in the same way."""
        return SampleGroup(
            prompt=Prompt(index=self.index, token_ids=self.prompt_ids, reference_answer="", pictures=self.pictures),
            completion_ids=self.completion_ids,
            loss_mask=self.loss_mask,
            rollout_logprobs=torch.zeros_like(self.loss_mask),
            policy_version=0,
        )


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class Measures:
    """What an evaluation found of one example."""

    index: int
    values: Tensor
    """[K] float64; the trainer's objective says what they are."""
