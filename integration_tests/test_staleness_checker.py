"""The checker of what is promised about staleness: each broken promise is noticed, and random runs break none."""

from dataclasses import replace

import pytest

from staleness_checker import FinishedRun, TrainedGroup, TrainedStep, verdict
from staleness_runs import main


def group(index, prompt, tokens):
    return TrainedGroup(index=index, digest=f"digest {prompt}", prompt=prompt, tokens=tokens)


def step(number, begun_after, groups, shares):
    scored = [(one.index, one.digest) for one in groups]
    return TrainedStep(step=number, begun_after=begun_after, groups=groups, scored=scored, shares=shares)


STEPS = [
    step(0, 0, [group(0, (0, 0), {10: 3}), group(1, (0, 1), {10: 2})], {0: 1.0, 1: 0.0, 2: 0.0}),
    step(1, 0, [group(0, (0, 2), {10: 4}), group(1, (1, 0), {10: 5})], {0: 0.0, 1: 1.0, 2: 0.0}),
    step(2, 1, [group(0, (1, 1), {10: 2, 12: 3}), group(1, (2, 1), {12: 4})], {0: 0.0, 1: 7 / 9, 2: 2 / 9}),
]
RUN = FinishedRun(
    max_staleness=2,
    num_prompts=2,
    num_steps=3,
    updates=2,
    as_finished=True,
    steps=STEPS,
    late=[(2, 0)],
    last_version=16,
)
"""Begins with version 10, and with the late group (0, 2)."""


def with_groups(number, *groups):
    """The run with other groups in a step; its metrics and rewards follow."""
    steps = list(STEPS)
    steps[number] = step(number, STEPS[number].begun_after, list(groups), {})
    return replace(RUN, steps=steps)


def with_step(number, **changes):
    steps = list(STEPS)
    steps[number] = replace(steps[number], **changes)
    return replace(RUN, steps=steps)


def test_a_run_that_keeps_all_promises_has_no_mistakes():
    outcome = verdict(RUN)
    assert outcome.mistakes == []
    assert outcome.tokens_by_age == {0: 5, 1: 16, 2: 2}
    assert outcome.groups_by_lateness == {0: 4, 1: 2}


def test_weights_that_are_taken_in_mid_stage_count():
    first, second = STEPS[2].groups
    groups = [replace(first, tokens={10: 2, 12: 3}), replace(second, tokens={12: 1, 14: 3})]
    outcome = verdict(with_step(2, takes=[(0, 14)], groups=groups, shares={0: 3 / 9, 1: 4 / 9, 2: 2 / 9}))
    assert (outcome.mistakes, outcome.num_takes, outcome.num_mixed_groups) == ([], 1, 2)


FIRST, SECOND = STEPS[2].groups
BROKEN = {
    "a step is missing": (replace(RUN, steps=STEPS[:2]), "the record has steps [0, 1] of 3"),
    "a step began too early": (with_step(2, begun_after=0), "step 2 began after 0 steps"),
    "a step began late": (with_step(2, begun_after=3), "step 2 began after 3 steps"),
    "an old token": (
        with_groups(2, replace(FIRST, tokens={8: 1, 12: 1}), SECOND),
        "step 2, group 0: tokens that are 3 steps old",
    ),
    "a token of the future": (
        with_groups(2, replace(FIRST, tokens={16: 1}), SECOND),
        "step 2, group 0: tokens that are -1 steps old",
    ),
    "a version that was not served": (
        with_groups(2, FIRST, replace(SECOND, tokens={10: 4})),
        "step 2, group 1: tokens of version 10, which was not served",
    ),
    "a version that another rank took": (
        with_step(2, takes=[(1, 14)], groups=[FIRST, replace(SECOND, tokens={14: 4})]),
        "step 2, group 1: tokens of version 14, which was not served",
    ),
    "weights that are not newer": (
        with_step(2, takes=[(0, 12)]),
        "step 2: rank 0 took weights of [1.0] steps after those of 1",
    ),
    "weights that were not there": (
        with_step(2, takes=[(0, 16)]),
        "step 2: rank 0 took weights of [3.0] steps after those of 1",
    ),
    "a version between two steps": (
        with_groups(2, FIRST, replace(SECOND, tokens={11: 4})),
        "step 2, group 1: tokens of version 11, which was not served",
    ),
    "a batch that is not full": (with_groups(2, FIRST), "step 2 has groups [0] of 2"),
    "a group without tokens": (with_groups(2, FIRST, replace(SECOND, tokens={})), "step 2, group 1: no tokens"),
    "a group twice": (
        with_groups(2, FIRST, replace(SECOND, prompt=(1, 0), tokens={10: 4})),
        "the group of prompt (1, 0) is there 2 times",
    ),
    "a group that is still under way": (
        replace(RUN, late=[(2, 0), (2, 1)]),
        "the group of prompt (2, 1) is there 2 times",
    ),
    "a lost group": (replace(RUN, late=[]), "the group of prompt (2, 0) is lost"),
    "a prompt of nobody": (replace(RUN, late=[(2, 0), (2, 5)]), "nobody has admitted prompt (2, 5)"),
    "a group that leaves late": (
        with_groups(2, replace(FIRST, prompt=(0, 2)), SECOND),
        "the group of prompt (0, 2) is under way in step 2, which is too late",
    ),
    "a starved group": (
        replace(RUN, late=[(1, 1)]),
        "the group of prompt (1, 1) is under way in step 3, which is too late",
    ),
    "other rewards": (
        with_step(1, scored=[(0, "digest (0, 2)"), (1, "another")]),
        "step 1: the reward has scored other groups than the rollout has sampled",
    ),
    "other tokens trained": (
        with_step(2, shares={1: 6 / 9, 2: 3 / 9}),
        "step 2: the actor has counted",
    ),
}


@pytest.mark.parametrize(("run", "mistake"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_promise_is_noticed(run, mistake):
    assert any(one.startswith(mistake) for one in verdict(run).mistakes)


@pytest.mark.slow
def test_random_runs_keep_the_promises_and_are_replayed(tmp_path):
    """The third and the fourth have late groups; those that are killed or interrupted go on."""
    assert main(tmp_path, num_runs=4, num_replayed=4, seed=0) == 0


@pytest.mark.slow
def test_random_runs_of_agents_keep_the_promises_and_are_replayed(tmp_path):
    """As above, with an agent that draws what it says and when."""
    assert main(tmp_path, num_runs=4, num_replayed=4, seed=0, has_agents=True) == 0
