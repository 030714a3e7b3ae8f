"""The heads on the last stage: one for token probabilities, one for values.

The first is sharded over the ranks of a stage. The second is one row, replicated on them: each computes the same values
from the same states, so its gradient is not summed over them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from torch import Tensor, nn

from rlinf_comm.weights.layouts import TransformerShape
from rlinf_workers.models.trainable import TokenModel, ValueModel
from rlinf_workers.trainers.base import NOT_ASKED, ModelOutputs
from rlinf_workers.trainers.megatron.answers import answers_of_states, values_of_states
from rlinf_workers.trainers.megatron.queries import Query


class Head(Protocol):
    """The differences between the kinds of language models."""

    num_answers: int
    """Output numbers per query token."""
    temperature: float
    begins_anew: tuple[str, ...]
    """Canonical tensors that a pretrained model does not have; they begin at 0."""
    is_renamed: bool
    """Whether its files have canonical names; otherwise they have the names of transformers' model in memory."""

    def shape(self, shape: TransformerShape) -> TransformerShape:
        """The shape of the whole model with this head."""
        ...

    def fit(self, model: GPTModel) -> None:
        """Installs the head in a model that has the last stage."""

    def answers(self, model: Any, states: Tensor, request: Query) -> Tensor:
        """The model's last hidden states -> [num_answers, R, T] float32, the same on all ranks of the stage that
        compute these rows."""
        ...

    def evaluation(self, answers: Tensor, *, entropies: bool) -> ModelOutputs:
        """Converts such outputs of a whole micro-batch to `ModelOutputs`."""
        ...


class TokenHead:
    """Log-probabilities and entropies."""

    num_answers, is_renamed = 2, True
    begins_anew: tuple[str, ...] = ()

    def __init__(self, temperature: float) -> None:
        self.temperature = temperature

    def shape(self, shape: TransformerShape) -> TransformerShape:
        return shape

    def fit(self, model: GPTModel) -> None:
        """Keeps megatron-core's own head."""

    def answers(self, model: Any, states: Tensor, request: Query) -> Tensor:
        if model.config.sequence_parallel:
            states = gather_from_sequence_parallel_region(states, tensor_parallel_output_grad=True).transpose(0, 1)
        else:  # transposed first, because 0.16.1 loses the sum over ranks of a non-contiguous gradient
            states = copy_to_tensor_model_parallel_region(states.transpose(0, 1))
        shared = model.share_embeddings_and_output_weights
        weight = model.shared_embedding_or_output_weight() if shared else model.output_layer.weight
        first = parallel_state.get_tensor_model_parallel_rank() * len(weight)
        group = parallel_state.get_tensor_model_parallel_group()
        return answers_of_states(states, weight, request, first, model.num_words, group)

    def evaluation(self, answers: Tensor, *, entropies: bool) -> ModelOutputs:
        return ModelOutputs(logprobs=answers[0], entropies=answers[1] if entropies else NOT_ASKED)


class ValueHead:
    """A head for the expected remaining reward."""

    num_answers, temperature, is_renamed = 1, 1.0, False
    begins_anew: tuple[str, ...] = ("lm_head.weight", "lm_head.bias")

    def shape(self, shape: TransformerShape) -> TransformerShape:
        return replace(shape, tied_embeddings=False, value_head=True)

    def fit(self, model: GPTModel) -> None:
        setattr(model, "output_layer", nn.Linear(model.config.hidden_size, 1, dtype=model.config.params_dtype))  # noqa: B010

    def answers(self, model: Any, states: Tensor, request: Query) -> Tensor:
        if model.config.sequence_parallel:
            states = gather_from_sequence_parallel_region(states, tensor_parallel_output_grad=False)
        return values_of_states(states.transpose(0, 1), model.output_layer, request)

    def evaluation(self, answers: Tensor, *, entropies: bool) -> ModelOutputs:
        return ModelOutputs(values=answers[0])


def head_of(model: TokenModel | ValueModel) -> Head:
    """The head of a kind of model."""
    return TokenHead(model.temperature) if isinstance(model, TokenModel) else ValueHead()
