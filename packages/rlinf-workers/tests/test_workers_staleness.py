"""What an actor knows of the age of the weights that sampled what it trains on."""

from typing import Any

import pytest
import torch

from rlinf_workers.roles.records.language import Prompt, SampleGroup, Segment
from rlinf_workers.roles.staleness import Staleness


def begun(max_staleness: int, *versions: int) -> Staleness:
    """After training steps that began with these versions."""
    staleness = Staleness(max_staleness)
    for version in versions:
        staleness.begin_step(version)
    return staleness


def test_staleness_counts_training_steps_and_not_optimizer_steps():
    staleness = begun(2, 4, 6, 9)
    for version, count in ((9, 5), (4, 6), (6, 7), (4, 1)):
        staleness.add({version: count}, "samples")
    assert staleness.num_samples == {0: 5, 2: 7, 1: 7}
    staleness.begin_step(10)
    staleness.add({10: 2}, "samples")
    assert staleness.num_samples == {0: 2}


class RecordingWorker:
    """Keeps what is recorded; the other ranks' largest staleness is 1."""

    def __init__(self) -> None:
        self.records: dict[str, list[tuple[float, float]]] = {}
        self.ranks = self

    def record(self, name: str, value: float, *, weight: float = 1.0) -> None:
        self.records.setdefault(name, []).append((value, weight))

    def objects(self, own: int) -> list[int]:
        return [own, 1]


def test_the_share_of_every_age_is_recorded():
    staleness, worker = begun(2, 4, 6, 9), RecordingWorker()
    unchecked: Any = worker
    staleness.record(unchecked)
    assert worker.records == {"rollout/staleness_max": [(1, 1.0)]}, "this rank trained on nothing"
    staleness.add({9: 3, 4: 1}, "samples")
    staleness.record(unchecked)
    shares = {age: worker.records[f"rollout/staleness_{age}_fraction"] for age in range(3)}
    assert shares == {0: [(0.75, 4)], 1: [(0.0, 4)], 2: [(0.25, 4)]}


@pytest.mark.parametrize("version", [4, 5, 11], ids=["too old", "never served", "of the future"])
def test_samples_that_the_bound_does_not_allow_are_never_trained_on(version):
    staleness = begun(1, 4, 6, 9)
    with pytest.raises(AssertionError, match=rf"group 3 has steps of policy version {version}; .*versions \[9, 6\]"):
        staleness.add({6: 1, version: 1}, "group 3 has steps")


@pytest.mark.parametrize(("versions", "allowed"), [((8, 9, 3), {3: 1}), ((8, 9, 3, 4), {3: 1, 4: 1})])
def test_a_run_that_goes_back_to_a_checkpoint_counts_from_there(versions, allowed):
    staleness = begun(1, *versions)
    staleness.add(allowed, "samples")
    assert staleness.num_samples == dict.fromkeys(range(len(allowed)), 1)
    for abandoned in (8, 9):
        with pytest.raises(AssertionError):
            staleness.add({abandoned: 1}, "samples")


def test_tokens_are_counted_by_the_version_that_sampled_each():
    """Completions of three tokens whose last was sampled with newer weights; the second ended after two."""
    group = SampleGroup(
        prompt=Prompt(index=3, token_ids=torch.zeros(1, dtype=torch.int64), reference_answer=""),
        completion_ids=torch.zeros(2, 3, dtype=torch.int64),
        loss_mask=torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]]),
        rollout_logprobs=torch.zeros(2, 3),
        policy_version=4,
        segments=((Segment(num_tokens=2, policy_version=4), Segment(num_tokens=1, policy_version=6)),) * 2,
    )
    assert group.tokens_by_version() == {4: 4, 6: 1}
