"""Groups that outlive their step: which ones leave when, and what their completions are."""

import random
from collections import Counter
from dataclasses import replace

import pytest

from rlinf_comm import pack, unpack
from rlinf_workers.engines.sampling import SamplingSettings
from rlinf_workers.roles.language.late_groups import Departures, late_from_start
from rlinf_workers.roles.language.rollout import Rollout, RolloutSettings
from rlinf_workers.testing.engines import prompts_of
from rlinf_workers.worker import StepContext

SAMPLING = SamplingSettings(group_size=2, max_new_tokens=24)


def test_a_due_group_has_a_place_kept_and_another_waits_for_the_next_step():
    departures = Departures([0, 1], {0: 1, 1: 1, 7: 0})
    assert departures.add([1]) == [(1, 0)]
    assert departures.add([0]) == [] and not departures.all_left
    assert departures.add([7]) == [(7, 1)] and departures.all_left


@pytest.mark.parametrize("max_lateness", [1, 2, 7])
def test_every_group_leaves_once_and_in_time_whatever_the_order(max_lateness):
    """Any order of becoming whole, among all groups under way."""
    draw = random.Random(max_lateness)
    for _ in range(30):
        size = draw.randint(2, 6)
        submitted = dict.fromkeys(range(size * max_lateness // 2), 0)
        under_way, left = set(submitted), []
        for step in range(25):
            new = range(len(submitted), len(submitted) + size)
            submitted |= dict.fromkeys(new, step)
            under_way |= set(new)
            departures = Departures(range(size), {one: submitted[one] + max_lateness - step for one in under_way})
            order, taken_over = draw.sample(sorted(under_way), len(under_way)), []
            while not departures.all_left:
                leaving = departures.add([order.pop()])
                taken_over += [index for _, index in leaving]
                left += [one for one, _ in leaving]
                under_way -= {one for one, _ in leaving}
                assert all(step - submitted[one] <= max_lateness for one, _ in leaving)
            assert taken_over == list(range(size))
        assert max(Counter(left).values()) == 1
        assert set(submitted) - under_way == set(left)


def test_completions_that_go_on_in_the_next_step_are_those_of_an_engine_that_never_stops(make_worker, model, reader):
    """With equal weights, against every prompt sampled alone. The version, which counts steps, says which tokens are
    of which step."""
    settings = RolloutSettings(
        model=model,
        train=SAMPLING,
        evaluate=SAMPLING,
        max_prompt_tokens=8,
        max_batch_sequences=6,
        engine_options={"refill": True},
        max_lateness=1,
    )
    worker, alone = make_worker(RecordedRollout, settings), make_worker(Rollout, replace(settings, max_lateness=0))
    prompts = prompts_of([4, 5, 6, 7])
    from_start = [replace(one, index=4 + one.index) for one in prompts[:2]]
    begin = StepContext(step=0, phase="train", seed=0, num_items=4)
    worker.go_on_with([[late_from_start(one, begin, 2) for one in from_start]])

    expected, left, num_split = {}, Counter(), 0
    for step in range(4):
        context = replace(begin, step=step)
        expected |= sampled_alone(alone, context, prompts if step else [*prompts, *from_start])
        groups = one_step(worker, context, reader([prompts]))
        assert [group.index for group in groups] == [0, 1, 2, 3]
        for group, decision in zip(groups, worker.decisions[-4:], strict=True):
            submitted = expected[content(group)]
            left[content(group)] += 1
            versions = set(group.token_versions()[group.loss_mask.bool()].tolist())
            assert versions <= ({step} if submitted[0] == step else {step - 1, step})
            num_split += len(versions) > 1
            assert (decision["group"], tuple(decision["submitted"])) == (group.index, submitted)
            assert {int(version) for version in decision["tokens"]} == versions
            assert sum(decision["tokens"].values()) == group.loss_mask.sum()
        worker.go_on_with([unpack(pack(worker.late_groups()))])  # as a checkpoint keeps them
        assert len(worker.late_groups()) == 2
    assert left.keys() <= expected.keys() and max(left.values()) == 1 and len(left) == 16
    assert num_split, "no completion has outlived its step"


class RecordedRollout(Rollout):
    """Keeps its decisions."""

    def __init__(self, settings):
        super().__init__(settings)
        self.decisions = []

    @property
    def records(self):
        return True

    def decide(self, decision):
        self.decisions.append(decision)


def one_step(worker, context, prompts):
    worker._host.step = context
    worker.weights_received(context.step)
    written = ListOfItems()
    worker.generate(prompts, written)
    return written


class ListOfItems(list):
    """A writer that keeps what was put."""

    def put_many(self, items):
        self.extend(group for _, group in items)


def sampled_alone(worker, context, prompts):
    """Content of each prompt's group -> the step and the index with which it was submitted."""
    worker._host.step = context
    worker.weights_received(0)
    groups = [group for prompt in prompts for finished in worker.sample([prompt]) for group in finished]
    return {content(group): (context.step, group.index) for group in groups}


def content(group):
    """The tokens of its completions."""
    lengths = group.loss_mask.sum(-1).int().tolist()
    return tuple(tuple(row[:length]) for row, length in zip(group.completion_ids.tolist(), lengths, strict=True))
