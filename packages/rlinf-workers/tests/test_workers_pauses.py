"""New weights in mid-flight, and suspended completions: which weights sample which tokens, and that noise stays."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from workers_rounding import additions_of_transformer, rounding_bound

from rlinf_comm import pack, unpack
from rlinf_comm.testing import assert_bitwise_equal
from rlinf_workers.engines import SupportsPause
from rlinf_workers.engines.huggingface.engine import HuggingFaceEngine
from rlinf_workers.engines.huggingface.slots import Slots
from rlinf_workers.engines.sampling import SamplingSettings
from rlinf_workers.engines.segments import extended
from rlinf_workers.roles.records.language import Segment
from rlinf_workers.testing.engines import prompts_of

WIDTH = 32
PROMPTS = prompts_of([3, 8, 5])
SETTINGS = SamplingSettings(group_size=2, max_new_tokens=24)
GREEDY = replace(SETTINGS, group_size=1, temperature=0.0)
BOUND = rounding_bound(additions_of_transformer(num_layers=2, width=32, inner_width=64, num_tokens=32), size=4.0)
"""Nats; the logits of the tiny model and its other sums are below 4."""


def engine(model, *, max_rows: int | None = None, version: int = 0, weights: int | None = None) -> HuggingFaceEngine:
    new_engine = HuggingFaceEngine(
        model, torch.device("cpu"), max_prompt_tokens=WIDTH, refill=True, max_batch_sequences=max_rows
    )
    if weights is not None:
        fill(new_engine, weights)
    new_engine.weights_received(version)
    return new_engine


def slots_of(hf_engine) -> Slots:
    assert hf_engine._slots is not None
    return hf_engine._slots


@torch.no_grad()
def fill(hf_engine, seed: int) -> None:
    """New weights, in place, as a weight sync fills them."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in hf_engine.weights().values():
        if tensor.dim() > 1:
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.3)


def submit(hf_engine, settings=SETTINGS, prompts=PROMPTS):
    """Whatever the free capacity, so that completions wait for rows."""
    slots_of(hf_engine).submit(prompts, settings, width=WIDTH, seed=1, step=0)


def advance(hf_engine, num_steps: int):
    """Interrupts the engine after that many decode steps. Returns the completions that ended until then."""
    rows, ended, left = slots_of(hf_engine), [], num_steps
    step = rows._step

    def counted():
        nonlocal left
        left -= 1
        if not left:
            hf_engine.interrupt()
        return step()

    rows._step = counted
    while left and rows.num_under_way:
        ended += hf_engine.finished()
    rows._step = step
    return ended


def drain(hf_engine):
    ended = []
    while slots_of(hf_engine).num_under_way:
        ended += hf_engine.finished()
    return ended


def take_weights(hf_engine, version: int, how, seed: int | None = None):
    ended = hf_engine.pause(how)
    if seed is not None:
        fill(hf_engine, seed)
    hf_engine.weights_received(version)
    hf_engine.resume()
    return ended


def by_completion(parts):
    assert max(Counter((part.index, part.members) for part in parts).values()) == 1, "a completion came back twice"
    return {(part.index, part.members[0]): part for part in parts}


def versions(part) -> list[int]:
    segments = part.segments[0] if part.segments else extended((), part.token_ids.shape[1], part.policy_version)
    assert part.policy_version == segments[0].policy_version
    return [one.policy_version for one in segments for _ in range(one.num_tokens)]


def uninterrupted(model, settings=SETTINGS, **changes):
    hf_engine = engine(model, **changes)
    submit(hf_engine, settings)
    return by_completion(drain(hf_engine))


@pytest.mark.parametrize("max_rows", [4, None])
@pytest.mark.parametrize("how", ["keep", "recompute"])
def test_equal_weights_in_mid_flight_change_no_token(model, how, max_rows):
    expected = uninterrupted(model)
    hf_engine = engine(model, max_rows=max_rows)
    submit(hf_engine)
    ended = []
    for version, num_steps in ((1, 2), (2, 5), (3, 1)):
        ended += advance(hf_engine, num_steps)
        ended += take_weights(hf_engine, version, how)
    actual = by_completion(ended + drain(hf_engine))
    assert actual.keys() == expected.keys()
    for key, part in expected.items():
        assert_bitwise_equal(actual[key].token_ids, part.token_ids)
        assert len(versions(actual[key])) == part.token_ids.shape[1]
        if how == "keep":
            assert_bitwise_equal(actual[key].logprobs, part.logprobs)
        else:
            torch.testing.assert_close(actual[key].logprobs, part.logprobs, rtol=0, atol=BOUND)
    if max_rows is None:
        num_tokens = 5 if how == "keep" else 6  # a prefill draws a token, too
        assert versions(actual[0, 0])[: 4 + num_tokens] == [0] * 3 + [1] * num_tokens + [2]


def test_no_token_is_drawn_twice_and_the_tokens_so_far_stay(model, monkeypatch):
    drawn, draw = [], Slots._draw
    monkeypatch.setattr(
        Slots, "_draw", lambda self, first, logits: drawn.append(len(logits)) or draw(self, first, logits)
    )
    expected = uninterrupted(model)
    drawn.clear()
    hf_engine = engine(model)
    submit(hf_engine)
    ended = advance(hf_engine, 6)
    take_weights(hf_engine, 1, "recompute", seed=3)
    actual = by_completion(ended + drain(hf_engine))
    assert sum(drawn) == sum(part.token_ids.shape[1] for part in actual.values())
    for key, part in actual.items():
        begun = versions(part).count(0)
        assert begun == min(7, part.token_ids.shape[1])
        assert_bitwise_equal(part.token_ids[:, :begun], expected[key].token_ids[:, :begun])
        assert_bitwise_equal(part.logprobs[:, :begun], expected[key].logprobs[:, :begun])


def test_a_recomputed_completion_is_what_the_new_weights_make_of_its_beginning(model):
    hf_engine = engine(model)
    submit(hf_engine, GREEDY)
    ended = advance(hf_engine, 6)
    take_weights(hf_engine, 1, "recompute", seed=3)
    parts = by_completion(ended + drain(hf_engine))
    is_compared = False
    for prompt in PROMPTS:
        part = parts[prompt.index, 0]
        begun = versions(part).count(0)
        if begun == part.token_ids.shape[1]:
            continue
        other = engine(model, weights=3)
        rest = replace(GREEDY, max_new_tokens=GREEDY.max_new_tokens - begun)
        prefix = torch.cat([prompt.token_ids, part.token_ids[0, :begun]])
        submit(other, rest, [replace(prompt, token_ids=prefix)])
        (expected,) = drain(other)
        assert part.token_ids[:, begun:].tolist() == expected.token_ids.tolist()
        torch.testing.assert_close(part.logprobs[:, begun:], expected.logprobs, rtol=0, atol=BOUND)
        is_compared = True
    assert is_compared, "every completion had ended"


def test_a_kept_cache_is_of_the_earlier_weights(model):
    parts = {}
    for how in ("keep", "recompute"):
        hf_engine = engine(model)
        submit(hf_engine, GREEDY)
        ended = advance(hf_engine, 6)
        take_weights(hf_engine, 1, how, seed=3)
        parts[how] = by_completion(ended + drain(hf_engine))
    with_old_cache, recomputed = (parts[how][1, 0] for how in ("keep", "recompute"))
    assert versions(with_old_cache)[:9] == versions(recomputed)[:9] == [0] * 7 + [1] * 2
    assert_bitwise_equal(with_old_cache.logprobs[:, :7], recomputed.logprobs[:, :7])
    assert (with_old_cache.logprobs[0, 7] - recomputed.logprobs[0, 7]).abs() > 100 * BOUND


def test_with_finish_running_completions_end_with_the_earlier_weights(model):
    before, after = uninterrupted(model), uninterrupted(model, weights=3, version=1)
    hf_engine = engine(model, max_rows=3)
    submit(hf_engine)
    ended = advance(hf_engine, 2)
    ended += take_weights(hf_engine, 1, "finish", seed=3)
    assert slots_of(hf_engine).num_running == 0
    num_before = len(ended)
    ended += drain(hf_engine)
    assert 3 <= num_before < len(ended) == 6
    for i, part in enumerate(ended):
        expected = before if i < num_before else after
        assert not part.segments and part.policy_version == int(i >= num_before)
        assert_bitwise_equal(part.token_ids, expected[part.index, part.members[0]].token_ids)


@pytest.mark.parametrize("changes", [{}, {"stop": ("8=", "31")}], ids=str)
def test_suspended_completions_go_on_in_another_engine_with_the_same_tokens(model, changes):
    """Suspended twice; two of the six have no row, and one of these has no token before."""
    settings = replace(SETTINGS, **changes)
    expected = uninterrupted(model, settings)
    hf_engine, ended = engine(model, max_rows=4), []
    submit(hf_engine, settings)
    for version in (1, 2):
        ended += advance(hf_engine, 4)
        suspended = unpack(pack(hf_engine.suspend()))
        assert hf_engine.finished() == [] and hf_engine.free_capacity(4) == 1, "the engine is empty"
        hf_engine = engine(model, max_rows=4, version=version)
        renamed = [replace(one, prompt=replace(one.prompt, index=one.noise.index + 100)) for one in suspended]
        hf_engine.submit_unfinished(renamed, settings)
    ended += drain(hf_engine)
    actual = by_completion([replace(part, index=part.index % 100) for part in ended])
    assert actual.keys() == expected.keys()
    for key, part in expected.items():
        assert_bitwise_equal(actual[key].token_ids, part.token_ids)
        assert actual[key].truncated.tolist() == part.truncated.tolist()
        torch.testing.assert_close(actual[key].logprobs, part.logprobs, rtol=0, atol=BOUND)
        assert len(versions(actual[key])) == part.token_ids.shape[1]
    assert any(versions(part)[-1] == 2 and versions(part)[0] == 0 for part in actual.values())


def test_running_completions_enter_again_in_portions(model, monkeypatch):
    """At most as many tokens as the prompts of a full cache have: 3 prompts of 6 rows, 16 columns each."""
    expected = uninterrupted(model)
    hf_engine, portions, entering = engine(model, max_rows=6), [], Slots._entering
    slots_of(hf_engine).submit(PROMPTS, SETTINGS, width=8, seed=1, step=0)
    ended = advance(hf_engine, 10)

    def counted(rows):
        entries = entering(rows)
        portions.append([len(one.token_ids) for one, _ in entries])
        return entries

    monkeypatch.setattr(Slots, "_entering", counted)
    take_weights(hf_engine, 1, "recompute")
    actual = by_completion(ended + drain(hf_engine))
    portions = [sizes for sizes in portions if sizes]
    assert len(portions) > 1 and max(map(sum, portions)) <= 48 and sum(map(len, portions)) == 6 - len(ended)
    for key, part in expected.items():
        assert_bitwise_equal(actual[key].token_ids, part.token_ids)


def test_an_interrupt_does_not_replace_one_at_a_later_step(model):
    hf_engine = engine(model)
    submit(hf_engine)
    hf_engine.interrupt(2)
    for _ in range(3):
        hf_engine.interrupt()
        assert hf_engine.finished() == []
    assert (hf_engine.finished(), hf_engine.num_steps) == ([], 2)
    assert hf_engine.finished() and hf_engine.num_steps > 2


@pytest.mark.parametrize("how", ["keep", "recompute"])
def test_weights_at_the_same_decode_step_give_the_same_completions(model, how):
    def completions(stop):
        """With other weights at step 5, where `stop` has the engine return."""
        hf_engine, ended = engine(model, max_rows=3), []
        submit(hf_engine)
        while hf_engine.num_steps < 5:
            stop(hf_engine)
            ended += hf_engine.finished()
        ended += take_weights(hf_engine, 1, how, seed=3)
        return by_completion(ended + drain(hf_engine))

    expected = completions(lambda hf_engine: hf_engine.interrupt(hf_engine.num_steps + 1))
    actual = completions(lambda hf_engine: hf_engine.interrupt(5))
    assert actual.keys() == expected.keys() and any({*versions(part)} == {0, 1} for part in actual.values())
    for key, part in expected.items():
        assert versions(actual[key]) == versions(part)
        assert_bitwise_equal(actual[key].logprobs, part.logprobs)


def test_an_engine_of_whole_batches_cannot_pause_within_one(model):
    hf_engine = HuggingFaceEngine(model, torch.device("cpu"), max_prompt_tokens=8)
    assert isinstance(hf_engine, SupportsPause) and hf_engine.pause("finish") == []
    with pytest.raises(ValueError, match="can pause completions only with continuous batching; set engine_options"):
        hf_engine.pause("keep")
    with pytest.raises(ValueError, match="can suspend completions only"):
        hf_engine.suspend()


def test_a_paused_engine_computes_nothing(model):
    hf_engine = engine(model)
    submit(hf_engine)
    hf_engine.pause("keep")
    with pytest.raises(RuntimeError, match=r"paused; call resume\(\)"):
        hf_engine.finished()


def test_an_engine_that_was_abandoned_still_has_its_version(model):
    hf_engine = engine(model, version=7)
    hf_engine.abandon()
    submit(hf_engine, replace(GREEDY, max_new_tokens=2))
    assert {part.policy_version for part in drain(hf_engine)} == {7}


def test_segments_have_tokens_and_neighbours_differ():
    segments = extended((), 0, 4)
    assert segments == ()
    segments = extended(extended(extended(segments, 3, 4), 3, 5), 5, 6)
    assert segments == (Segment(num_tokens=3, policy_version=4), Segment(num_tokens=2, policy_version=6))
    assert extended(segments, 6, 6) == (segments[0], Segment(num_tokens=3, policy_version=6))
