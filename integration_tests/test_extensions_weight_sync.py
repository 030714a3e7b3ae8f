"""A weight sync of one's own, named by its import path in a recipe."""

from pathlib import Path

import pytest

from command_line import SHORT_PUSH, rows, train, weights
from rlinf_workers.testing.weight_sync import CHECKS, check_a_flipped_byte

PUSH = SHORT_PUSH | {
    "mode": "collocated",
    "cluster.num_devices": 1,
    "run.num_steps": 10,
    "run.evaluate_every": 10,
    "env.num_steps": 5,
    "algorithm.num_minibatches": 1,
    "env.max_episode_steps": 5,
}
OWN = {
    "cluster.weight_sync": "integration_tests.extensions.weight_sync:SocketSync",
    "cluster.weight_sync_options": "{host: localhost}",
}


@pytest.fixture(scope="module")
def pushed_by_own(tmp_path_factory):
    return train("pushcube-ppo", tmp_path_factory.mktemp("own") / "run", PUSH | OWN)


@pytest.mark.slow
@pytest.mark.maniskill
def test_it_trains_ten_steps(pushed_by_own):
    assert len(rows(pushed_by_own)) == 10


@pytest.mark.slow
@pytest.mark.maniskill
def test_the_numbers_are_those_of_the_shipped_link(tmp_path, pushed_by_own):
    shipped = train("pushcube-ppo", tmp_path / "run", PUSH)
    assert rows(pushed_by_own) == rows(shipped)
    assert weights(pushed_by_own) == weights(shipped)


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_link_of_the_docs_conforms(check):
    from integration_tests.extensions.weight_sync import SocketSync

    check(SocketSync)


@pytest.mark.slow
def test_the_link_of_the_docs_refuses_a_flipped_byte():
    from integration_tests.extensions.weight_sync import SocketSync

    def flip(sync):
        content = bytearray(sync._store.get("1 of 0"))
        content[-1] ^= 1
        sync._store.set("1 of 0", bytes(content))

    check_a_flipped_byte(SocketSync, flip)


def test_the_docs_show_it_as_it_is():
    root = Path(__file__).parent.parent
    page = (root / "docs/plugins/weight_sync.md").read_text()
    assert (root / "integration_tests/extensions/weight_sync.py").read_text() in page
