"""A run goes on from its checkpoint under another plan or backend, and after being killed while it wrote one."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from command_line import (
    END_TIMEOUT_S,
    SHORT_SORT,
    environment,
    last_checkpoint,
    rows,
    train,
    weights,
)

SHORT = SHORT_SORT | {
    "actor.num_shards": 4,
    "run.num_steps": 2,
    "run.evaluate_every": 100,
    "cluster.oversubscribe": True,
}
"""Checkpoints before the first step and after the second."""


def plan(mode, num_devices, num_ranks, backend="replicated"):
    return {
        "mode": mode,
        "cluster.num_devices": num_devices,
        "plan.num_ranks": f"{{actor: {num_ranks}}}",
        "actor.backend": backend,
    }


ONE, TWO = plan("collocated", 1, 1), plan("collocated", 2, 2)
APART = plan("disaggregated", 4, 2)
SHARDED_TWO, SHARDED_FOUR = plan("collocated", 2, 2, "fsdp2"), plan("collocated", 4, 4, "fsdp2")


def resumed(first, folder, others):
    """Goes on with a copy of the run for one step under each plan."""
    for number, other in enumerate(others):
        shutil.copytree(first, folder / str(number), symlinks=True)
        yield train(None, folder / str(number), other | {"run.num_steps": 3})


@pytest.mark.slow
def test_replicated_ranks_and_modes_go_on_to_the_bit(tmp_path):
    first = train("sort-grpo", tmp_path / "first", SHORT | {"actor.num_shards": 2} | TWO)
    assert len(list((last_checkpoint(first) / "model").glob("model-0000?-of-00002.safetensors"))) == 2
    expected, *others = resumed(first, tmp_path, [ONE, APART])
    assert any(row["actor/grad_norm"] > 0 for row in rows(expected)[2:])
    for other in others:
        assert rows(other) == rows(expected)
        assert weights(other) == weights(expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "others"),
    [(SHARDED_TWO, [SHARDED_TWO, SHARDED_FOUR, ONE]), (ONE, [ONE, TWO, SHARDED_TWO, SHARDED_FOUR, APART])],
    ids=["fsdp2", "replicated"],
)
def test_other_backends_and_numbers_of_ranks_go_on_within_rounding(tmp_path, first, others):
    written = train("sort-grpo", tmp_path / "first", SHORT | first)
    expected, *other_rows = (rows(run)[2] for run in resumed(written, tmp_path, others))
    assert expected["actor/grad_norm"] > 0
    for row in other_rows:
        for key in ("actor/loss", "actor/grad_norm", "reward/mean"):
            assert row[key] == pytest.approx(expected[key], rel=1e-6, abs=1e-7), key


def lines_of(script, *arguments):
    """What a script beside this file says, a line of JSON at a time."""
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name(script), *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=END_TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def killed_saves(*arguments):
    saves = lines_of("killed_saves.py", *arguments)
    for one in saves:
        assert one["damage"] is None and one["is_bit_equal"] and not one["temporary"], one
        assert not any(name.startswith(".") or ".bad" in name for name in one["names"]), one
    return saves


def test_a_save_killed_at_any_of_its_steps_leaves_a_whole_checkpoint(tmp_path):
    """Nothing temporary stays after the next start, and the newest checkpoint has the bits that were saved."""
    saves = killed_saves(tmp_path)
    assert [one["killed"] for one in saves] == [True] * (len(saves) - 1) + [False]
    assert len(saves) > 20
    for newest in ("step-000001", "step-000002"):
        assert any(max(one["names"]) == newest for one in saves)


@pytest.mark.slow
def test_50_saves_killed_at_random_moments_leave_a_whole_checkpoint(tmp_path):
    saves = killed_saves(tmp_path, 50)
    assert len(saves) == 50 and any(one["inside"] for one in saves)


@pytest.mark.slow
def test_runs_killed_while_they_save_go_on(tmp_path):
    """The driver or a rank that writes is killed at a random moment after a save has begun."""
    *kills, end = lines_of("killed_runs.py", tmp_path, 10)
    assert len(kills) == 10 and any(one["inside"] for one in kills)
    for one in kills:
        assert not one["damage"] and one["resumed"] == one["newest"] and not one["stays"], one
    assert end == {"at_the_end": []}
