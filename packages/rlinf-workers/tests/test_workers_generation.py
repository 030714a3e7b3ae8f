"""Generation: the engine passes the suite, is independent of the batch, and the stage assembles what engines finish."""

import math
import random
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from rlinf_algos import NonFiniteError
from rlinf_comm.testing import assert_bitwise_equal
from rlinf_workers.engines.base import Completions
from rlinf_workers.engines.huggingface.engine import HuggingFaceEngine
from rlinf_workers.engines.sampling import NoiseKey, SamplingSettings, prompt_noise, sample_by_blocks, sample_tokens
from rlinf_workers.errors import WorkersError
from rlinf_workers.roles.language.rollout import OpenGroups, Rollout, RolloutSettings
from rlinf_workers.roles.records.language import Prompt
from rlinf_workers.testing.architectures import tiny_architecture
from rlinf_workers.testing.engines import (
    ENGINE_CHECKS,
    SAMPLING,
    check_frequencies,
    check_logprobs,
    check_weights,
    prompts_of,
    sample,
)

MIXED = [3, 8, 5, 7, 8, 2, 4, 6, 8, 1, 5, 3]


def engine(model, *, width: int | None = 8, **changes):
    return HuggingFaceEngine(model, torch.device("cpu"), max_prompt_tokens=width, **changes)


@pytest.mark.parametrize("check", ENGINE_CHECKS, ids=lambda check: check.__name__)
def test_the_engine_conforms(check, model):
    check(partial(HuggingFaceEngine, model, torch.device("cpu")), model)


@pytest.mark.parametrize("check", [check_logprobs, check_frequencies, check_weights], ids=lambda check: check.__name__)
def test_prompts_are_padded_for_a_model_that_adds_masks_to_scores(check, tmp_path):
    """Gemma 2 attends without SDPA, and takes a mask of booleans for numbers."""
    gemma = tiny_architecture("gemma2", tmp_path)
    check(partial(HuggingFaceEngine, gemma, torch.device("cpu")), gemma)


class LosesACompletion(HuggingFaceEngine):
    def finished(self):
        parts = super().finished()
        return [replace(part, members=part.members[:-1]) if part.index == 3 else part for part in parts]


class GoesOnBehindTheEnd(HuggingFaceEngine):
    def finished(self):
        return [replace(part, loss_mask=torch.ones_like(part.loss_mask)) for part in super().finished()]


class ForgetsTheTemperature(HuggingFaceEngine):
    def submit(self, prompts, sampling, *, seed, step):
        super().submit(prompts, replace(sampling, temperature=min(sampling.temperature, 1.0)), seed=seed, step=step)


class ForgetsTopP(HuggingFaceEngine):
    def submit(self, prompts, sampling, *, seed, step):
        super().submit(prompts, replace(sampling, top_p=1.0), seed=seed, step=step)


class ForgetsTopK(HuggingFaceEngine):
    def submit(self, prompts, sampling, *, seed, step):
        super().submit(prompts, replace(sampling, top_k=0), seed=seed, step=step)


class ForgetsMinP(HuggingFaceEngine):
    def submit(self, prompts, sampling, *, seed, step):
        super().submit(prompts, replace(sampling, min_p=0.0), seed=seed, step=step)


class ForgetsStopStrings(HuggingFaceEngine):
    def submit(self, prompts, sampling, *, seed, step):
        super().submit(prompts, replace(sampling, stop=()), seed=seed, step=step)


class TakesTooMany(HuggingFaceEngine):
    def free_capacity(self, group_size):
        return 2 * super().free_capacity(group_size)


class ServesACopy(HuggingFaceEngine):
    def weights(self):
        return {name: tensor.clone() for name, tensor in super().weights().items()}


class StampsNothing(HuggingFaceEngine):
    def weights_received(self, policy_version):
        pass


class ForgetsWhenOffloaded(HuggingFaceEngine):
    def offload(self):
        super().offload()
        self._batch = None


@pytest.mark.parametrize(
    ("broken", "found_by"),
    [
        (LosesACompletion, "check_every_completion_comes_back_once"),
        (GoesOnBehindTheEnd, "check_rows"),
        (ForgetsTheTemperature, "check_logprobs"),
        (ForgetsTopP, "check_frequencies"),
        (ForgetsTopP, "check_top_k"),
        (ForgetsTopK, "check_top_k"),
        (ForgetsMinP, "check_top_k"),
        (ForgetsStopStrings, "check_stop_strings"),
        (TakesTooMany, "check_room"),
        (ServesACopy, "check_weights"),
        (StampsNothing, "check_weights"),
        (ForgetsWhenOffloaded, "check_offload"),
    ],
)
def test_the_suite_finds(broken, found_by, model):
    check = next(check for check in ENGINE_CHECKS if check.__name__ == found_by)
    with pytest.raises(AssertionError):
        check(partial(broken, model, torch.device("cpu")), model)


@pytest.mark.parametrize("lengths", [[8] * 12, MIXED], ids=["one length", "mixed"])
def test_a_group_does_not_depend_on_its_batch(model, lengths):
    hf_engine = engine(model, width=None if lengths == [8] * 12 else 8)
    some = prompts_of(lengths)
    together = sample(hf_engine, some)
    for size in (1, 2, 5):
        apart = [one for start in range(0, 12, size) for one in sample(hf_engine, some[start : start + size])]
        for one, other in zip(together, apart, strict=True):
            assert_bitwise_equal(one.token_ids, other.token_ids)
            assert_bitwise_equal(one.logprobs, other.logprobs)


def test_splitting_by_max_batch_sequences_changes_nothing(model):
    some = prompts_of([8] * 6)
    whole, split = engine(model), engine(model, max_batch_sequences=8)
    assert (whole.free_capacity(4), split.free_capacity(4)) == (128, 2)
    for one, other in zip(sample(whole, some), sample(split, some), strict=True):
        assert_bitwise_equal(one.logprobs, other.logprobs)


def test_another_step_draws_other_noise_and_the_same_step_the_same(model):
    hf_engine, some = engine(model), prompts_of([8, 8])
    assert not torch.equal(sample(hf_engine, some)[0].token_ids, sample(hf_engine, some, step=1)[0].token_ids)
    assert torch.equal(sample(hf_engine, some)[0].token_ids, sample(hf_engine, some)[0].token_ids)


@pytest.mark.parametrize(
    ("width", "lengths", "message"),
    [
        (8, [3, 9], "prompt 1 has 9 tokens; max_prompt_tokens allows 8"),
        (None, [3, 2], "prompt 1 has 2 tokens; without max_prompt_tokens all have 3"),
    ],
)
def test_a_prompt_of_a_wrong_length_is_named(model, width, lengths, message):
    with pytest.raises(ValueError, match=message):
        engine(model, width=width).submit(prompts_of(lengths), SAMPLING, seed=1, step=0)


def test_more_prompts_than_there_is_room_for_are_refused(model):
    hf_engine = engine(model, max_batch_sequences=8)
    with pytest.raises(ValueError, match=r"3 prompts exceed the engine.s free_capacity\(\)"):
        hf_engine.submit(prompts_of([3] * 3), SAMPLING, seed=1, step=0)


# -- the stage -----------------------------------------------------------------------------------------------------


class Scattered(HuggingFaceEngine):
    """Begins with each prompt at once and gives completions back one by one, in any order."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.made, self.most_under_way = [], 0

    def free_capacity(self, group_size):
        return super().free_capacity(group_size) - len({one.index for one in self.made})

    def submit(self, prompts, sampling, *, seed, step):
        super().submit(prompts, sampling, seed=seed, step=step)
        for part in super().finished():
            self.made += [row(part, i) for i in range(len(part.members))]
        self.most_under_way = max(self.most_under_way, len({one.index for one in self.made}))
        random.Random(0).shuffle(self.made)

    def finished(self):
        return [self.made.pop()] if self.made else []


def row(part, i):
    """One completion of a part, cut to its own length."""
    length = int(part.loss_mask[i].sum())
    return replace(
        part,
        members=(part.members[i],),
        token_ids=part.token_ids[i : i + 1, :length],
        loss_mask=part.loss_mask[i : i + 1, :length],
        logprobs=part.logprobs[i : i + 1, :length],
        truncated=part.truncated[i : i + 1],
    )


class ReadyReader(list):
    """Chunks that are all there from the beginning."""

    granularity = 4

    def __iter__(self):
        while self:
            yield self.pop(0)

    def ready_chunk(self):
        return self.pop(0) if self else []

    def hands_on(self, began_ns):
        return nullcontext()


def generate(make_worker, model, writer, engine_name):
    prompts = prompts_of(MIXED)
    settings = RolloutSettings(
        model=model,
        train=SAMPLING,
        evaluate=SAMPLING,
        max_prompt_tokens=8,
        max_batch_sequences=24,
        engine=engine_name,
    )
    worker = make_worker(Rollout, settings)
    worker.weights_received(7)
    worker.generate(ReadyReader([prompts[start : start + 4] for start in range(0, 12, 4)]), writer)
    return worker, writer.items


def test_the_stage_hands_on_whole_groups_of_an_engine_that_finishes_out_of_order(make_worker, model, writer):
    _, expected = generate(make_worker, model, writer, "huggingface")
    assert [group.index for group in expected] == list(range(12))
    worker, groups = generate(make_worker, model, type(writer)(), f"{__name__}:Scattered")
    assert [group.index for group in groups] != list(range(12)), "in order proves nothing"
    assert worker._engine.most_under_way == 6, "prompts of later chunks were not taken in while there was room"
    for group in groups:
        other = expected[group.index]
        width = group.completion_ids.shape[1]
        assert group.prompt.reference_answer == other.prompt.reference_answer and group.policy_version == 7
        assert_bitwise_equal(group.loss_mask, other.loss_mask[:, :width])
        assert_bitwise_equal(
            group.completion_ids * group.loss_mask, (other.completion_ids * other.loss_mask)[:, :width]
        )
        assert_bitwise_equal(group.rollout_logprobs, other.rollout_logprobs[:, :width])
        assert_bitwise_equal(group.truncated, other.truncated)


@pytest.mark.parametrize(
    ("granularity", "num_ranks", "num_groups", "expected"),
    [(1, 1, 12, 8), (1, 2, 12, 6), (1, 3, 12, 4), (3, 2, 12, 6), (4, 2, 12, 4), (5, 2, 12, 5), (3, 1, 12, 9)],
    ids=str,
)
def test_a_stage_takes_no_more_than_it_has_room_for_and_its_share(
    make_worker, model, writer, granularity, num_ranks, num_groups, expected
):
    """Room for eight groups. Of several replicas one that holds more would keep others waiting."""
    settings = RolloutSettings(
        model=model,
        train=replace(SAMPLING, max_new_tokens=12),
        evaluate=SAMPLING,
        max_prompt_tokens=8,
        max_batch_sequences=32,
        engine_options={"refill": True},
    )
    worker = make_worker(Rollout, settings, num_items=num_groups)
    worker.identity = replace(worker.identity, num_ranks=num_ranks)
    worker.weights_received(0)
    prompts = prompts_of([4] * num_groups)
    reader = ReadyReader([prompts[start : start + granularity] for start in range(0, num_groups, granularity)])
    reader.granularity = granularity
    held, finished = [], worker._engine.finished

    def counted():
        held.append(num_groups - sum(map(len, list.__iter__(reader))) - len(writer.items))
        return finished()

    worker._engine.finished = counted
    worker.generate(reader, writer)
    assert held[0] == expected and (num_ranks == 1 or max(held) == expected)
    assert sorted(group.index for group in writer.items) == list(range(num_groups))


def test_a_group_has_the_oldest_version_of_its_completions(model):
    prompt = Prompt(index=3, token_ids=torch.tensor([2]), reference_answer="")
    part = replace(sample(engine(model), prompts_of([3], first=3))[0], policy_version=4)
    groups = OpenGroups(SAMPLING.group_size)
    groups.open([prompt])
    assert groups.add([replace(row(part, i), policy_version=4 + i) for i in (2, 0, 3)]) == []
    (group,) = groups.add([row(part, 1)])
    assert group.policy_version == 4 and len(groups) == 0


def test_an_engine_that_errs_about_its_completions_is_named(model):
    prompt = Prompt(index=0, token_ids=torch.tensor([2]), reference_answer="")
    part: Completions = sample(engine(model), prompts_of([3]))[0]
    groups = OpenGroups(SAMPLING.group_size)
    with pytest.raises(WorkersError, match="prompt 0, which is not in flight"):
        groups.add([part])
    groups.open([prompt])
    with pytest.raises(WorkersError, match=r"of 4 completions the engine finished \[0, 0, 1, 2\]"):
        groups.add([row(part, i) for i in (0, 1, 0, 2)])


def test_sampling_follows_the_distribution():
    logits = torch.log(torch.tensor([0.1, 0.0, 0.6, 0.3])).expand(20_000, 4)
    keys = [NoiseKey(seed=0, step=0, index=index) for index in range(5_000)]
    uniform = prompt_noise(keys, SamplingSettings(group_size=4, max_new_tokens=1))[:, 0]
    tokens, logprobs = sample_tokens(logits, uniform, SAMPLING)
    frequency = np.bincount(tokens.numpy(), minlength=4) / len(tokens)
    np.testing.assert_allclose(frequency, [0.1, 0.0, 0.6, 0.3], atol=0.02)
    torch.testing.assert_close(logprobs.exp(), torch.tensor([0.1, 0.0, 0.6, 0.3])[tokens])


def test_top_p_never_draws_the_tail_and_reports_the_full_distribution():
    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05])).expand(1000, 4)
    uniform = torch.linspace(0, 1 - 1e-6, 1000)
    settings_top_p = SamplingSettings(group_size=1, max_new_tokens=1, top_p=0.7)
    tokens, logprobs = sample_tokens(logits, uniform, settings_top_p)
    assert set(tokens.tolist()) == {0, 1}
    torch.testing.assert_close(logprobs.exp().unique(), torch.tensor([0.3, 0.5]))


def test_top_k_top_p_and_min_p_are_counted_in_the_full_distribution():
    logits = torch.log(torch.tensor([0.1, 0.5, 0.3, 0.1])).expand(1000, 4)
    uniform = torch.linspace(0, 1 - 1e-6, 1000)
    for top_k, top_p, min_p, expected in (
        (1, 1.0, 0.0, {1}),
        (2, 1.0, 0.0, {1, 2}),
        (2, 0.4, 0.0, {1}),
        (3, 0.7, 0.0, {1, 2}),
        (9, 1.0, 0.0, {0, 1, 2, 3}),
        (0, 1.0, 0.1, {0, 1, 2, 3}),
        (0, 1.0, 0.5, {1, 2}),
        (0, 0.4, 0.5, {1}),
        (1, 1.0, 0.5, {1}),
        (0, 1.0, 1.0, {1}),
    ):
        settings = SamplingSettings(group_size=1, max_new_tokens=1, top_p=top_p, top_k=top_k, min_p=min_p)
        for draw in (sample_tokens, sample_by_blocks):
            tokens, logprobs = draw(logits, uniform, settings)
            assert set(tokens.tolist()) == expected
            torch.testing.assert_close(logprobs.exp(), torch.tensor([0.1, 0.5, 0.3, 0.1])[tokens])


@given(uniform=st.floats(0, 1, exclude_max=True, width=32), seed=st.integers(0, 1000))
def test_a_draw_is_the_inverse_of_the_cumulative_distribution(uniform, seed):
    logits = torch.randn(1, 9, generator=torch.Generator().manual_seed(seed))
    token, _ = sample_tokens(logits, torch.tensor([uniform]), SAMPLING)
    cumulative = np.cumsum(np.exp(logits[0].double().numpy()) / np.exp(logits[0].double().numpy()).sum())
    low = cumulative[token - 1] if token > 0 else 0.0
    assert low - 1e-6 <= uniform <= cumulative[token] + 1e-6


def test_a_model_that_computes_no_numbers_is_named_and_not_sampled_from():
    groups = OpenGroups(2)
    groups.open([Prompt(index=7, token_ids=torch.tensor([1]), reference_answer="")])
    part = Completions(
        index=7,
        members=(0, 1),
        token_ids=torch.zeros(2, 3, dtype=torch.int64),
        loss_mask=torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]]),
        logprobs=torch.tensor([[-1.0, -1.0, math.nan], [math.nan, 0.0, 0.0]]),
        policy_version=0,
        truncated=torch.zeros(2, dtype=torch.bool),
    )
    (group,) = groups.add([part])
    with pytest.raises(NonFiniteError, match="completions of prompt 7 are not finite: the weights of the model"):
        object.__new__(Rollout)._record(group, (0, 7))
