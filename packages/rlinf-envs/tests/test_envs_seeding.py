from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from rlinf_envs import EnvError, episode_seed
from rlinf_envs.core.seeding import NUM_SEEDS, checked_seeds

SEEDS = st.integers(0, NUM_SEEDS - 1)


@given(SEEDS)
def test_first_episode_has_the_seed_itself(seed: int) -> None:
    assert episode_seed(seed, 0) == seed


@given(SEEDS, st.integers(1, 10**9))
def test_later_seeds_are_seeds(seed: int, episode_index: int) -> None:
    assert 0 <= episode_seed(seed, episode_index) < NUM_SEEDS


def test_values_are_frozen() -> None:
    """A run is replayed from its first seeds, perhaps years later: these numbers must never change."""
    assert [episode_seed(7, k) for k in range(4)] == [7, 3098854039, 2790458877, 2359544758]
    assert [episode_seed(s, 1) for s in (0, 1, NUM_SEEDS - 1)] == [2802244911, 1581361928, 3910872080]


def test_neighbouring_seeds_do_not_share_episodes() -> None:
    """Rows are commonly seeded s, s+1, ...; a sum instead of a mix would let row 1 repeat what row 0 had."""
    seen = {episode_seed(seed, k) for seed in range(100) for k in range(1, 100)}
    assert len(seen) > 99 * 100 - 5  # of 2**32, ten thousand draws collide about 0.01 times


def test_negative_episode_index_is_an_error() -> None:
    with pytest.raises(EnvError, match="episode_index=-1"):
        episode_seed(0, -1)


@pytest.mark.parametrize(
    ("seeds", "text"),
    [([1], "1 seeds for 2"), ([1, -2], r"seeds\[1\]=-2"), ([2**32, 0], r"seeds\[0\]=4294967296")],
)
def test_wrong_seeds_are_named(seeds: list[int], text: str) -> None:
    with pytest.raises(EnvError, match=text):
        checked_seeds(seeds, 2)
