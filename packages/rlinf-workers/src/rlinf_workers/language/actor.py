"""Actor: trains a language model on scored groups. Here a reward turns into a gradient.

scored groups -> advantages and micro-batches (learning_groups.py) -> policy loss (actor_loss.py) -> the backend's
gradient -> one AdamW step

Which advantage, which loss and how many steps is the algorithm's (rlinf_algos.algorithm); who holds the model is the
backend's business (trainers/base.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from rlinf_algos.algorithm import Algorithm
from rlinf_comm.records import record
from rlinf_workers.execution.ports import Reader, Writer
from rlinf_workers.language.actor_loss import ActorLoss
from rlinf_workers.language.critic import Critic
from rlinf_workers.language.learning_groups import MicroBatch, Updates
from rlinf_workers.language.logprob_gap import LogprobGap, k3
from rlinf_workers.models.language_model import ModelSettings, load_tokenizer
from rlinf_workers.models.lora import LoraModel, LoraSettings
from rlinf_workers.models.trainable import CompletionBatch, TokenModel, ValueModel
from rlinf_workers.records.language import ComparedGroup, ExampleBatch, SampleGroup, ScoredGroup
from rlinf_workers.trainers.base import BackendSettings, Evaluation, OptimizerSettings, Trainable
from rlinf_workers.trainers.warm_start import WarmStartedWorker

CHECK_OPTIMIZER = OptimizerSettings(learning_rate=3e-4)
"""Of the step that a check takes: every weight moves by about so much, more than rounding in bfloat16 hides."""


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class ActorSettings:
    """What and how the actor trains."""

    model: ModelSettings
    algorithm: Algorithm
    optimizer: OptimizerSettings
    critic: OptimizerSettings | None = None
    """The critic's; needed where the algorithm has one."""
    warm_start: OptimizerSettings | None = None
    backend: BackendSettings = field(default_factory=BackendSettings)
    """Its shards are those of a batch."""
    lora: LoraSettings | None = None
    """An adapter is trained in place of the model; the model has weights."""
    knows_reference: bool = False
    """The reference is the model without its adapter, and groups come without its log-probabilities."""
    micro_batch_groups: int
    """Groups in one forward and backward, padded to one length."""
    max_tokens_per_micro_batch: int | None = None
    """Tokens in one forward and backward, packed without padding; None: as `micro_batch_groups` says."""
    balance_shards: bool = False
    """Gathers the groups of a step and gives each shard equally many tokens; needs a budget of tokens."""
    num_prompts: int
    """Groups that a step trains on; with oversampling more arrive."""
    max_completion_tokens: int
    """The rollout's limit."""
    temperature: float
    """The rollout's."""


class Actor(WarmStartedWorker):
    """Policy-gradient training of a causal language model, data-parallel over its ranks."""

    def __init__(self, settings: ActorSettings) -> None:
        self._settings = settings
        algorithm = settings.algorithm
        self._optimizer = settings.optimizer
        balances_routers = algorithm.router_aux_coef > 0
        policy: Trainable = TokenModel(settings.model, settings.temperature, balances_routers=balances_routers)
        if settings.lora is not None:
            policy = LoraModel(policy, settings.model, settings.lora)
        self._backends = {"": settings.backend.make(policy, self, self._optimizer)}
        self._critic = None
        if algorithm.has_critic:
            assert settings.critic, "the algorithm has a critic, so have the settings"
            self._backends["critic"] = settings.backend.make(ValueModel(settings.model), self, settings.critic)
            self._critic = Critic(algorithm, self._backends["critic"])
        self._loss = ActorLoss(algorithm)
        self._updates = Updates(
            algorithm,
            self,
            self._backend,
            self._critic.values if self._critic is not None else None,
            self._ref_logprobs if settings.knows_reference else None,
            num_shards=settings.backend.num_shards,
            micro_batch_groups=settings.micro_batch_groups,
            num_prompts=settings.num_prompts,
            max_completion_tokens=settings.max_completion_tokens,
            max_tokens=settings.max_tokens_per_micro_batch,
            balances=settings.balance_shards,
        )

    # -- stages ----------------------------------------------------------------------------------------------------

    def train(self, scored: Reader[ScoredGroup]) -> None:
        """Stage: the groups of a step, `algorithm.num_updates` optimizer steps. An ordered stage has the same sums to
        the bit however groups come; another begins with those that come first."""
        self._optimize_with(None)
        if self._critic is not None:
            self._critic.start_from(self._backend)
        # Every token once; without log-probabilities of before, an update after the first has moved the policy already.
        anchors_at_rollout = self._settings.algorithm.proximal_policy == "rollout"
        num_compared = 1 if anchors_at_rollout else self._settings.algorithm.num_minibatches
        gaps: list[list[float]] = []
        for micro_batches in self._updates.of_step(scored):
            self._loss.compares_engine = len(gaps) < num_compared
            gaps.append(self._update(micro_batches))
        self._report_gap(gaps[:num_compared])

    def imitate(self, examples: Reader[ExampleBatch]) -> None:
        """Stage: supervised training on (prompt, answer) pairs; one optimizer step for each batch of `num_shards`
        shards."""
        assert self._settings.warm_start, "the flow has a warm start, so have the settings"
        self._optimize_with(self._settings.warm_start)
        self._backend.begin(2)
        for chunk in examples:
            for batch in chunk:
                self._add_examples(batch)
                if batch.shard == self._backend.shards[-1]:
                    tokens, loss = self._backend.reduce()
                    self._step(tokens)
                    self.record("warm_start/loss", loss / tokens)
                    self._backend.begin(2)

    def compare(self, samples: Reader[SampleGroup], compared: Writer[ComparedGroup]) -> None:
        """Stage of `rlinf check`: groups in, and out with what this actor says of their tokens. Then one optimizer step
        makes them likelier, so that there are new weights to hand over; records how far it moved the policy."""
        groups = sorted((group for chunk in samples for group in chunk), key=lambda group: group.index)
        said = self._updates.ask(groups, self._updates.logprobs)
        for group in groups:
            told = ComparedGroup(samples=group, actor_logprobs=said[group.index], policy_version=self._version)
            compared.put(told, key=group.index)
        self._optimize_with(CHECK_OPTIMIZER)
        self._backend.begin(1)
        for shard in self._backend.shards:
            for _, batch in self._updates.batches(groups, shard):
                self._backend.backward(shard, batch, partial(_likelihood, batch.loss_mask))
        self._step(self._backend.reduce()[0])
        moved = self._updates.ask(groups, self._updates.logprobs)
        sums = torch.zeros(len(self._backend.shards), 2, dtype=torch.float64)
        for group in groups:
            kl = k3((moved[group.index] - said[group.index]).double() * group.loss_mask).sum()
            sums[0] += torch.tensor([float(kl), float(group.loss_mask.sum())], dtype=torch.float64)
        total, tokens = self._backend.sum_over_shards(sums).tolist()
        if self.rank == 0:
            self.record("check/moved_kl", total / tokens)

    # -- one optimizer step ----------------------------------------------------------------------------------------

    def _update(self, micro_batches: Iterable[MicroBatch]) -> list[float]:
        """Returns the sums of the gap to the engine."""
        if self._settings.algorithm.chooses_tokens:
            micro_batches = self._loss.chosen(list(micro_batches), self._backend)
            micro_batches = list(micro_batches)
        self._backend.begin(self._loss.num_totals)
        if self._critic is not None:
            self._critic.begin()
        for batch in micro_batches:
            self._backward(batch)
        gap = self._policy_step()
        if self._critic is not None:
            recorded = self._critic.step()
            for name, value in recorded.items() if self.rank == 0 else ():
                self.record(name, value)
        return gap

    def _backward(self, batch: MicroBatch) -> None:
        if batch.for_policy is not None:
            loss = partial(self._loss.of, batch)
            self._backend.backward(batch.shard, batch.for_policy.sequences, loss, entropies=self._loss.knows_entropy)
        else:
            self._backend.count(batch.shard, self._loss.without_gradient(batch))
        if self._critic is not None and batch.for_critic is not None:
            self._critic.backward(batch.shard, batch.for_critic)

    def _policy_step(self) -> list[float]:
        divisor, loss, tokens, trained, *sums = self._backend.reduce()
        learning_rate = self._optimizer.learning_rate_at(self._backend.num_steps)
        grad_norm = self._step(divisor or 1.0)
        num_statistics = len(self._loss.statistics)
        sums, gap = sums[:num_statistics], sums[num_statistics:]
        recorded = {name: total / max(trained, 1.0) for name, total in zip(self._loss.statistics, sums, strict=True)}
        if self._loss.entropy_bonus.adapts:
            recorded["actor/entropy_coef"] = self._loss.entropy_bonus.weight
            if trained:
                self._loss.entropy_bonus.adapt(recorded["actor/entropy"])
        if self.rank:  # every rank has the same sums; one reports them
            return gap
        self.record("actor/loss", loss / (divisor or 1.0))
        self.record("actor/grad_norm", grad_norm)
        self.record("actor/learning_rate", learning_rate)
        self.record("actor/trained_token_fraction", trained / max(tokens, 1.0))
        for name, value in recorded.items():
            self.record(name, value)
        return gap

    def _report_gap(self, sums: Sequence[Sequence[float]]) -> None:
        """How far the engine and this actor before its first update were apart about the tokens of the step."""
        gap, found = LogprobGap.of(sums), [one for one in self.ranks.objects(self._loss.take_worst()) if one]
        if gap is None or self.rank:
            return
        worst = min(found, key=lambda one: one.order)
        self.record("rollout/logprob_gap_mean", gap.mean)
        self.record("rollout/logprob_gap_p999", min(gap.quantile(0.999), worst.gap))
        self.record("rollout/logprob_gap_max", worst.gap)
        self.record("rollout/logprob_gap_kl", gap.kl)
        before, token, after = (self._tokenizer.decode(ids) for ids in (worst.before, (worst.token,), worst.after))
        self.show(
            {
                "worst_token": token,
                "before": before,
                "after": after,
                "prompt_index": worst.prompt,
                "position": worst.position,
                "actor_logprob": worst.actor_logprob,
                "rollout_logprob": worst.rollout_logprob,
            }
        )

    @cached_property
    def _tokenizer(self) -> Any:
        return load_tokenizer(self._settings.model.folder)

    def _ref_logprobs(self, batch: CompletionBatch) -> Tensor:
        return self._backend.forward(batch, adapter=False).logprobs

    def _add_examples(self, batch: ExampleBatch) -> None:
        batch = replace(batch, token_ids=batch.token_ids.to(self.device), loss_mask=batch.loss_mask.to(self.device))

        def loss_of(answers: Evaluation) -> tuple[Tensor, list[float]]:
            mask = batch.loss_mask[:, 1:]
            loss = (-answers.logprobs * mask).sum()
            return loss, [float(mask.sum()), float(loss.detach())]

        self._backend.backward(batch.shard, batch, loss_of)

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def _state(self) -> dict[str, Any]:
        adapts = self._settings.algorithm.kl_target is not None
        state = {"kl_coef": self._updates.advantages.kl_coef} if adapts else {}
        return state | self._loss.entropy_bonus.state()

    def _restore(self, state: Mapping[str, Any]) -> None:
        self._updates.advantages.kl_coef = float(state.get("kl_coef", self._updates.advantages.kl_coef))
        self._loss.entropy_bonus.restore(state)


def _likelihood(mask: Tensor, answers: Evaluation) -> tuple[Tensor, list[float]]:
    """A loss that makes tokens likelier, and their number."""
    return -(answers.logprobs * mask).sum(), [float(mask.sum())]
