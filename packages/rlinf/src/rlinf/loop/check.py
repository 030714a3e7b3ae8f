"""Compares engine and trainer token by token: what `rlinf check` runs.

sync -> generate -> the trainer computes the log-probabilities -> one optimizer step -> sync -> generate -> ...

The second round tests weights that were received by a sync only: an engine that read the model's files and ignores what
it is sent passes the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from rlinf.glossary import policy_prefix
from rlinf.jobs.agreement import MismatchVerdict, judge
from rlinf.jobs.reasoning.job import ReasoningJob
from rlinf.loop.brief_session import brief_session
from rlinf.run_folder import RunFolder
from rlinf_workers import COMPUTE_SPAN, SYNC_SPAN, FlowRun
from rlinf_workers.roles import ComparedGroup, LogprobMismatch, WorstToken, mismatch_sums, worst_token

NUM_PROMPTS, NUM_WORST = 8, 5
ROUNDS = ("as loaded", "after a step")
TELLING = 10.0
"""Factor of the bound by which a step has to move the policy, so that an engine that missed it is detected."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedRound:
    """The result of one round."""

    policy: str | None = None
    """A further policy; None: the policy of model.path."""
    name: str
    num_tokens: int
    gap: LogprobMismatch
    """To the trainer with the weights that the engine serves."""
    trained_gap: LogprobMismatch | None = None
    """To the trainer with its own weights, if the engine's are quantized: what training will measure."""
    agreement: MismatchVerdict
    worst: Sequence[WorstToken]
    """The worst token of each completion, the worst first."""
    engine_versions: frozenset[int]
    """The policy version in the completions."""
    trainer_version: int
    moved_kl: float
    """Nats per token by which the step after this round moved the trainer."""
    sync_s: float
    generate_s: float

    @property
    def has_right_version(self) -> bool:
        return self.engine_versions == {self.trainer_version}


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """The rounds of a check."""

    rounds: Sequence[CheckedRound]
    start_s: float
    """Seconds until all processes had started and received weights."""
    weights_bytes: int
    """Size of the weights that a sync sends."""

    @property
    def passes(self) -> bool:
        return all(one.agreement.agrees and one.has_right_version for one in self.rounds)

    @property
    def can_tell_versions(self) -> bool:
        """Whether the steps between the rounds were large enough to detect an engine that missed them."""
        first_rounds = {one.policy: one for one in reversed(self.rounds)}
        return all(one.moved_kl >= TELLING * one.agreement.kl_bound for one in first_rounds.values())


def check(job: ReasoningJob, folder: RunFolder) -> Check:
    """Runs the rounds of a prepared job on the devices of its recipe.

    Raises: UserError before a process starts; RunFailed if a worker dies or raises; the message names a weight that did
    not arrive.
    """
    flows = job.build(folder.path)
    checked = job.check_flows(flows.train)
    with brief_session(job, folder, flows, list(checked.values()), num_rounds=len(ROUNDS)) as session:
        rounds = []
        for policy, flow in checked.items():
            for number, name in enumerate(ROUNDS):
                feeds = {"prompts": job.feeds(number)["prompts"][:NUM_PROMPTS]}
                rounds.append(_checked(job, policy, name, session.run_flow(flow, step=number, feeds=feeds)))
        edges = [edge for flow in checked.values() for edge in flow.graph().weight_edges]
        sizes = map(session.executor.weights_bytes, edges)
        return Check(rounds=rounds, start_s=session.start_s, weights_bytes=sum(sizes))


def _checked(job: ReasoningJob, policy: str | None, name: str, run: FlowRun) -> CheckedRound:
    groups: list[ComparedGroup] = run.collected["compared"]
    gap, arithmetic, trained_gap = _gap(groups), job.arithmetics[policy], None
    if all(group.quantized_logprobs is not None for group in groups):
        # With the same weights in FP8 on both sides, only the rounding of the computation remains.
        groups = [replace(one, actor_logprobs=one.quantized_logprobs) for one in groups]
        gap, trained_gap, arithmetic = _gap(groups), gap, replace(arithmetic, quantization=None)
    worst = sorted((one for group in groups for one in _worst(group)), key=lambda token: token.order)
    return CheckedRound(
        policy=policy,
        name=name if policy is None else f"{policy}, {name}",
        num_tokens=int(gap.num_tokens),
        gap=gap,
        trained_gap=trained_gap,
        agreement=judge(arithmetic, kl=gap.kl, p999=min(gap.quantile(0.999), worst[0].gap), largest=worst[0].gap),
        worst=worst[:NUM_WORST],
        engine_versions=frozenset(group.samples.policy_version for group in groups),
        trainer_version=groups[0].policy_version,
        moved_kl=run.metrics[policy_prefix(policy) + "check/moved_kl"],
        sync_s=sum(span.duration_s for span in run.spans if span.category == SYNC_SPAN),
        generate_s=sum(
            span.duration_s for span in run.spans if span.category == COMPUTE_SPAN and span.name == "rollout"
        ),
    )


def _gap(groups: Sequence[ComparedGroup]) -> LogprobMismatch:
    gap = LogprobMismatch.of([_sums(group) for group in groups])
    assert gap is not None, "every completion has a token"
    return gap


def _sums(group: ComparedGroup) -> Tensor:
    drift = (group.actor_logprobs - group.samples.rollout_logprobs).double()
    return mismatch_sums(drift, group.samples.loss_mask)


def _worst(group: ComparedGroup) -> list[WorstToken]:
    """The worst token of each completion."""
    samples = group.samples
    columns = (group.actor_logprobs, samples.rollout_logprobs, samples.completion_ids, samples.loss_mask)
    rows = zip(*(column.split(1) for column in columns), strict=True)
    tokens = [worst_token(actor, rollout, ids, mask, (samples.index,)) for actor, rollout, ids, mask in rows]
    return [token for token in tokens if token is not None]
