"""Episodes that simulators take one after the other: which are trained, and that none of this depends on simulators."""

import random
from dataclasses import replace

import pytest
import torch

from rlinf_envs import EnvSpec, EpisodeEnd, EpisodeKeeper, make_env, tensor_field, unpack_episodes
from rlinf_workers.roles.embodied.dealing import EpisodeBatch, EpisodeDealer
from rlinf_workers.roles.embodied.dealt_group import DealtGroup, DealtStep
from rlinf_workers.roles.embodied.environment import Environment, EnvironmentSettings, training_seeds
from rlinf_workers.roles.records.embodied import Action
from rlinf_workers.worker import StepContext

BATCH = EpisodeBatch(num_episodes=8, group_size=2, num_shards=2, dynamic_sampling=True, oversampling=2.0)
"""Two groups of two episodes in each of two shards, out of at most four."""


def test_groups_without_a_signal_leave_their_places_to_the_next_ones():
    equal, differ = [1.0, 1.0], [0.0, 1.0]
    assert list(BATCH.starts_of(1)) == [1, 3, 5, 7]
    assert BATCH.chosen(1, {1: equal, 3: differ}) is None, "there are further starts"
    assert BATCH.chosen(1, {1: equal, 3: differ, 7: differ}) is None, "an earlier one may still have a signal"
    assert BATCH.chosen(1, {1: equal, 3: differ, 5: differ, 7: differ}) == ([3, 5], [1, 3, 5])
    assert BATCH.chosen(0, {0: differ, 2: differ}) == ([0, 2], [0, 2])
    assert BATCH.chosen(0, {0: equal, 2: equal, 4: differ, 6: equal}) == ([4], [0, 2, 4, 6])
    assert BATCH.chosen(0, dict.fromkeys((0, 2, 4, 6), equal)) == ([0], [0, 2, 4, 6]), "no shard is empty"
    plain = replace(BATCH, dynamic_sampling=False, oversampling=1.0)
    assert [plain.chosen(lane, {lane: equal}) for lane in range(plain.num_lanes)] == [([n], [n]) for n in range(4)]


def end_of(episode: int) -> EpisodeEnd:
    outcome = float(random.Random(episode).random() < 0.5)
    return EpisodeEnd(
        env_index=0, episode_index=0, seed=0, return_=outcome, length=1, success_once=None, success_at_end=None
    )


def dealt(num_simulators: int, order: random.Random) -> tuple[set[int], list[float], int]:
    """The starts that are trained, what was reported, and the episodes that were begun, if they end in this order."""
    reported: list[float] = []
    dealer = EpisodeDealer(
        BATCH, lanes=[0, 1], seed_of=lambda start: start, report=lambda end, cut: reported.append(end.return_)
    )
    running: list[int] = []
    num_begun = 0
    while not dealer.is_done:
        deals = dealer.take(num_simulators - len(running))
        assert all(deal.seed == deal.episode // 2 for deal in deals)
        running += [deal.episode for deal in deals]
        num_begun += len(deals)
        episode = running.pop(order.randrange(len(running)))
        dealer.ended(episode, end_of(episode), cut=False)
    return dealer.chosen, reported, num_begun


def test_what_is_trained_depends_neither_on_the_number_of_simulators_nor_on_their_speed():
    expected, reported, fewest = dealt(1, random.Random(0))
    assert len(expected) == 4 and len(reported) < 16
    for number in (2, 3, 7, 16):
        for seed in range(5):
            chosen, others, num_begun = dealt(number, random.Random(seed))
            assert (chosen, others) == (expected, reported)
            assert fewest <= num_begun <= 16


def kept_episodes(make_worker, num_envs: int, num_groups: int, num_processes: int = 0):
    """The episodes of a step of pushes to the right on CartPole, and its metrics."""
    settings = EnvironmentSettings(
        spec=EnvSpec(
            kind="gymnasium",
            id="CartPole-v1",
            num_envs=num_envs // num_groups,
            max_episode_steps=9,
            num_processes=num_processes,
        ),
        num_groups=num_groups,
        num_steps=9,
        episodes=EpisodeBatch(num_episodes=16, group_size=2, num_shards=2),
        reads=("state",),
        chunk_size=4,
        num_eval_episodes=1,
        same_start=True,
        eval_seed=5,
        keeps_episodes=True,
    )
    worker = make_worker(Environment, settings)
    worker._host.step = StepContext(step=3, phase="train", seed=1, num_items=0)
    observations = worker.begin_segments()
    while observations:
        item = observations.pop(0)
        if not item.is_last:
            actions = torch.ones(num_envs // num_groups, 4, 1, dtype=torch.int64)
            observations += worker.advance(Action(group=item.group, time=item.time, actions=actions))
    groups = [worker.take_episodes_of(group) for group in range(num_groups)]
    worker.close()
    episodes = [
        one for of in groups for one in unpack_episodes({name: column.numpy() for name, column in of.episodes.items()})
    ]
    episodes.sort(key=lambda one: (one.end.env_index, one.end.episode_index))
    return [(one.end, one.actions.tolist(), one.rewards.tolist()) for one in episodes], worker._host.metrics.drain()


@pytest.mark.parametrize(("num_envs", "num_groups", "num_processes"), [(3, 1, 0), (8, 2, 0), (16, 1, 0), (4, 2, 1)])
def test_kept_episodes_do_not_depend_on_the_simulators(make_worker, num_envs, num_groups, num_processes):
    expected, _ = kept_episodes(make_worker, 1, 1)
    got, metrics = kept_episodes(make_worker, num_envs, num_groups, num_processes)
    assert got == expected
    assert [(end.env_index, end.episode_index) for end, _, _ in got] == [(n // 2, n % 2) for n in range(16)]
    assert [end.seed for end, _, _ in got] == [training_seeds(1, 3, n // 2, 1)[0] for n in range(16)]
    assert len(metrics["env/idle_fraction"].terms) == num_groups


def test_idle_is_the_time_without_an_episode(make_worker):
    alone = kept_episodes(make_worker, 1, 1)[1]["env/idle_fraction"].terms
    assert alone == [0.0], "one simulator always has an episode"
    episodes, metrics = kept_episodes(make_worker, 16, 1)
    chunks = [-(-end.length // 4) for end, _, _ in episodes]
    assert metrics["env/idle_fraction"].terms == [pytest.approx(1 - sum(chunks) / (16 * max(chunks)))]


def simulated(num_envs: int, numbers: list[int]) -> tuple[list[list[tuple]], DealtGroup, int]:
    """The kept episodes of steps of pushes to the right on CartPole, all begun at once, by the rows of one group; the
    group, and its rounds with episodes of several steps."""
    batch = EpisodeBatch(num_episodes=6)
    env = EpisodeKeeper(make_env(EnvSpec(kind="gymnasium", id="CartPole-v1", num_envs=num_envs, max_episode_steps=11)))
    group = DealtGroup(
        index=0, env=env, read=lambda fields: {"state": tensor_field(fields, "state")}, chunk_size=1, sends_finals=False
    )
    steps = {
        n: DealtStep(batch, lanes=range(6), seed_of=lambda start, n=n: training_seeds(1, n, start, 1)[0], groups=[0])
        for n in numbers
    }
    sent, num_shared = [one for step in steps.values() for one in group.join(step)], 0
    while sent:
        for step, observation in sent:
            step.was_sent(observation)
        acting = [step for step, observation in sent if not observation.is_last]
        num_shared += len(acting) > 1
        sent = []
        for step in acting:
            assert not sent, "it waits for the actions of all steps"
            sent = group.act(step, torch.ones(num_envs, 1, dtype=torch.int64))
    assert not any(step.running for step in steps.values())
    of_steps = [
        sorted(step.kept_episodes(0), key=lambda one: (one.end.env_index, one.end.episode_index))
        for step in steps.values()
    ]
    env.close()
    return [[(one.end, one.actions.tolist()) for one in episodes] for episodes in of_steps], group, num_shared


def test_rows_that_a_step_does_not_need_take_the_episodes_of_the_next():
    expected = [simulated(1, [number])[0][0] for number in (3, 4, 5)]
    assert [len(episodes) for episodes in expected] == [6, 6, 6]
    for num_envs in (2, 4, 9):
        episodes, group, num_shared = simulated(num_envs, [3, 4, 5])
        assert episodes == expected
        assert num_shared > 0
        num_actions = sum(len(actions) for of_step in expected for _, actions in of_step)
        assert group.num_simulated == num_actions
        alone = sum(simulated(num_envs, [number])[1].num_rounds for number in (3, 4, 5))
        assert group.num_rounds < alone
