"""What the actor knows of the age of the weights that sampled its groups."""

from dataclasses import replace

import pytest
import torch

from rlinf_workers.roles.language.staleness import Staleness
from rlinf_workers.roles.records.language import Prompt, SampleGroup, Segment

GROUP = SampleGroup(
    prompt=Prompt(index=3, token_ids=torch.zeros(1, dtype=torch.int64), reference_answer=""),
    completion_ids=torch.zeros(2, 3, dtype=torch.int64),
    loss_mask=torch.ones(2, 3),
    rollout_logprobs=torch.zeros(2, 3),
    policy_version=0,
)


def of_version(version: int) -> SampleGroup:
    return replace(GROUP, policy_version=version)


def test_staleness_counts_training_steps_and_not_optimizer_steps():
    staleness = Staleness(2)
    for version in (4, 6, 9):
        staleness.begin_step(version)
    assert [staleness.of(of_version(version)) for version in (9, 4, 6)] == [{0: 6}, {2: 6}, {1: 6}]
    assert staleness.largest == 2
    staleness.begin_step(10)
    assert (staleness.largest, staleness.of(of_version(10))) == (0, {0: 6})


@pytest.mark.parametrize("version", [4, 5, 11], ids=["too old", "never served", "of the future"])
def test_a_group_that_the_bound_does_not_allow_is_never_trained_on(version):
    staleness = Staleness(1)
    for first in (4, 6, 9):
        staleness.begin_step(first)
    with pytest.raises(AssertionError, match=rf"prompt 3 have tokens of policy version {version}; .*versions \[9, 6\]"):
        staleness.of(of_version(version))


def test_a_run_that_goes_back_to_a_checkpoint_counts_from_there():
    staleness = Staleness(1)
    for version in (8, 9, 3, 4):
        staleness.begin_step(version)
    assert [staleness.of(of_version(version)) for version in (3, 4)] == [{1: 6}, {0: 6}]


def test_each_token_has_the_staleness_of_its_own_version():
    """One completion of three tokens whose last was sampled with newer weights; the other ended after two."""
    staleness = Staleness(1)
    for version in (4, 6):
        staleness.begin_step(version)
    segments = ((Segment(num_tokens=2, policy_version=4), Segment(num_tokens=1, policy_version=6)),) * 2
    mask = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]])
    assert staleness.of(replace(GROUP, policy_version=4, segments=segments, loss_mask=mask)) == {1: 4, 0: 1}
