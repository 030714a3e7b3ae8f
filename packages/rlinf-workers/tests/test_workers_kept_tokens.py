"""Truncated sampling: the tokens that top-p, top-k and min-p left are recorded, and the loss is over them."""

from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch

from rlinf_workers.collectives import RankGroup
from rlinf_workers.engines.huggingface.engine import HuggingFaceEngine
from rlinf_workers.engines.sampling import SamplingSettings, sample_kept, sample_tokens
from rlinf_workers.models.language_model import load_model
from rlinf_workers.models.packed import own_part, pack_without_padding
from rlinf_workers.models.sequence_parallel import shared_rows
from rlinf_workers.models.sequences import pack_groups
from rlinf_workers.models.trainable import TokenModel
from rlinf_workers.roles.language.rollout import OpenGroups
from rlinf_workers.roles.records.kept_tokens import KeptTokens
from rlinf_workers.roles.records.language import Prompt
from rlinf_workers.testing.architectures import tiny_architecture

CPU, GROUP_SIZE, NUM_TOKENS, TEMPERATURE = torch.device("cpu"), 4, 12, 0.15
SAMPLING = SamplingSettings(
    group_size=GROUP_SIZE, max_new_tokens=NUM_TOKENS, temperature=TEMPERATURE, top_p=0.7, min_p=0.02, records_kept=True
)


@pytest.fixture(scope="module", params=["qwen2", "gpt_neox"], ids=["from states", "from logits"])
def tiny(request, tmp_path_factory):
    return tiny_architecture(request.param, tmp_path_factory.mktemp("model"))


def random_prompts(*lengths):
    return [
        Prompt(
            index=index,
            token_ids=torch.randint(2, 13, (length,), generator=torch.Generator().manual_seed(index)),
            reference_answer="",
        )
        for index, length in enumerate(lengths)
    ]


def sampled(tiny, prompts, sampling=SAMPLING, **options):
    engine = HuggingFaceEngine(load_model(tiny), CPU, max_prompt_tokens=7, **options)
    open_groups, whole = OpenGroups(GROUP_SIZE), []
    waiting = [*prompts]
    while len(whole) < len(prompts):
        while waiting and engine.free_capacity(GROUP_SIZE):
            open_groups.open(waiting[:1])
            engine.submit([waiting.pop(0)], sampling, seed=0, step=0)
        whole += open_groups.add(engine.finished())
    return sorted(whole, key=lambda group: group.index)


@pytest.fixture(scope="module")
def groups(tiny):
    return sampled(tiny, random_prompts(5, 3, 7))


@torch.no_grad()
def kept_by_hand(model, group, row):
    """The kept ids of each token of a completion, and its log-probabilities, from a plain forward pass."""
    length = int(group.extents[row])
    sequence = torch.cat([group.prompt.token_ids, group.completion_ids[row, :length]])
    logits = model(input_ids=sequence[None], use_cache=False).logits[0, -length - 1 : -1] / TEMPERATURE
    kept_tokens, logprobs = [], []
    for scores, token in zip(logits, sequence[-length:], strict=True):
        probabilities = scores.softmax(-1)
        order = probabilities.argsort(descending=True)
        left, mass = [], 0.0
        for one in order.tolist():
            if mass >= SAMPLING.top_p or probabilities[one] < SAMPLING.min_p * probabilities.max():
                break
            left.append(one)
            mass += float(probabilities[one])
        kept_tokens.append(sorted(left))
        logprobs.append(float(scores[token] - scores[left].logsumexp(-1)))
    return kept_tokens, torch.tensor(logprobs)


def test_recorded_is_what_sampling_left(tiny, groups):
    model = load_model(tiny).model
    numbers = set()
    for group in groups:
        assert group.kept_tokens.counts.bool().tolist() == group.loss_mask.bool().tolist()
        for row, ids in enumerate(group.kept_tokens.by_row()):
            counts = group.kept_tokens.counts[row, : int(group.extents[row])].tolist()
            expected, logprobs = kept_by_hand(model, group, row)
            assert [part.tolist() for part in ids.split(counts)] == expected
            numbers.update(counts)
            torch.testing.assert_close(group.rollout_logprobs[row, : len(counts)], logprobs, rtol=0, atol=2e-6)
    assert len(numbers) > 3 and max(numbers) < 13, "sets of several sizes, none of all tokens"


def test_the_same_tokens_are_drawn_and_evaluations_record_nothing(tiny, groups):
    logits = torch.randn(50, 13, generator=torch.Generator().manual_seed(5))
    uniform = torch.linspace(0, 0.99, 50)
    assert torch.equal(sample_kept(logits, uniform, SAMPLING)[0], sample_tokens(logits, uniform, SAMPLING)[0])
    plain = sampled(tiny, random_prompts(5, 3, 7), replace(SAMPLING, records_kept=False))
    for one, other in zip(plain, groups, strict=True):
        assert one.kept_tokens is None and torch.equal(
            one.completion_ids * one.loss_mask, other.completion_ids * other.loss_mask
        )


def test_continuous_batching_records_the_same_and_so_does_a_suspended_completion(tiny, groups):
    options = {"max_batch_sequences": 6, "refill": True}
    prompts = random_prompts(5, 3, 7)
    refilled = sampled(tiny, prompts, **options)
    engine = HuggingFaceEngine(load_model(tiny), CPU, max_prompt_tokens=7, max_batch_sequences=12, refill=True)
    engine.submit(prompts, SAMPLING, seed=0, step=0)
    engine.interrupt(at_step=4)
    done = []
    while engine.num_steps < 4:
        done += engine.finished()
    suspended = engine.suspend()
    assert any(
        one.kept_tokens is not None and one.kept_tokens.counts.shape == (1, len(one.token_ids)) for one in suspended
    )
    engine.submit_unfinished(suspended, SAMPLING)
    open_groups, whole = OpenGroups(GROUP_SIZE), []
    open_groups.open(prompts)
    whole += open_groups.add(done)
    while len(whole) < 3:
        whole += open_groups.add(engine.finished())
    for others in (refilled, sorted(whole, key=lambda group: group.index)):
        for one, other in zip(groups, others, strict=True):
            assert torch.equal(one.kept_tokens.ids, other.kept_tokens.ids)
            assert torch.equal(one.kept_tokens.counts, other.kept_tokens.counts)


def test_rows_of_several_parts_are_joined_in_their_order_and_taken_apart():
    parts = [
        KeptTokens.of_rows([[torch.tensor([1, 2]), torch.tensor([3])], []]),
        KeptTokens.of_rows([[torch.tensor([4])]]),
    ]
    whole = KeptTokens.joined(parts, torch.tensor([2, 0, 1]))
    assert whole.ids.tolist() == [4, 1, 2, 3] and whole.counts.tolist() == [[1, 0], [2, 1], [0, 0]]
    for which in (slice(0, 1), slice(1, 3), slice(2, 3), slice(3, 3)):
        part = whole.rows(which)
        assert torch.equal(part.counts, whole.counts[which])
        assert part.ids.tolist() == [one for ids in whole.by_row()[which] for one in ids.tolist()]


def answers(tiny, groups, **options):
    batch = pack_without_padding(groups)
    adapter = TokenModel(tiny, TEMPERATURE)
    return adapter.answers(adapter.build(CPU), batch, entropies=True, **options), batch


def test_the_trainer_computes_the_engines_log_probabilities(tiny, groups):
    outputs, batch = answers(tiny, groups)
    expected = torch.cat([group.rollout_logprobs[:, : batch.loss_mask.shape[1]] for group in groups])
    torch.testing.assert_close(outputs.logprobs.detach(), expected, rtol=0, atol=2e-6)
    over_all, _ = answers(tiny, [replace(group, kept_tokens=None) for group in groups])
    assert float((over_all.logprobs.detach() - expected).abs().max()) > 0.1, "over all tokens they are others"
    assert float((over_all.entropies - outputs.entropies).detach().max()) > 0.1


def test_a_subset_and_the_share_of_a_rank_have_their_own(tiny, groups):
    group = groups[0]
    whole, _ = answers(tiny, [group])
    parts = [answers(tiny, [group.subset(rows)])[0].logprobs for rows in (slice(0, 1), slice(1, 4))]
    width = max(part.shape[1] for part in parts)
    joined = torch.cat([torch.nn.functional.pad(part, (0, width - part.shape[1])) for part in parts])
    torch.testing.assert_close(joined, whole.logprobs, rtol=0, atol=2e-6)

    batch, shares = pack_without_padding([group]), []
    for rank in range(2):
        with shared_rows(cast(RankGroup, SimpleNamespace(rank=rank, num_ranks=2))):
            own = own_part(batch)
        of_tokens = split_of(batch)[own.loss_mask[batch.loss_mask != 0].bool()]
        assert [ids.tolist() for ids in split_of(own)] == [ids.tolist() for ids in of_tokens]
        shares.append(len(of_tokens))
    assert min(shares) > 0 and sum(shares) == len(batch.ids)


def split_of(batch):
    """The kept ids of each of the M tokens, an array of tensors."""
    of_tokens = np.empty(len(batch.kept_tokens.counts), dtype=object)
    of_tokens[:] = batch.kept_tokens.ids.split(batch.kept_tokens.counts.tolist())
    return of_tokens


def test_rows_that_an_overlong_filter_masked_are_left_out(tiny, groups):
    whole, batch = answers(tiny, groups)
    is_left = torch.ones(len(batch.loss_mask), 1)
    is_left[[1, 4, 5]] = 0
    masks = is_left.split([len(group.loss_mask) for group in groups])
    filtered = [replace(group, loss_mask=group.loss_mask * mask) for group, mask in zip(groups, masks, strict=True)]
    outputs, own = answers(tiny, filtered)
    width = own.loss_mask.shape[1]
    torch.testing.assert_close(outputs.logprobs, (whole.logprobs * is_left)[:, :width], rtol=0, atol=2e-6)


def test_no_token_outside_is_drawn_where_sums_round():
    logits = torch.tensor([[3.0, 3.0, 1.0, 0.0], [0.0, 3.0, 3.0, 1.0]])
    tokens, logprobs, is_kept = sample_kept(logits, torch.ones(2), replace(SAMPLING, temperature=1.0))
    assert bool(is_kept.gather(1, tokens[:, None]).all()) and bool(logprobs.isfinite().all())


def test_the_digest_covers_them(groups):
    changed = groups[0].kept_tokens.ids.clone()
    changed[0] += 1
    assert replace(groups[0], kept_tokens=replace(groups[0].kept_tokens, ids=changed)).digest() != groups[0].digest()


def test_what_would_be_wrong_in_silence_is_refused(groups):
    with pytest.raises(ValueError, match=r"set actor\.max_tokens_per_micro_batch"):
        pack_groups(groups)
    with pytest.raises(ValueError, match="only some groups say which tokens sampling left"):
        pack_without_padding([groups[0], replace(groups[1], kept_tokens=None)])
