"""The record of a run."""

import pytest

from rlinf.errors import UserError
from rlinf.run_folder.record import RecordedStep, RunRecord, replay_of


def step(begun_after: int, samples: str = "a") -> RecordedStep:
    decisions = {"rollout": [(0, {"group": 0, "samples": samples}), (1, {"group": 1, "samples": ("b",)})]}
    return RecordedStep(begun_after=begun_after, decisions=decisions)


def test_steps_are_read_back_and_compared(tmp_path):
    record = RunRecord(tmp_path)
    assert [record.add(number, step(after)) for number, after in enumerate((0, 0, 1))] == ["", "", ""]

    again = RunRecord(tmp_path, must_match=True)
    assert again.num_steps == 3 and again.decisions(3) is None
    assert again.add(0, step(0)) == again.add(1, step(0)) == "" and again.num_equal == 2
    difference = "rollout, samples of group 000000: ['x'], and in the record ['a']"
    assert again.add(2, step(1, "x")) == difference
    assert again.add(2, step(2)) == "it began after 2 steps had ended, and in the record after 1"
    assert RunRecord(tmp_path).decisions(2) == again.decisions(2), "a replay changes nothing"

    resumed = RunRecord(tmp_path)
    assert resumed.add(1, step(0, "x")) != ""
    assert RunRecord(tmp_path).num_steps == resumed.num_steps == 2, "what follows a different step is dropped"


def trained(*digests: str) -> RecordedStep:
    decisions = {"actor": [(rank, {"weights": digest}) for rank, digest in enumerate(digests)]}
    return RecordedStep(begun_after=0, decisions=decisions)


def test_weights_of_which_every_rank_has_a_copy_are_compared_over_any_number_of_ranks(tmp_path):
    RunRecord(tmp_path).add(0, trained("a", "a"))
    assert RunRecord(tmp_path, must_match=True).add(0, trained("a")) == ""
    for different in (trained("b"), trained("a", "b")):
        assert RunRecord(tmp_path, must_match=True).add(0, different).startswith("actor, weights: ")


def test_pauses_are_where_the_recorded_steps_had_them(tmp_path):
    record = RunRecord(tmp_path)
    for number, after in enumerate((0, 0, 1, 3, 3)):
        record.add(number, step(after))
    assert [record.next_pause(number) for number in range(6)] == [3, 3, 3, 5, 5, None]
    assert [record.begun_after(number) for number in range(6)] == [0, 0, 1, 3, 3, None]


def test_a_replay_needs_a_record_and_a_checkpoint(tmp_path):
    with pytest.raises(UserError, match=r"has no record\.jsonl"):
        replay_of(tmp_path, 0)
    RunRecord(tmp_path).add(0, step(0))
    assert replay_of(tmp_path, 0).checkpoint is None
    assert not replay_of(tmp_path, 0).overlaps
    RunRecord(tmp_path).add(1, step(0))
    assert replay_of(tmp_path, 0).overlaps
    with pytest.raises(UserError, match="no checkpoint after so few steps"):
        replay_of(tmp_path, 3)
