"""An engine of one's own, named by its import path: it conforms, trains, and its order moves no number."""

import subprocess
from functools import partial
from pathlib import Path

import pytest
import torch

from command_line import SHORT_SORT, command, environment, rows, weights
from extensions.engine import OutOfOrder
from rlinf_workers.testing.engines import ENGINE_CHECKS, tiny_model

FOLDER = Path(__file__).parent
TEN_STEPS = SHORT_SORT | {
    "run.num_steps": 10,
    "run.evaluate_every": 10,
    "mode": "collocated",
    "cluster.num_devices": 1,
    "cluster.device": "cpu",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("check", ENGINE_CHECKS, ids=lambda check: check.__name__)
def test_it_conforms(check, model):
    check(partial(OutOfOrder, model, torch.device("cpu")), model)


def train(folder, overrides):
    return subprocess.run(
        command("sort-grpo", folder, overrides),
        capture_output=True,
        text=True,
        env=environment(),
        cwd=FOLDER,
        timeout=240,
    )


@pytest.mark.slow
def test_ten_steps_with_it_give_the_numbers_of_the_shipped_engine(tmp_path):
    own = {"rollout.engine": "extensions.engine:OutOfOrder", "rollout.engine_options": "{order_seed: 3}"}
    for name, overrides in (("shipped", {}), ("own", own)):
        done = train(tmp_path / name, TEN_STEPS | overrides)
        assert done.returncode == 0, done.stdout + done.stderr
    assert len(rows(tmp_path / "own")) == 10
    assert any(row["actor/grad_norm"] > 0 for row in rows(tmp_path / "own"))
    assert weights(tmp_path / "own") == weights(tmp_path / "shipped")


def test_the_page_shows_the_file():
    page = (FOLDER.parent / "docs" / "plugins" / "engine.md").read_text()
    source = (FOLDER / "extensions" / "engine.py").read_text()
    assert f"```python\n{source}```" in page
    assert len(source.splitlines()) < 60
