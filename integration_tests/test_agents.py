"""Jobs whose rollout runs agents: the same numbers under every plan, after a lost agent process, and in a replay."""

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from command_line import flags, rlinf, rows, steps_done, train_here, weights

CHANCE = """
import random

SIGNS = "wxyz"


async def play(session, task):
    draw = random.SystemRandom()
    (first,) = await session.chat(task.messages, agent="hinter")
    session.reward_turn(first, draw.random())
    signs = "!" + draw.choice(SIGNS) + draw.choice(SIGNS) + "="
    await session.chat([{"role": "user", "content": signs}], agent="guesser")
    return draw.random()


async def graded(session, task):
    (turn,) = await session.chat(task.messages)
    if task.text.startswith("2"):
        raise ConnectionError("the grader is down")
    await session.chat([*task.messages, turn.message(), {"role": "user", "content": "1"}])
    return float(task.answer)
"""
KEYS = {
    "model.architecture.hidden_size": 32,
    "model.architecture.intermediate_size": 64,
    "model.architecture.num_layers": 2,
    "sft_warm_up.max_steps": 5,
    "sft_warm_up.check_every": 5,
    "sft_warm_up.batch_size": 64,
    "sft_warm_up.reuse": "false",
    "task.num_held_out": 8,
    "rollout.num_prompts": 4,
    "actor.micro_batch_groups": 2,
    "run.num_steps": 3,
    "run.evaluate_every": 3,
    "run.max_minutes": "null",
    "run.stop_at_score": "null",
    "cluster.num_devices": 2,
    "cluster.oversubscribe": "true",
}


@pytest.fixture(autouse=True)
def _agent(tmp_path, monkeypatch):
    (tmp_path / "chance.py").write_text(CHANCE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)


def without_times(metrics):
    """An episode's time outside the engine is measured."""
    return [{key: value for key, value in row.items() if not key.endswith("outside_engine_s")} for row in metrics]


def agent_processes():
    """Ids of the agent processes of all runs on this machine whose ancestors include this process."""
    parents, host_pids = {}, []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                if b"rlinf_workers.agents.host" in (folder / "cmdline").read_bytes():
                    host_pids.append(int(folder.name))
            except (OSError, IndexError):
                continue
    return [pid for pid in host_pids if os.getpid() in ancestors(pid, parents)]


def ancestors(pid, parents):
    while pid in parents:
        pid = parents[pid]
        yield pid


def test_episodes_are_the_same_under_every_plan(tmp_path):
    keys = KEYS | {"sft_warm_up.max_steps": 60, "sft_warm_up.check_every": 60}
    first = train_here("grid-text", tmp_path / "collocated", keys | {"mode": "collocated"})
    second = train_here("grid-text", tmp_path / "disaggregated", keys | {"mode": "disaggregated"})
    assert without_times(rows(first)) == without_times(rows(second)) and weights(first) == weights(second)
    assert any(row["actor/grad_norm"] > 0 for row in rows(first))


def test_a_replay_of_overlapping_steps_ends_with_the_same_weights_though_the_agent_draws_lots(tmp_path):
    keys = KEYS | {
        "mode": "disaggregated",
        "algorithm.max_staleness": 2,
        "rollout.agent.run": "chance:play",
        "run.record": "true",
        "run.num_steps": 5,
    }
    run = train_here("guess-team", tmp_path / "run", keys)
    assert all(row["actor/grad_norm"] > 0 for row in rows(run))
    result = rlinf("replay", run, "--output", tmp_path / "again")
    assert "replayed 5 steps: samples, rewards and weights are the recorded ones" in result.stdout, result.stderr
    assert weights(tmp_path / "again") == weights(run)


def test_a_lost_agent_process_costs_a_worker_and_no_number(tmp_path):
    keys = KEYS | {"mode": "collocated", "run.num_steps": 12, "run.evaluate_every": 12}
    expected = train_here("guess-team", tmp_path / "undisturbed", keys)
    killed = []

    def kill():
        while not killed:
            time.sleep(0.02)
            if steps_done(tmp_path / "disturbed") >= 2:
                killed.extend(agent_processes()[:1])
                for pid in killed:
                    os.kill(pid, signal.SIGKILL)

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    run = train_here("guess-team", tmp_path / "disturbed", keys)
    thread.join(1.0)
    assert killed, "the run ended before its agent process was found"
    assert without_times(rows(run)) == without_times(rows(expected)) and weights(run) == weights(expected)
    assert "agent process" in (run / "manifest.json").read_text()


def test_an_evaluation_runs_the_episodes_of_the_run_and_counts_their_causes(tmp_path):
    keys = KEYS | {
        "mode": "collocated",
        "run.num_steps": 1,
        "rollout.agent": "{run: chance:graded, num_retries: 0, max_discarded: 1.0, max_context_tokens: 56}",
        "reward": "{kind: episode}",
    }
    run = train_here("tool-calculator", tmp_path / "run", keys)
    problems = {"111*111=": "1", "211*111=": "1", "311*111=": "0", "411*111=": "1"}
    rows_of_file = [json.dumps({"question": text, "answer": answer}) for text, answer in problems.items()]
    (tmp_path / "products.jsonl").write_text("\n".join(rows_of_file))
    settings = {
        "model": run,
        "benchmarks.products.reward": "exact",
        "k": 2,
        "temperature": 1.0,
        "max_batch_sequences": 4,
    }
    line = ["eval", f"products={tmp_path / 'products.jsonl'}", *flags(settings | {"cluster.num_devices": 1})]
    result = rlinf(*line, "--output", tmp_path / "eval")
    assert result.returncode == 0, result.stderr
    assert "harness_lost 25.0%" in result.stdout
    scores = json.loads((tmp_path / "eval" / "result.json").read_text())["benchmarks"]["products"]
    assert scores["causes"] == {"harness_lost": 2} and scores["outcomes"] == {"right": 4, "wrong": 2, "discarded": 2}
    assert scores["scores"]["avg@2"]["value"] == pytest.approx(2 / 3) and scores["mean_turns"] == pytest.approx(1.5)
    samples = [json.loads(row) for row in (tmp_path / "eval" / "samples.jsonl").read_text().splitlines()]
    whole = next(row for row in samples if row["prompt"] == "111*111=")
    assert [one["author"] for one in whole["segments"] if one["author"] != "template"] == ["policy", "user", "policy"]
    assert all("the grader is down" in row["detail"] for row in samples if row["outcome"] == "discarded")
