"""Completions of `sglang` that keep their KV cache when new weights arrive: an engine that was started for it."""

import itertools
import time
from dataclasses import replace

import pytest
import torch

from rlinf_workers.engines.sglang.engine import SGLangEngine
from rlinf_workers.engines.sglang.spec import KEEPS_CACHE
from rlinf_workers.testing import engines

pytestmark = pytest.mark.minimum
PAUSE_S = 0.02


@pytest.fixture
def engine(tmp_path):
    settings = dict.fromkeys(KEEPS_CACHE, True)
    running = SGLangEngine(
        engines.tiny_model(tmp_path),
        torch.device("cpu"),
        max_prompt_tokens=engines.WIDTH,
        max_batch_sequences=engines.MAX_SEQUENCES,
        **settings,
    )
    yield running
    running.close()


def versions_of(part, row):
    return [one.policy_version for one in part.segments[row]] if part.segments else [part.policy_version]


def test_completions_in_flight_count_for_each_version_and_keep_their_tokens(engine):
    """Greedy, with the same weights in every version."""
    sampling, prompts = replace(engines.GREEDY, group_size=2, max_new_tokens=40), engines.prompts_of([4, 6])
    expected = {one.index: one.token_ids[0].tolist() for one in engines.sample(engine, prompts, sampling)}
    engine.submit(prompts, sampling, seed=1, step=0)
    parts = []
    for version in range(3, 8):
        time.sleep(PAUSE_S)
        parts += engine.pause("keep")
        engine.weights_received(version)
        engine.resume()
    while finished := engine.finished():
        parts += finished
    rows = [(part, row) for part in parts for row in range(len(part.members))]
    assert len(rows) == 4
    for part, row in rows:
        length = int(part.loss_mask[row].sum())
        assert part.token_ids[row, :length].tolist() == expected[part.index][:length]
        assert not part.segments or sum(one.num_tokens for one in part.segments[row]) == length
        assert all(one < two for one, two in itertools.pairwise(versions_of(part, row)))
    assert any(len(versions_of(part, row)) > 1 for part, row in rows), "no completion was in flight"
