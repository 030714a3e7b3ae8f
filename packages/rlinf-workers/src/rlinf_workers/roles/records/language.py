"""Items of language flows. Legend: G completions of a prompt, L prompt tokens, T completion tokens."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlinf_comm import record
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


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """Consecutive tokens of a completion that one version of the weights sampled."""

    num_tokens: int
    """At least 1."""
    policy_version: int


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class SampleGroup:
    """The completions sampled for one prompt.

    Example: G = 2 completions, T = 3 tokens, the second one ended after 2:
        completion_ids = [[5, 9, 2], [5, 2, 0]], loss_mask = [[1, 1, 1], [1, 1, 0]]
    """

    prompt: Prompt
    completion_ids: Tensor
    """[G, T] int64; arbitrary where loss_mask is 0."""
    loss_mask: Tensor
    """[G, T] float32; 1 on sampled tokens, the end token included."""
    rollout_logprobs: Tensor
    """[G, T] float32, nats, by the engine that sampled, at its temperature; 0 where loss_mask is 0."""
    ref_logprobs: Tensor | None = None
    """[G, T] float32, by the frozen reference; set by the reference stage if the flow has one."""
    policy_version: int
    """Version of the weights that sampled the first tokens, the oldest among the completions; counts optimizer steps
    from 0."""
    truncated: Tensor | None = None
    """[G] bool; the completion reached its token limit without ending. None: not known."""
    segments: tuple[tuple[Segment, ...], ...] = ()
    """For each completion, the versions that sampled its tokens, from the first token on; empty: `policy_version`
    sampled all tokens of the group."""

    @property
    def index(self) -> int:
        return self.prompt.index

    def token_versions(self) -> Tensor:
        """[G, T] int64, the version of the weights that sampled each token; arbitrary where loss_mask is 0."""
        versions = torch.full(self.loss_mask.shape, self.policy_version, dtype=torch.int64)
        for row, segments in zip(versions, self.segments, strict=False):
            begin = 0
            for segment in segments:
                row[begin : begin + segment.num_tokens] = segment.policy_version
                begin += segment.num_tokens
        return versions

    def tokens_by_version(self) -> dict[int, int]:
        """Policy version -> number of tokens that its weights sampled."""
        versions, counts = self.token_versions()[self.loss_mask.bool()].unique(return_counts=True)
        return dict(zip(versions.tolist(), counts.tolist(), strict=True))

    def digest(self) -> str:
        """Hexadecimal digest of the prompt, the sampled tokens, their log-probabilities and the versions that sampled
        them."""
        mask, sha = self.loss_mask.bool(), hashlib.sha256(str(self.index).encode())
        parts = (self.completion_ids, self.rollout_logprobs, self.token_versions())
        for part in (self.prompt.token_ids, mask.sum(-1), *(one[mask] for one in parts)):
            sha.update(part.contiguous().numpy().tobytes())
        return sha.hexdigest()[:DIGEST_LENGTH]

    def subset(self, rows: slice) -> SampleGroup:
        """A subset of the completions, with the same prompt."""
        names = ("completion_ids", "loss_mask", "rollout_logprobs", "ref_logprobs", "truncated", "segments")
        taken = {name: getattr(self, name) for name in names}
        return replace(self, **{name: None if value is None else value[rows] for name, value in taken.items()})


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredGroup:
    """A group with its rewards. Made by the reward stage."""

    samples: SampleGroup
    rewards: Tensor
    """[G] float32"""
    completions: tuple[str, ...]
    """The completions as text, end token removed; for display."""
    outcomes: tuple[str, ...] = ()
    """The outcome of each check, see rlinf_algos.rewards.Outcome; empty if nothing was checked."""
    answers: tuple[str | None, ...] = ()
    """The answer extracted from each completion; None if there was none."""
    parts: Tensor | None = None
    """[G, K] float32, the components of a weighted reward without their weights; None: the reward has no components."""
    part_weights: Tensor | None = None
    """[K] float32"""


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedGroup:
    """A group with the actor's log-probabilities of its tokens. Sent by the actor for `rlinf check`."""

    samples: SampleGroup
    actor_logprobs: Tensor
    """[G, T] float32, nats, at the rollout's temperature; 0 where loss_mask is 0."""
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


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class Preference:
    """Two answers to a prompt, of which the first is preferred. Fed by the driver."""

    index: int
    """Place among the pairs of its step or evaluation, from 0; its key on every channel."""
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
            prompt=Prompt(index=self.index, token_ids=self.prompt_ids, reference_answer=""),
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
