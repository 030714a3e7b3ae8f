"""When a delta pays: the choice from rates that the tests make up."""

import pytest

from rlinf_comm.weights.stream.choice import DeltaChoice

N = 1_000_000
GBPS = 1e9


def measured(choice: DeltaChoice, *, share: float, link: float, encode: float = 10 * GBPS, apply: float = 10 * GBPS):
    choice.encoded(N, round(share * N), N / encode)
    choice.applied(N, N / apply)
    choice.sent(N, N / link)


def test_a_delta_is_tried_until_everything_is_measured():
    choice = DeltaChoice()
    for measure in (lambda: choice.encoded(N, N, 9.0), lambda: choice.applied(N, 9.0), lambda: choice.sent(N, 1.0)):
        assert choice.choose(N).is_delta
        measure()
    assert not choice.choose(N).is_delta


def test_the_prediction_is_that_of_the_formula_and_decides():
    choice = DeltaChoice()
    measured(choice, share=0.05, link=GBPS)
    decision = choice.choose(64 * N)
    assert decision.is_delta and decision.reason == "predicted to be faster"
    assert decision.dense_s == pytest.approx(0.064)
    assert decision.delta_s == pytest.approx(0.064 * 0.05 + 0.0128)
    fast = DeltaChoice()
    measured(fast, share=0.05, link=10 * GBPS)
    decision = fast.choose(64 * N)
    assert not decision.is_delta and decision.reason == "predicted to be slower"


def test_it_comes_back_after_so_many_dense_versions_and_stays_when_it_pays():
    choice = DeltaChoice(retry_every=3, weight=1.0)
    measured(choice, share=1.0, link=GBPS)
    assert [choice.choose(N).is_delta for _ in range(8)] == [False, False, False, True] * 2
    measured(choice, share=0.01, link=GBPS)
    assert [choice.choose(N).reason for _ in range(5)] == ["predicted to be faster"] * 5


def test_one_slow_publication_does_not_decide_but_several_do():
    choice = DeltaChoice()
    for _ in range(5):
        measured(choice, share=0.05, link=GBPS)
    choice.encoded(N, N // 20, 2.5 * N / GBPS)
    assert choice.choose(N).is_delta
    for _ in range(4):
        choice.encoded(N, N // 20, 2.5 * N / GBPS)
    assert not choice.choose(N).is_delta


def test_small_messages_say_nothing_of_the_link():
    choice = DeltaChoice()
    measured(choice, share=0.05, link=10 * GBPS)
    for _ in range(20):
        choice.sent(30, 1e-3)
    assert choice.link_s_per_byte == pytest.approx(0.1e-9)


def test_nothing_is_measured_of_nothing():
    choice = DeltaChoice()
    choice.encoded(0, 0, 1.0)
    choice.applied(0, 1.0)
    choice.sent(0, 1.0)
    assert (choice.encode_s_per_byte, choice.apply_s_per_byte, choice.link_s_per_byte) == (None, None, None)
    with pytest.raises(ValueError, match="retry_every=0"):
        DeltaChoice(retry_every=0)
