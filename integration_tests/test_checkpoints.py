"""A run goes on from its checkpoint under another plan or backend, and after being killed while it wrote one."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from command_line import (
    END_TIMEOUT_S,
    SHORT_SORT,
    all_gone,
    environment,
    last_checkpoint,
    rows,
    start,
    train,
    wait_for,
    weights,
    worker_processes,
)
from rlinf.run_folder.seal import damage

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


NUM_KILLS = 10
OFTEN = {
    "mode": "collocated",
    "cluster.num_devices": 2,
    "cluster.oversubscribe": True,
    "model.architecture.hidden_size": 256,
    "model.architecture.intermediate_size": 1024,
    "run.num_steps": 100_000,
    "run.evaluate_every": 100_000,
    "run.checkpoint_every": 1,
}
ONE, TWO = plan("collocated", 1, 1), plan("collocated", 2, 2)
APART = plan("disaggregated", 4, 2)
SHARDED_TWO, SHARDED_FOUR = plan("collocated", 2, 2, "fsdp2"), plan("collocated", 4, 4, "fsdp2")


def resumed(first, folder, others):
    """Goes on with a copy of the run for one step under each plan."""
    for number, other in enumerate(others):
        shutil.copytree(first, folder / str(number), symlinks=True)
        yield train(None, folder / str(number), other | {"run.num_steps": 3})


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
    expected, *found = (rows(run)[2] for run in resumed(written, tmp_path, others))
    assert expected["actor/grad_norm"] > 0
    for row in found:
        for key in ("actor/loss", "actor/grad_norm", "reward/mean"):
            assert row[key] == pytest.approx(expected[key], rel=1e-6, abs=1e-7), key


def killed_saves(*arguments):
    script = Path(__file__).with_name("killed_saves.py")
    done = subprocess.run(
        [sys.executable, script, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=END_TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    for one in found:
        assert one["damage"] is None and one["is_bit_equal"] and not one["temporary"], one
        assert not any(name.startswith(".") or ".bad" in name for name in one["names"]), one
    return found


def test_a_save_killed_at_any_of_its_steps_leaves_a_whole_checkpoint(tmp_path):
    """Nothing temporary stays after the next start, and the newest checkpoint has the bits that were saved."""
    found = killed_saves(tmp_path)
    assert [one["killed"] for one in found] == [True] * (len(found) - 1) + [False]
    assert len(found) > 20
    for newest in ("step-000001", "step-000002"):
        assert any(max(one["names"]) == newest for one in found)


@pytest.mark.slow
def test_50_saves_killed_at_random_moments_leave_a_whole_checkpoint(tmp_path):
    found = killed_saves(tmp_path, 50)
    assert len(found) == 50 and any(one["inside"] for one in found)


@pytest.mark.slow
def test_runs_killed_while_they_save_go_on(tmp_path):
    """The driver or a rank that writes is killed at a random moment after a save has begun."""
    output, draw = tmp_path / "run", random.Random(14)
    folder = output / "checkpoints"
    process = start("sort-grpo", output, SHORT_SORT | OFTEN)
    newest = num_inside = 0
    for number in range(NUM_KILLS):
        wait_for_save(folder, newest + draw.randrange(2, 4), process)
        time.sleep(draw.uniform(0.0, 0.2))
        workers = worker_processes(output)
        num_inside += any(folder.glob(".step-*"))
        os.kill(process.pid if number % 2 else workers[f"actor/{draw.randrange(2)}"], signal.SIGKILL)
        process.communicate(timeout=END_TIMEOUT_S)
        assert all_gone(workers.values())
        whole = list(folder.glob("step-*"))
        assert whole and [damage(path) for path in whole] == [None] * len(whole)
        newest = newest_step(folder)
        process = start(None, output, {})
    process.kill()
    process.communicate()
    print(f"{num_inside} of {NUM_KILLS} inside a save")
    train(None, output, {"run.num_steps": newest_step(folder) + 1})
    assert not list(output.rglob("*.partial")) and not list(folder.glob("*.bad"))


def wait_for_save(folder, step, process):
    """After a checkpoint of the step."""
    wait_for(lambda: newest_step(folder) >= step and any(folder.glob(".step-*")), process, f"checkpoint {step}")


def newest_step(folder):
    return max((int(path.name[-6:]) for path in folder.glob("step-*")), default=-1)
