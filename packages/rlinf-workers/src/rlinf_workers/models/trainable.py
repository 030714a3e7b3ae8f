"""Model adapters for language models: one that outputs log-probabilities, one that outputs values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from rlinf_algos import kept_logprobs_and_entropy, logit_norms, logprobs_and_entropy, token_logprobs
from rlinf_workers.models.head import (
    answers_of_states,
    has_large_logits,
    has_plain_head,
    kept_statistics_of_states,
    likeliest_of_states,
    logit_norms_of_states,
)
from rlinf_workers.models.language_model import (
    ModelSettings,
    build_model,
    describe_model,
    is_adapter,
    load_tokenizer,
    outline_model,
)
from rlinf_workers.models.packed import KeptIds, PackedBatch, own_part, packed_logits, packed_states
from rlinf_workers.models.pictures import freeze_vision_tower, has_rope_positions, picture_places, rope_positions, seen
from rlinf_workers.models.placement import to_device
from rlinf_workers.models.router_replay import agreement, replayed_experts
from rlinf_workers.models.routers import balance_loss, recorded_routers
from rlinf_workers.models.sequence_parallel import RowShare, ranks_of_rows
from rlinf_workers.models.sequences import SequenceBatch, completion_logits, completion_states, num_calls
from rlinf_workers.models.weight_names import (
    StoredWeights,
    converted_together,
    pretrained_weights,
    under_file_names,
)
from rlinf_workers.roles.records.language import ExampleBatch
from rlinf_workers.trainers.base import NOT_ASKED, ModelAdapter, ModelOutputs

CompletionBatch = SequenceBatch | PackedBatch
"""Completions with their prompts, padded or packed; both have `completion_ids` and `loss_mask`, [B, T]."""


@dataclass(frozen=True, slots=True)
class LogitNorms:
    """Requests the `logit_norms` of a batch instead of its log-probabilities."""

    batch: CompletionBatch


@dataclass(frozen=True, slots=True)
class Likeliest:
    """Asks a model which tokens of a batch are the most likely ones, beside their log-probabilities."""

    batch: PackedBatch | ExampleBatch


TokenBatch = CompletionBatch | ExampleBatch | LogitNorms | Likeliest
"""What a `TokenModel` is asked about."""


class TokenModel(ModelAdapter):
    """A causal language model. Outputs, for a CompletionBatch, the log-probabilities of its completion tokens; for an
    ExampleBatch, those of all tokens except the first; for `LogitNorms`, the norms of its completion tokens.

    Args:
        temperature: divides the logits of a CompletionBatch; that of the rollout, with 0 treated as 1.
        balances_routers: also output the load-balancing loss of each CompletionBatch, for a mixture of experts.
        replays_routers: where a batch has the engine's experts, use them, and output `router_agreement`.
        freezes_vision: of a vision-language model, train the decoder alone.
    """

    shares_rows = True

    def __init__(
        self,
        settings: ModelSettings,
        temperature: float,
        *,
        balances_routers: bool = False,
        replays_routers: bool = False,
        freezes_vision: bool = False,
    ) -> None:
        self.settings, self._balances_routers, self.replays_routers = settings, balances_routers, replays_routers
        self._freezes_vision = freezes_vision
        self.temperature = temperature or 1.0

    def build(self, device: torch.device) -> nn.Module:
        return self._frozen(build_model(self.settings, device))

    def outline(self) -> nn.Module:
        return self._frozen(outline_model(self.settings))

    def _frozen(self, model: nn.Module) -> nn.Module:
        if self._freezes_vision:
            freeze_vision_tower(model)
        return model

    def first_weights(self, model: Any) -> StoredWeights | None:
        return pretrained_weights(model, self.settings.folder) if self.settings.has_weights else None

    def stored_weights(self, model: Any, folder: str) -> StoredWeights:
        _refuse_adapter(folder)
        return pretrained_weights(model, folder)

    def answers(self, model: Any, batch: TokenBatch, *, entropies: bool) -> ModelOutputs:
        if isinstance(batch, LogitNorms):
            own = own_part(batch.batch)
            return self._with_experts(model, own, lambda: ModelOutputs(logit_norms=self._logit_norms(model, own)))
        if isinstance(batch, Likeliest):
            return _likeliest_answers(model, own_part(batch.batch))
        if isinstance(batch, ExampleBatch):
            return _example_answers(model, batch)
        own = own_part(batch)
        return self._with_experts(model, own, lambda: self._balanced_answers(model, own, entropies))

    def _with_experts(self, model: Any, batch: CompletionBatch, answers: Callable[[], ModelOutputs]) -> ModelOutputs:
        """The answers with the engine's experts, where they are to be replayed."""
        if not self.replays_routers or not isinstance(batch, PackedBatch) or batch.experts is None:
            return answers()
        with replayed_experts(model, batch.experts) as own_choices:
            outputs = answers()
        return replace(outputs, router_agreement=agreement(batch, own_choices))

    def _balanced_answers(self, model: Any, batch: CompletionBatch, entropies: bool) -> ModelOutputs:
        """The answers with the load-balancing loss, where it is learned from."""
        if not self._balances_routers or not torch.is_grad_enabled():
            return self._completion_answers(model, batch, entropies)
        with recorded_routers(model) as routers:
            outputs = self._completion_answers(model, batch, entropies)
        return replace(outputs, router_loss=balance_loss(model, batch, routers))

    def _completion_answers(self, model: Any, batch: CompletionBatch, entropies: bool) -> ModelOutputs:
        if isinstance(batch, PackedBatch):
            outputs = self._packed_answers(model, batch, entropies)
            logprobs = batch.spread(outputs.logprobs)
            if not entropies:
                return ModelOutputs(logprobs=logprobs)
            return ModelOutputs(logprobs=logprobs, entropies=batch.spread(outputs.entropies))
        if has_large_logits(model, batch.completion_ids.numel()):
            states, ids, mask = completion_states(model, batch), batch.completion_ids, batch.loss_mask
            return answers_of_states(model, states, ids, mask, self.temperature, entropies=entropies)
        return self._answers_of_logits(completion_logits(model, batch), batch.completion_ids, entropies)

    def _packed_answers(self, model: Any, batch: PackedBatch, entropies: bool) -> ModelOutputs:
        """For the completion tokens only, [M]."""
        if batch.kept_tokens is not None:
            return self._kept_answers(model, batch, batch.kept_tokens, entropies)
        ids = batch.ids
        if not has_large_logits(model, len(ids)):
            return self._answers_of_logits(packed_logits(model, batch), ids, entropies)
        states = packed_states(model, batch)
        return answers_of_states(model, states, ids, None, self.temperature, entropies=entropies)

    def _kept_answers(self, model: Any, batch: PackedBatch, kept_tokens: KeptIds, entropies: bool) -> ModelOutputs:
        """As `_packed_answers`, among the tokens that sampling left."""
        if has_plain_head(model):
            states = packed_states(model, batch)
            statistics = kept_statistics_of_states(model, states, batch.ids, kept_tokens, self.temperature)
        else:
            logits = packed_logits(model, batch)
            statistics = kept_logprobs_and_entropy(
                logits, batch.ids, kept_tokens.ids, kept_tokens.counts, self.temperature
            )
        return ModelOutputs(logprobs=statistics[0], entropies=statistics[1] if entropies else NOT_ASKED)

    def _answers_of_logits(self, logits: Tensor, ids: Tensor, entropies: bool) -> ModelOutputs:
        if not entropies:
            return ModelOutputs(logprobs=token_logprobs(logits, ids, temperature=self.temperature))
        logprobs, entropy = logprobs_and_entropy(logits, ids, self.temperature)
        return ModelOutputs(logprobs=logprobs, entropies=entropy)

    def _logit_norms(self, model: Any, batch: CompletionBatch) -> Tensor:
        """[B, T], 0 outside the mask."""
        is_packed = isinstance(batch, PackedBatch)
        ids = batch.ids if is_packed else batch.completion_ids
        if has_large_logits(model, ids.numel()):
            states = packed_states(model, batch) if is_packed else completion_states(model, batch)
            norms = logit_norms_of_states(model, states, ids, self.temperature)
        else:
            logits = packed_logits(model, batch) if is_packed else completion_logits(model, batch)
            norms = logit_norms(logits, ids, self.temperature)
        return batch.spread(norms) if is_packed else norms * batch.loss_mask

    def num_calls(self, batch: TokenBatch) -> int:
        batch = batch.batch if isinstance(batch, LogitNorms | Likeliest) else batch
        return num_calls(batch) if isinstance(batch, SequenceBatch) else 1

    def written_together(self, model: Any, names: Iterable[str]) -> Iterable[Sequence[str]]:
        return converted_together(model, names)

    def to_files(self, model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return under_file_names(model, tensors)

    def describe(self, folder: str) -> None:
        describe_model(self.settings, folder)
        load_tokenizer(self.settings.folder).save_pretrained(folder)

    def load(self, model: Any, folder: str) -> None:
        """Loads with transformers' own loader.

        Raises: ValueError for an adapter's folder, which transformers would load together with its base."""
        _refuse_adapter(folder)
        dtype = next(model.parameters()).dtype
        loaded = type(model).from_pretrained(folder, dtype=dtype, trust_remote_code=False, local_files_only=True)
        model.load_state_dict(loaded.state_dict())


class ValueModel(ModelAdapter):
    """A causal language model whose head outputs one number per token: the expected remaining reward before each token
    of a CompletionBatch is sampled. The head begins at 0."""

    shares_rows = True

    def __init__(self, settings: ModelSettings) -> None:
        self.settings = settings

    def build(self, device: torch.device) -> nn.Module:
        return _with_value_head(build_model(self.settings, torch.device("cpu"))).to(device)

    def outline(self) -> nn.Module:
        return _with_value_head(outline_model(self.settings))

    def first_weights(self, model: Any) -> StoredWeights | None:
        if not self.settings.has_weights:
            return None
        head = model.get_output_embeddings()
        own = [name for name, tensor in model.named_parameters() if any(tensor is other for other in head.parameters())]
        return pretrained_weights(model, self.settings.folder, without=own)

    def answers(self, model: Any, batch: CompletionBatch, *, entropies: bool) -> ModelOutputs:
        batch = own_part(batch)
        if isinstance(batch, PackedBatch):
            return ModelOutputs(values=batch.spread(packed_logits(model, batch)[..., 0].float()))
        return ModelOutputs(values=completion_logits(model, batch)[..., 0].float())

    def num_calls(self, batch: CompletionBatch) -> int:
        return num_calls(batch) if isinstance(batch, SequenceBatch) else 1


def _refuse_adapter(folder: str) -> None:
    if is_adapter(folder):
        raise ValueError(f"{folder}: holds an adapter, not a whole model; merge it first (rlinf export --merged)")


def _with_value_head(model: Any) -> Any:
    head = nn.Linear(model.get_output_embeddings().in_features, 1, bias=True, dtype=model.dtype)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    model.set_output_embeddings(head)
    return model


def _example_answers(model: Any, batch: ExampleBatch) -> ModelOutputs:
    """Log-probabilities [B, T - 1] of the tokens from the second on, at temperature 1. Ranks that share packed rows
    share the examples."""
    if (ranks := ranks_of_rows()) is None:
        return ModelOutputs(logprobs=_example_logprobs(model, batch))
    share = RowShare(ranks, len(batch.token_ids))
    own = replace(
        batch,
        token_ids=share.own(batch.token_ids),
        loss_mask=share.own(batch.loss_mask),
        pictures=batch.pictures[share.first : share.first + share.num_own],
    )
    return ModelOutputs(logprobs=share.whole(_example_logprobs(model, own)))


def _example_logprobs(model: Any, batch: ExampleBatch) -> Tensor:
    if has_large_logits(model, batch.token_ids.numel()):
        ids, mask = batch.token_ids[:, 1:], batch.loss_mask[:, 1:]
        return answers_of_states(model, _example_states(model, batch), ids, mask, 1.0, entropies=False).logprobs
    logits = _example_logits(model, batch)
    ids = batch.token_ids[:, 1:]
    losses = nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids.flatten(), reduction="none")
    return -losses.view_as(ids)


def _likeliest_answers(model: Any, batch: PackedBatch | ExampleBatch) -> ModelOutputs:
    """`logprobs` at temperature 1, and `is_likeliest`, each [B, T]; the logits of a few tokens at a time."""
    is_packed = isinstance(batch, PackedBatch)
    ids = batch.ids if is_packed else batch.token_ids[:, 1:]
    if has_plain_head(model):
        states = packed_states(model, batch) if is_packed else _example_states(model, batch)
        logprobs, is_likeliest = likeliest_of_states(model, states, ids)
    else:
        logits = packed_logits(model, batch) if is_packed else _example_logits(model, batch)
        logprobs, is_likeliest = token_logprobs(logits, ids), (logits.argmax(-1) == ids).float()
    if is_packed:
        logprobs, is_likeliest = batch.spread(logprobs), batch.spread(is_likeliest)
    return ModelOutputs(logprobs=logprobs, is_likeliest=is_likeliest)


def _example_states(model: Any, batch: ExampleBatch) -> Tensor:
    """What the head is given before each token but the first, [B, T - 1, H]."""
    return _call_with_examples(model, model.base_model, batch).last_hidden_state[:, :-1]


def _example_logits(model: Any, batch: ExampleBatch) -> Tensor:
    """[B, T - 1, V]"""
    return _call_with_examples(model, model, batch).logits[:, :-1]


def _call_with_examples(model: Any, called: Any, batch: ExampleBatch) -> Any:
    arguments: dict[str, Tensor] = {}
    if has_rope_positions(batch.pictures):
        positions = [rope_positions(one, batch.token_ids.shape[1]) for one in batch.pictures]
        positions += [rope_positions(None, batch.token_ids.shape[1])] * (len(batch.token_ids) - len(positions))
        arguments["position_ids"] = to_device(torch.stack(positions, 1), batch.token_ids.device)
    places = [picture_places(one, batch.token_ids.shape[1]) for one in batch.pictures]
    places += [torch.zeros(batch.token_ids.shape[1], dtype=torch.bool)] * (len(batch.token_ids) - len(places))
    with seen(model, batch.pictures, torch.stack(places)) as pixels:
        return called(input_ids=batch.token_ids, use_cache=False, **arguments, **pixels)
