"""Actor: trains a language model on scored groups, turning rewards into gradients.

scored groups -> advantages (advantages.py) -> micro-batches (micro_batches.py) -> policy loss (actor_loss.py) -> the
backend's gradient -> one AdamW step

`train` does all of it; `rlinf.program.reasoning` makes the same calls in one process. The algorithm decides which
advantage, which loss and how many steps (rlinf_algos.algorithm); the backend holds the model (trainers/base.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from rlinf_algos import Algorithm, advantage_takes
from rlinf_comm import record
from rlinf_workers.balance import balanced
from rlinf_workers.collectives import exchanged
from rlinf_workers.execution.ports import Reader, Writer
from rlinf_workers.models.language_model import ModelSettings, load_tokenizer
from rlinf_workers.models.lora import LoraModel, LoraSettings
from rlinf_workers.models.packed import PackedBatch, computed_tokens
from rlinf_workers.models.trainable import CompletionBatch, LogitNorms, TokenModel, ValueModel
from rlinf_workers.roles.language.actor_loss import ActorLoss
from rlinf_workers.roles.language.advantages import AdvantageMaker, LearningGroup, choose_groups, signals, whiten
from rlinf_workers.roles.language.critic import Critic
from rlinf_workers.roles.language.logprob_mismatch import LogprobMismatch, k3
from rlinf_workers.roles.language.micro_batches import MicroBatch, MicroBatches, num_tokens_of
from rlinf_workers.roles.records.language import ComparedGroup, ExampleBatch, SampleGroup, ScoredGroup
from rlinf_workers.roles.staleness import Staleness
from rlinf_workers.trainers.base import BackendSettings, ModelAdapter, ModelOutputs, OptimizerSettings
from rlinf_workers.trainers.sft_warm_up import WarmedUpWorker

CHECK_OPTIMIZER = OptimizerSettings(learning_rate=3e-4)
"""Used for the step of `rlinf check`: every weight moves by about this much, more than bfloat16 rounding hides."""


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class ActorSettings:
    """Settings of the actor."""

    model: ModelSettings
    algorithm: Algorithm
    optimizer: OptimizerSettings
    critic: OptimizerSettings | None = None
    """Optimizer of the critic; required if the algorithm has one."""
    sft_warm_up: OptimizerSettings | None = None
    backend: BackendSettings = field(default_factory=BackendSettings)
    """Its shards are the shards of a batch."""
    lora: LoraSettings | None = None
    """Train an adapter instead of the model; the model must have weights."""
    knows_reference: bool = False
    """The reference is the model without its adapter; groups arrive without the reference's log-probabilities."""
    micro_batch_groups: int
    """Groups in one forward and backward pass, padded to one length."""
    router_replay: bool = False
    """Computes with the experts that the engine chose (models/router_replay.py); needs `max_tokens_per_micro_batch`."""
    freeze_vision_tower: bool = False
    """Of a vision-language model, trains the decoder alone."""
    max_tokens_per_micro_batch: int | None = None
    """Tokens in one forward and backward pass, packed without padding; None: `micro_batch_groups` decides."""
    balance_shards: bool = False
    """Collects all groups of a step, then balances tokens over shards; needs `max_tokens_per_micro_batch`."""
    num_prompts: int
    """Groups that a step trains on; more arrive with oversampling."""
    max_completion_tokens: int
    """The rollout's limit."""
    temperature: float
    """The rollout's."""
    num_agents: int = 0
    """Agents by name that train; 0: there is one, without a name."""
    policy: str = ""
    """Name of a further policy: its metrics begin with `policy/NAME/`; empty: the job's policy."""


class Actor(WarmedUpWorker):
    """Policy-gradient training of a causal language model, data-parallel over its ranks."""

    def __init__(self, settings: ActorSettings) -> None:
        self._settings = settings
        algorithm = settings.algorithm
        self._optimizer = settings.optimizer
        balances_routers = algorithm.router_aux_coef > 0
        policy: ModelAdapter = TokenModel(
            settings.model,
            settings.temperature,
            balances_routers=balances_routers,
            replays_routers=settings.router_replay,
            freezes_vision=settings.freeze_vision_tower,
        )
        if settings.lora is not None:
            policy = LoraModel(policy, settings.model, settings.lora)
        self._backends = {"": settings.backend.make(policy, self, self._optimizer)}
        self._critic = None
        if algorithm.has_critic:
            assert settings.critic, "the algorithm has a critic, but the settings have no optimizer for it"
            self._backends["critic"] = settings.backend.make(ValueModel(settings.model), self, settings.critic)
            self._critic = Critic(algorithm, self._backends["critic"])
        self._loss = ActorLoss(algorithm, replays_routers=settings.router_replay)
        self._advantages = AdvantageMaker(algorithm, max_completion_tokens=settings.max_completion_tokens)
        needs_all = algorithm.gathers_whole_step or settings.balance_shards or settings.knows_reference
        self._gathers = bool(needs_all)
        """Whether all groups of a step are collected before its first micro-batch."""
        self._batches = MicroBatches(
            algorithm,
            self.device,
            self._backend.shards,
            num_shards=settings.backend.num_shards,
            num_groups=settings.micro_batch_groups,
            max_tokens=settings.max_tokens_per_micro_batch,
            max_completion_tokens=settings.max_completion_tokens,
            has_critic=self._critic is not None,
            is_gathered=self._gathers,
        )
        self._staleness = Staleness(algorithm.max_staleness)
        self._gaps: list[list[float]] = []
        """For each update of this step, the sums of the log-prob mismatch to the engine."""
        self._kl_sums = torch.zeros(0)
        """[shards of this rank, 2] float64: the KL in the reward (nats) and the number of completions."""
        self._num_learned = 0
        """Micro-batches of the step so far."""

    # -- stages ----------------------------------------------------------------------------------------------------

    def train(self, scored: Reader[ScoredGroup]) -> None:
        """Stage: trains on the groups of a step with `algorithm.num_updates` optimizer steps. An ordered stage has
        bitwise equal sums in whatever order groups arrive; an unordered one starts with the groups that arrive
        first."""
        self.begin_step()
        chunks = [[group for chunk in scored for group in chunk]] if self._gathers else scored
        groups = (group for chunk in chunks for group in self.learning_groups(chunk))
        for minibatch in self.minibatches(groups):
            micro_batches = self.micro_batches(minibatch)
            self.begin_update()
            for batch in micro_batches:
                self.learn(batch)
            self.end_update()
        self.end_step()

    def imitate(self, examples: Iterable[Sequence[ExampleBatch]]) -> None:
        """Stage: supervised training on (prompt, answer) pairs; one optimizer step for each batch of `num_shards`
        shards."""
        assert self._settings.sft_warm_up, "the flow has an SFT warm-up, but the settings have none"
        self._optimize_with(self._settings.sft_warm_up)
        self._backend.begin(2)
        for chunk in examples:
            for batch in chunk:
                self._add_examples(batch)
                if batch.shard == self._backend.shards[-1]:
                    tokens, loss = self._backend.finish_backward()
                    self._step(tokens)
                    self.record("sft_warm_up/loss", loss / tokens)
                    self._backend.begin(2)

    def compare(self, samples: Reader[SampleGroup], compared: Writer[ComparedGroup]) -> None:
        """Stage of `rlinf check`: re-scores rollouts with the trainer, then takes one max-likelihood step, so that
        there are new weights to sync; records how far the step moved the policy."""
        own = (group.of_policies.get(self.identity.role, group) for chunk in samples for group in chunk)
        groups = sorted(own, key=lambda group: group.index)
        before = self._batches.by_token(groups, self._logprobs)
        with self.weights_as_served() as is_quantized:
            quantized = self._batches.by_token(groups, self._logprobs) if is_quantized else {}
        for group in groups:
            rescored = ComparedGroup(
                samples=group,
                actor_logprobs=before[group.index],
                quantized_logprobs=quantized.get(group.index),
                policy_version=self._version,
            )
            compared.put(rescored, key=group.index)
        self._optimize_with(CHECK_OPTIMIZER)
        self._backend.begin(1)
        for shard in self._backend.shards:
            for _, batch in self._batches.batches(groups, shard):
                self._backend.backward(shard, batch, partial(_likelihood, batch.loss_mask))
        self._step(self._backend.finish_backward()[0])
        after = self._batches.by_token(groups, self._logprobs)
        sums = torch.zeros(len(self._backend.shards), 2, dtype=torch.float64)
        for group in groups:
            kl = k3((after[group.index] - before[group.index]).double() * group.loss_mask).sum()
            sums[0] += torch.tensor([float(kl), float(group.loss_mask.sum())], dtype=torch.float64)
        total, tokens = self._backend.sum_over_shards(sums).tolist()
        if self.rank == 0:
            self.record("check/moved_kl", total / tokens)

    def record(self, name: str, value: float, weight: float = 1.0) -> None:
        policy = self._settings.policy
        super().record(f"policy/{policy}/{name}" if policy else name, value, weight)

    # -- a training step, in the order of the calls ----------------------------------------------------------------

    def begin_step(self) -> None:
        """Begins a training step."""
        self._optimize_with(None)
        self._num_learned = 0
        self._staleness.begin_step(self._version)
        if self._critic is not None:
            self._critic.start_from(self._backend)
        self._gaps.clear()
        self._loss.take_worst()  # of a step that was abandoned
        self._kl_sums = torch.zeros(len(self._backend.shards), 2, dtype=torch.float64)
        self._batches.shared_out.clear()

    def learning_groups(self, scored: Sequence[ScoredGroup]) -> list[LearningGroup]:
        """The groups that the step trains on, with their advantages. If an update needs more than single groups, call
        it once with all groups of the step (in any order); otherwise with any subset."""
        for samples in (group.samples for group in scored):
            if self._settings.router_replay and samples.experts is None:
                raise ValueError(f"router_replay: the engine has not recorded the experts of prompt {samples.index}")
            self._staleness.add(samples.tokens_by_version(), f"completions of prompt {samples.index} have tokens")
        if not self._gathers:
            have_signal = self._signals(scored)
            if self._settings.algorithm.dynamic_sampling:
                scored = [group for group, has_signal in zip(scored, have_signal, strict=True) if has_signal]
            return self._with_advantages(scored)
        scored, minibatch_of = self._chosen(sorted(scored, key=lambda group: group.samples.index))
        if self._settings.max_tokens_per_micro_batch is not None:
            scored = self._shared_out(scored, minibatch_of)
        groups = self._before_updates(scored)
        for group in groups:
            group.minibatch = minibatch_of[group.index]
        return groups

    def minibatches(self, groups: Iterable[LearningGroup]) -> Iterator[Iterable[LearningGroup]]:
        """The groups of each optimizer step: minibatches, in each of the epochs."""
        algorithm = self._settings.algorithm
        if not self._gathers:
            yield groups
            return
        groups = list(groups)
        for _ in range(algorithm.num_epochs):
            for number in range(algorithm.num_minibatches):
                yield [group for group in groups if group.minibatch == number]

    def micro_batches(self, groups: Iterable[LearningGroup]) -> Iterable[MicroBatch]:
        """The micro-batches of an optimizer step. They are yielded while groups still arrive, unless the algorithm
        chooses tokens over all of them."""
        batches = self._batches.of(groups)
        return list(self._loss.chosen(list(batches), self._backend)) if self._loss.chooses_tokens else batches

    def begin_update(self) -> None:
        """Begins an optimizer step: zeroes the gradients."""
        self._loss.compares_engine = len(self._gaps) < self._num_compared
        self._backend.begin(self._loss.num_totals)
        if self._critic is not None:
            self._critic.begin()

    def learn(self, batch: MicroBatch) -> None:
        """Forward, loss and backward of a micro-batch: adds to the gradient."""
        if batch.for_policy is not None:
            self.count_tokens(*batch.for_policy.computed, passes=2 if self._settings.lora else 3)
            loss = partial(self._loss.of, batch)
            self._backend.backward(batch.shard, batch.for_policy.sequences, loss, entropies=self._loss.knows_entropy)
        else:
            self._backend.count(batch.shard, self._loss.without_gradient(batch))
        if self._critic is not None and batch.for_critic is not None:
            self.count_tokens(*batch.for_critic.computed, passes=3)
            self._critic.backward(batch.shard, batch.for_critic)
        self._num_learned += 1
        self.report_progress(self._num_learned, unit="micro-batches")

    def end_update(self) -> None:
        """Sums the gradient over shards and ranks, clips it, takes the optimizer step and records its statistics."""
        self._gaps.append(self._policy_step())
        if self._critic is not None:
            recorded = self._critic.step()
            for name, value in recorded.items() if self.rank == 0 else ():
                self.record(name, value)

    def end_step(self) -> None:
        """Ends a training step: adapts the weight of the KL, and records the log-prob mismatch to the engine."""
        if self._settings.algorithm.kl_target is not None:
            self._adapt_kl()
        self._staleness.record(self)
        self._report_gap(self._gaps[: self._num_compared])

    # -- which groups to train on, and what is computed before the first update ------------------------------------

    def _chosen(self, scored: Sequence[ScoredGroup]) -> tuple[list[ScoredGroup], dict[int, int]]:
        """Selects from all groups of the step, of all ranks, the ones to train on; also returns index -> minibatch."""
        algorithm, num_groups = self._settings.algorithm, self.step.num_items
        have_signal = self._signals(scored)
        positions = {index: index for index in range(num_groups)}
        if algorithm.dynamic_sampling:
            positions = choose_groups(scored, have_signal, self._backend, num_groups, self._settings.num_prompts)
            num_groups = len(positions)
        minibatch_of = {index: place * algorithm.num_minibatches // num_groups for index, place in positions.items()}
        return [group for group in scored if group.samples.index in positions], minibatch_of

    def _shared_out(self, scored: Sequence[ScoredGroup], minibatch_of: Mapping[int, int]) -> list[ScoredGroup]:
        """Balances tokens: replicas exchange groups until the shards of every update have about equally many tokens.
        All replicas know all lengths, so they compute the same shards. Returns the groups of this replica's shards."""
        algorithm, batches = self._settings.algorithm, self._batches
        sizes = torch.zeros(len(self._backend.shards), self.step.num_items, dtype=torch.int64)
        uses_all = batches.uses_all_groups or self._critic is not None
        for group, has_signal in zip(scored, self._have_signals(scored), strict=True):
            if has_signal or uses_all:
                sizes[0][group.samples.index] = num_tokens_of(group.samples)
        all_sizes = self._backend.sum_over_shards(sizes).tolist()
        for minibatch in range(algorithm.num_minibatches):
            members = sorted(index for index, number in minibatch_of.items() if number == minibatch)
            shards = balanced([all_sizes[index] for index in members], self._settings.backend.num_shards)
            batches.shared_out.update(zip(members, shards, strict=True))
        sent: list[list[ScoredGroup]] = [[] for _ in range(self.replicas.num_ranks)]
        for group in scored:
            sent[batches.shard_of(group.samples.index) % self.replicas.num_ranks].append(group)
        mine = [group for groups in exchanged(sent, self.replicas) for group in groups]
        return sorted(mine, key=lambda group: group.samples.index)

    def _before_updates(self, scored: Sequence[ScoredGroup]) -> list[LearningGroup]:
        """Computes what the updates need: log-probabilities of the reference, values, advantages, and the
        log-probabilities that anchor the ratio."""
        algorithm, by_token = self._settings.algorithm, self._by_token
        if self._settings.knows_reference:
            reference = by_token([group.samples for group in scored], self._ref_logprobs)
            scored = [
                replace(group, samples=replace(group.samples, ref_logprobs=reference[group.samples.index]))
                for group in scored
            ]
        samples = [group.samples for group in scored]
        values = {} if self._critic is None else by_token(samples, self._critic.values)
        recomputes = algorithm.num_updates > 1 and algorithm.proximal_policy == "actor"
        proximal = by_token(samples, self._logprobs) if recomputes else {}
        norms = by_token(samples, self._logit_norms) if algorithm.reads_logit_norms else {}
        groups = self._with_advantages(scored, values, norms)
        for group in groups:
            group.proximal_logprobs = proximal.get(group.index)
        if algorithm.whiten_advantages:
            whiten(groups, self._batches.shard_of, self._backend, num_agents=self._settings.num_agents)
        return groups

    def _have_signals(self, scored: Sequence[ScoredGroup]) -> list[bool]:
        algorithm = self._settings.algorithm
        return signals(
            scored, by_parts=algorithm.reads_parts, by_turns=advantage_takes(algorithm.advantage).works_on_turns
        )

    def _signals(self, scored: Sequence[ScoredGroup]) -> list[bool]:
        have_signal = self._have_signals(scored)
        for has_signal in have_signal:
            self.record("actor/groups_without_advantage", float(not has_signal))
        return have_signal

    def _with_advantages(
        self,
        scored: Sequence[ScoredGroup],
        values: Mapping[int, Tensor] | None = None,
        logit_norms: Mapping[int, Tensor] | None = None,
    ) -> list[LearningGroup]:
        """The groups with their advantages; records the KL in the reward, if there is one."""
        groups = self._advantages.make(scored, values, logit_norms)
        for group, before in zip(groups, scored, strict=True):
            if group.token_kl is not None:
                kl, tokens = group.token_kl.sum(-1), float(before.samples.loss_mask.sum())
                self.record("actor/ref_kl", float(kl.sum()) / max(tokens, 1.0), weight=tokens)
                row = self._backend.shards.index(self._batches.shard_of(group.index))
                num_samples = len(before.counted_rewards)
                self._kl_sums[row] += torch.tensor([float(kl.double().sum()), num_samples], dtype=torch.float64)
        return groups

    def _by_token(
        self, groups: Sequence[SampleGroup], forward: Callable[[CompletionBatch], Tensor]
    ) -> dict[int, Tensor]:
        """As `MicroBatches.by_token`; counts the tokens."""
        self.count_tokens(*computed_tokens(groups))
        return self._batches.by_token(groups, forward)

    def _logprobs(self, batch: CompletionBatch) -> Tensor:
        """[B, T], by the current policy."""
        return self._backend.forward(batch).logprobs

    def _logit_norms(self, batch: CompletionBatch) -> Tensor:
        """[B, T], by the current policy."""
        return self._backend.forward(LogitNorms(batch)).logit_norms

    def _ref_logprobs(self, batch: CompletionBatch) -> Tensor:
        """[B, T], by the model without its adapter, which chooses its own experts."""
        if isinstance(batch, PackedBatch):
            batch = replace(batch, experts=None)
        return self._backend.forward(batch, adapter=False).logprobs

    # -- the optimizer step, and what is recorded of it ------------------------------------------------------------

    def _policy_step(self) -> list[float]:
        divisor, loss, tokens, trained, *sums = self._backend.finish_backward()
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
        """Records the log-prob mismatch between the engine and this actor before its first update."""
        gap, tokens = LogprobMismatch.of(sums), [one for one in self.ranks.objects(self._loss.take_worst()) if one]
        if gap is None or self.rank:
            return
        worst = min(tokens, key=lambda one: one.order)
        self.record("rollout/logprob_gap_mean", gap.mean)
        self.record("rollout/logprob_gap_p999", min(gap.quantile(0.999), worst.gap))
        self.record("rollout/logprob_gap_max", worst.gap)
        self.record("rollout/logprob_gap_kl", gap.kl)
        before, token, after = (self._tokenizer.decode(ids) for ids in (worst.before, (worst.token,), worst.after))
        self.show(
            {
                **({"policy": self._settings.policy} if self._settings.policy else {}),
                "worst_token": token,
                "before": before,
                "after": after,
                "prompt_index": worst.prompt,
                "position": worst.position,
                "actor_logprob": worst.actor_logprob,
                "rollout_logprob": worst.rollout_logprob,
            }
        )

    def _adapt_kl(self) -> None:
        """Adapts the weight of the KL for the next step; the same on all ranks."""
        if self.rank == 0:
            self.record("actor/kl_coef", self._advantages.kl_coef)
        kl, num_samples = self._backend.sum_over_shards(self._kl_sums).tolist()
        if num_samples:
            self._advantages.adapt_kl_coef(kl, int(num_samples))

    @property
    def _num_compared(self) -> int:
        """The number of updates whose log-probabilities are compared with the engine's, so that every token counts
        once. Without log-probabilities from before the step only the first update counts: later ones use a moved
        policy."""
        algorithm = self._settings.algorithm
        return 1 if algorithm.proximal_policy == "rollout" else algorithm.num_minibatches

    @cached_property
    def _tokenizer(self) -> Any:
        return load_tokenizer(self._settings.model.folder)

    def _add_examples(self, batch: ExampleBatch) -> None:
        batch = batch.to(self.device)

        def loss_of(answers: ModelOutputs) -> tuple[Tensor, list[float]]:
            mask = batch.loss_mask[:, 1:]
            loss = (-answers.logprobs * mask).sum()
            return loss, [float(mask.sum()), float(loss.detach())]

        self._backend.backward(batch.shard, batch, loss_of)

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def _state(self) -> dict[str, Any]:
        adapts = self._settings.algorithm.kl_target is not None
        state = {"kl_coef": self._advantages.kl_coef} if adapts else {}
        return state | self._loss.entropy_bonus.state() | self._staleness.state()

    def _restore(self, state: Mapping[str, Any]) -> None:
        self._advantages.kl_coef = float(state.get("kl_coef", self._advantages.kl_coef))
        self._loss.entropy_bonus.restore(state)
        self._staleness.restore(state)


def _likelihood(mask: Tensor, answers: ModelOutputs) -> tuple[Tensor, list[float]]:
    """A max-likelihood loss on the masked tokens, and their number."""
    return -(answers.logprobs * mask).sum(), [float(mask.sum())]
