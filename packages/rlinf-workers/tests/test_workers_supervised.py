"""Supervised training: packed and padded examples give the loss of whole sequences, and the mean is over the step."""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cross_entropy

from rlinf_workers.execution.in_process import InProcessWorkers
from rlinf_workers.flow import Flow
from rlinf_workers.models.language_model import build_model
from rlinf_workers.models.packed import pack_examples, packed_logits
from rlinf_workers.roles.language.preferences import DpoSettings
from rlinf_workers.roles.language.supervised import (
    PreferenceTrainer,
    RewardModelTrainer,
    SupervisedSettings,
    SupervisedTrainer,
)
from rlinf_workers.roles.records.language import Example, Preference
from rlinf_workers.testing.engines import tiny_model
from rlinf_workers.trainers.base import BackendSettings, OptimizerSettings
from rlinf_workers.worker import StepContext

LENGTHS = (9, 4, 23, 4, 31, 2, 12)


def examples(vocab_size=12):
    generator = torch.Generator().manual_seed(1)
    batch = []
    for index, length in enumerate(LENGTHS):
        mask = (torch.rand(length, generator=generator) < 0.5).float()  # with holes
        mask[0], mask[-1] = 0.0, 1.0
        ids = torch.randint(3, vocab_size, (length,), generator=generator)
        batch.append(Example(index=index, token_ids=ids, loss_mask=mask))
    return batch


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"))


def alone(module, example):
    """Loss of each token with one, by a pass over this sequence."""
    logits = module(input_ids=example.token_ids[None]).logits[0, :-1]
    losses = cross_entropy(logits, example.token_ids[1:], reduction="none")
    return losses[example.loss_mask[1:] != 0], (logits.argmax(-1) == example.token_ids[1:])[example.loss_mask[1:] != 0]


def test_a_packed_row_has_the_logits_of_whole_sequences(model):
    module = build_model(model, torch.device("cpu")).double()
    batch = pack_examples(examples())
    losses = cross_entropy(packed_logits(module, batch), batch.ids, reduction="none")
    expected = torch.cat([alone(module, example)[0] for example in examples()])
    torch.testing.assert_close(losses, expected, rtol=0, atol=1e-12)
    assert len(batch.token_ids) == sum(LENGTHS) - len(LENGTHS)
    counts = [int(example.loss_mask.sum()) for example in examples()]
    assert batch.loss_mask.sum(-1).tolist() == counts


class Written(list):
    def put(self, item, key):
        assert item.index == key
        self.append(item)


def trainer(
    model, *further, kind=SupervisedTrainer, num_shards=2, micro_batch_examples=2, max_tokens=None, learning_rate=1e-3
):
    settings = SupervisedSettings(
        model=model,
        optimizer=OptimizerSettings(learning_rate=learning_rate, max_grad_norm=1e9),
        backend=BackendSettings(num_shards=num_shards),
        micro_batch_examples=micro_batch_examples,
        max_tokens_per_micro_batch=max_tokens,
    )
    flow = Flow("sft").worker("actor", kind, settings, *further)
    flow.stage("actor", "train", reads="examples", trains=True)
    workers = InProcessWorkers(flow)
    workers.begin(StepContext(step=0, phase="train", seed=0, num_items=len(LENGTHS)))
    return workers


SPLITS = [
    {"micro_batch_examples": 7, "num_shards": 1},
    {"micro_batch_examples": 2},
    {"max_tokens": 32},
    {"max_tokens": 1000, "num_shards": 1},
]


@pytest.mark.parametrize("split", SPLITS)
def test_a_step_minimizes_the_mean_over_all_tokens_of_the_step(model, split):
    module = build_model(model, torch.device("cpu"))
    losses = torch.cat([alone(module, example)[0] for example in examples()])
    losses.mean().backward()
    norm = torch.stack([parameter.grad.double().square().sum() for parameter in module.parameters()]).sum().sqrt()
    workers = trainer(model, **split)
    workers["actor"].train([examples()[:3], examples()[3:]])
    metrics = workers.metrics()
    assert metrics["sft/loss"] == pytest.approx(losses.mean().item(), rel=1e-6)
    assert metrics["actor/grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
    assert metrics["sft/trained_tokens"] == len(losses)
    assert workers["actor"].policy_version == 1


@pytest.mark.parametrize("split", SPLITS)
def test_an_evaluation_measures_each_example(model, split):
    module = build_model(model, torch.device("cpu"))
    written = Written()
    trainer(model, **split)["actor"].evaluate([examples()], written)
    for measures in sorted(written, key=lambda one: one.index):
        losses, right = alone(module, examples()[measures.index])
        expected = [len(losses), losses.sum().item(), right.sum().item()]
        assert measures.values.tolist() == pytest.approx(expected, rel=1e-5)
    assert len(written) == len(LENGTHS)


def test_the_order_of_arrival_changes_no_bit(model):
    first, second = trainer(model, max_tokens=40), trainer(model, max_tokens=40)
    first["actor"].train([examples()])
    second["actor"].train([list(reversed(examples()))])
    assert first.metrics() == second.metrics()


def test_tokens_without_a_loss_are_not_learned(model):
    """Tokens behind the last one with a loss change nothing."""
    longer = [
        replace(
            one,
            token_ids=torch.cat([one.token_ids, torch.tensor([5])]),
            loss_mask=torch.cat([one.loss_mask, torch.zeros(1)]),
        )
        for one in examples()
    ]
    first, second = trainer(model), trainer(model)
    first["actor"].train([examples()])
    second["actor"].train([longer])
    assert first.metrics()["sft/loss"] == pytest.approx(second.metrics()["sft/loss"], rel=1e-6)


# -- preferences -------------------------------------------------------------------------------------------------------

PAIR_LENGTHS = ((5, 7, 3), (5, 2, 2), (9, 1, 12), (4, 20, 6))
"""Prompt, preferred answer, other answer."""


def pairs(vocab_size=12):
    generator = torch.Generator().manual_seed(2)

    def ids(length):
        return torch.randint(3, vocab_size, (length,), generator=generator)

    batch = []
    for index, (prompt, *answers) in enumerate(PAIR_LENGTHS):
        width = max(answers)
        batch.append(
            Preference(
                index=index,
                prompt_ids=ids(prompt),
                completion_ids=ids(2 * width).view(2, width),
                loss_mask=(torch.arange(width) < torch.tensor(answers)[:, None]).float(),
                ref_logprobs=-3.0 * torch.tensor(answers) + torch.rand(2, generator=generator),
            )
        )
    return batch


def answer_logprobs(module, pair):
    """[2], by a pass over each whole sequence."""
    sums = []
    for ids, mask in zip(pair.completion_ids, pair.loss_mask, strict=True):
        answer = ids[mask != 0]
        whole = torch.cat([pair.prompt_ids, answer])
        logits = module(input_ids=whole[None]).logits[0, len(pair.prompt_ids) - 1 : -1]
        sums.append(-cross_entropy(logits, answer, reduction="sum"))
    return torch.stack(sums)


def expected_pairs(module, beta):
    ratios = torch.stack([answer_logprobs(module, pair) - pair.ref_logprobs for pair in pairs()])
    rewards = beta * ratios
    return -torch.log(torch.sigmoid(rewards[:, 0] - rewards[:, 1])), rewards


PAIR_SPLITS = [{"micro_batch_examples": 4, "num_shards": 1}, {"micro_batch_examples": 1}, {"max_tokens": 24}]


@pytest.mark.parametrize("split", PAIR_SPLITS)
def test_a_step_minimizes_the_mean_over_pairs(model, split):
    module = build_model(model, torch.device("cpu"))
    losses, rewards = expected_pairs(module, 0.3)
    losses.mean().backward()
    norm = torch.stack([parameter.grad.double().square().sum() for parameter in module.parameters()]).sum().sqrt()
    workers = trainer(model, DpoSettings(beta=0.3), kind=PreferenceTrainer, **split)
    workers["actor"].train([pairs()])
    metrics = workers.metrics()
    assert metrics["dpo/loss"] == pytest.approx(losses.mean().item(), rel=1e-5)
    assert metrics["actor/grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    chosen, rejected = rewards.detach().mean(0).tolist()
    assert metrics["rewards/chosen"] == pytest.approx(chosen, rel=1e-5)
    assert metrics["rewards/rejected"] == pytest.approx(rejected, rel=1e-5)
    assert metrics["rewards/margin"] == pytest.approx(chosen - rejected, rel=1e-4)
    assert metrics["rewards/accuracy"] == (rewards[:, 0] > rewards[:, 1]).float().mean().item()


@pytest.mark.parametrize("split", PAIR_SPLITS)
def test_pairs_are_scored_and_measured(model, split):
    module = build_model(model, torch.device("cpu"))
    losses, rewards = expected_pairs(module, 0.3)
    actor = trainer(model, DpoSettings(beta=0.3), kind=PreferenceTrainer, **split)["actor"]
    scored, measured = Written(), Written()
    actor.score([[replace(pair, ref_logprobs=None) for pair in pairs()]], scored)
    actor.evaluate([pairs()], measured)
    for one in scored:
        expected = answer_logprobs(module, pairs()[one.index]).tolist()
        assert one.values.tolist() == pytest.approx(expected, rel=1e-5)
    for one in measured:
        chosen, rejected = rewards[one.index].tolist()
        expected = [losses[one.index].item(), chosen, rejected, float(chosen > rejected)]
        assert one.values.tolist() == pytest.approx(expected, rel=1e-4)
    assert len(scored) == len(measured) == len(PAIR_LENGTHS)


# -- reward models -----------------------------------------------------------------------------------------------------


def with_ends(pair):
    """The pair with one more token behind each answer, any."""
    mask = torch.cat([torch.ones(2, 1), pair.loss_mask], 1)
    return replace(pair, completion_ids=torch.cat([pair.completion_ids, torch.full((2, 1), 3)], 1), loss_mask=mask)


def scores_by_transformers(folder):
    """[pairs, 2], each text alone."""
    from transformers import AutoModelForSequenceClassification

    module, loading = AutoModelForSequenceClassification.from_pretrained(folder, output_loading_info=True)
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    rows = []
    for pair in pairs():
        answers = [ids[mask != 0] for ids, mask in zip(pair.completion_ids, pair.loss_mask, strict=True)]
        texts = [torch.cat([pair.prompt_ids, answer]) for answer in answers]
        rows.append(torch.cat([module(input_ids=text[None]).logits[0] for text in texts]))
    return torch.stack(rows), module


@pytest.mark.parametrize("split", PAIR_SPLITS)
def test_a_reward_model_is_one_of_transformers(model, split, tmp_path):
    """Trained from a language model, saved, and trained on from its own folder."""
    actor = trainer(model, kind=RewardModelTrainer, learning_rate=1e-2, **split)["actor"]
    for _ in range(3):
        actor.train([[with_ends(pair) for pair in pairs()]])
    actor.save_model(str(tmp_path / "first"))
    scores, module = scores_by_transformers(tmp_path / "first")
    assert scores.abs().max() > 1e-3, "the head has moved"
    losses = -torch.log(torch.sigmoid(scores[:, 0] - scores[:, 1]))
    losses.mean().backward()
    norm = torch.stack([p.grad.double().square().sum() for p in module.parameters() if p.grad is not None]).sum().sqrt()
    settings = replace(model, folder=str(tmp_path / "first"))
    workers = trainer(settings, kind=RewardModelTrainer, **split)
    workers["actor"].train([[with_ends(pair) for pair in pairs()]])
    metrics = workers.metrics()
    assert metrics["reward_model/loss"] == pytest.approx(losses.mean().item(), rel=1e-5)
    assert metrics["actor/grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    assert metrics["rewards/chosen"] == pytest.approx(scores[:, 0].mean().item(), rel=1e-4)
    actor.load_model(str(tmp_path / "first"))
    written = Written()
    actor.evaluate([[with_ends(pair) for pair in pairs()]], written)
    for one in written:
        assert one.values[1:3].tolist() == pytest.approx(scores[one.index].tolist(), rel=1e-4, abs=1e-6)
