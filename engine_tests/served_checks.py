"""What SGLang and vLLM both promise, as checks of a running engine."""

import importlib.util
from dataclasses import replace

from rlinf_workers.engines.serving import ServingEngine
from rlinf_workers.testing import engines

ENGINE = "sglang" if importlib.util.find_spec("sglang") is not None else "vllm"
"""The engine of this venv."""


def take_all(engine: ServingEngine) -> None:
    while engine.finished():
        continue


def check_pause_and_suspension(engine: ServingEngine) -> None:
    """Neither changes a token: greedily, with the same weights in every version."""
    sampling, prompts = replace(engines.GREEDY, group_size=2, max_new_tokens=40), engines.prompts_of([4, 6])
    expected = {(one.index, one.members): one for one in engines.sample(engine, prompts, sampling)}
    engine.submit(prompts, sampling, seed=1, step=0)
    parts = engine.pause("recompute")
    engine.weights_received(3)
    engine.resume()
    unfinished = engine.suspend()
    engine.weights_received(4)
    engine.submit_unfinished(unfinished, sampling)
    while finished := engine.finished():
        parts += finished
    rows = 0
    for part in parts:
        for i in range(len(part.members)):
            length = int(part.loss_mask[i].sum())
            (whole,) = {tuple(one.token_ids[0].tolist()) for (index, _), one in expected.items() if index == part.index}
            assert tuple(part.token_ids[i, :length].tolist()) == whole[:length]
            assert not part.segments or sum(one.num_tokens for one in part.segments[i]) == length
            rows += 1
    assert rows == 4
