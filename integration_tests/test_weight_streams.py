"""Which sync carries the weights changes no number of a run."""

import pytest

from command_line import SHORT_SORT, rows, train, weights

TWO_RANKS = SHORT_SORT | {
    "mode": "collocated",
    "cluster.num_devices": 2,
    "run.num_steps": 3,
    "run.evaluate_every": 3,
    "run.checkpoint_every": 3,
}


@pytest.mark.slow
def test_streams_give_the_numbers_of_shared_memory(tmp_path):
    shared, streams = (
        train("sort-grpo", tmp_path / sync, TWO_RANKS | {"cluster.weight_sync": sync}) for sync in ("shared", "streams")
    )
    assert rows(streams) == rows(shared)
    assert weights(streams) == weights(shared)
