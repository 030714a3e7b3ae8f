"""Where logits would be large, log-probabilities and entropies come from hidden states: the same numbers, up to
rounding."""

import pytest
import torch

from rlinf_workers.models import head, trainable
from rlinf_workers.models.head import has_large_logits
from rlinf_workers.models.language_model import ModelSettings
from rlinf_workers.models.sequences import SequenceBatch
from rlinf_workers.models.trainable import TokenModel
from rlinf_workers.roles.records.language import ExampleBatch

SIZES = {
    "vocab_size": 16,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "pad_token_id": 0,
}


def model_of(kind, **more):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES, **more)).eval()


@pytest.fixture
def trained():
    return TokenModel(ModelSettings(folder="", has_weights=False), 0.7)


def batch_of_groups():
    """Two prompts, one of them padded, with three completions of 5, 1 and 3 tokens each."""
    draw = torch.Generator().manual_seed(0)
    mask = (torch.arange(5) < torch.tensor([5, 1, 3])[:, None]).float().repeat(2, 1)
    return SequenceBatch(
        prompt_ids=torch.randint(1, 16, (2, 4), generator=draw),
        prompt_mask=torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]]),
        completion_ids=torch.randint(1, 16, (6, 5), generator=draw) * mask.long(),
        loss_mask=mask,
    )


def answered(trained, model, batch, mask):
    """What the model says inside the mask, and the gradients of a loss of it."""
    examples = isinstance(batch, ExampleBatch)
    answers = trained.answers(model, batch, entropies=not examples)
    numbers = [answers.logprobs * mask[:, 1:]] if examples else [answers.logprobs * mask, answers.entropies * mask]
    weighed = [(number * torch.linspace(-1, 2, number.numel()).view_as(number)).sum() for number in numbers]
    loss = torch.stack(weighed).sum()
    return numbers, torch.autograd.grad(loss, list(model.parameters()))


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(("qwen2", {"tie_word_embeddings": True}), id="qwen2 tied"),
        pytest.param(("qwen3", {}), id="qwen3"),
        pytest.param(("llama", {}), id="llama"),
        pytest.param(("gemma", {}), id="gemma"),
        pytest.param(("gemma2", {"final_logit_softcapping": 0.5}), id="gemma2"),
    ],
)
@pytest.mark.parametrize("examples", [False, True])
def test_answers_and_gradients_are_those_of_the_logits(monkeypatch, trained, model, examples):
    kind, more = model
    built = model_of(kind, **more)
    batch = batch_of_groups()
    mask = batch.loss_mask
    if examples:
        batch = ExampleBatch(shard=0, token_ids=batch.completion_ids, loss_mask=mask)

    expected = answered(trained, built, batch, mask)
    monkeypatch.setattr(head, "MAX_LOGITS_BYTES", 0)
    monkeypatch.setattr(trainable, "completion_logits", None)
    monkeypatch.setattr(type(built), "forward", None)  # no logits are made
    torch.testing.assert_close(answered(trained, built, batch, mask), expected, rtol=1e-4, atol=2e-5)


def test_small_logits_and_unknown_heads_stay_as_they_are(monkeypatch):
    built = model_of("qwen2")
    assert not has_large_logits(built, 1 << 24) and has_large_logits(built, (1 << 24) + 1)
    monkeypatch.setattr(head, "MAX_LOGITS_BYTES", 0)
    assert not has_large_logits(model_of("cohere"), 100)  # scales its logits
