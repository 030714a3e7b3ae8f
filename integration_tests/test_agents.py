"""Jobs whose rollout runs agents: the same numbers under every plan, after a lost agent process, and in a replay."""

import json

import pytest

from command_line import flags, logged_processes, rlinf, rows, train_and_kill, train_here, weights

CHANCE = """
import asyncio
import os
import pathlib
import random
import re
import signal

from rlinf_workers.agents import part_of

FOLDER = pathlib.Path(__file__).parent

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


# One to three turns; if the task has a picture, each but the first follows another one. In a step it kills a rank of
# the rollout, if a file names the run, while others are sampled.
async def counted(session, task):
    with open(FOLDER / "begun", "a") as begun:
        print(task.phase, task.step, task.index, task.member, file=begun)
    messages, order = list(task.messages), FOLDER / "kill"
    for number in range(1 + task.index % 3):
        (turn,) = await session.chat(messages)
        added = [{"type": "text", "text": "1"}]
        if task.pictures:
            grey = bytes([8 * number + task.index]) * 48 * 48 * 3
            added.append(part_of(b"P6 48 48 255\\n" + grey))
        messages += [turn.message(), {"role": "user", "content": added}]
        if (task.phase, task.step, task.index) == ("train", 1, 3) and order.exists():
            log = pathlib.Path(order.read_text(), "logs", "rollout", "1.log")
            order.unlink()
            os.kill(int(re.search(r"process (\\d+)", log.read_text())[1]), signal.SIGKILL)
        await asyncio.sleep(0.01 * task.member)
    return float(len(turn.text))
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
    return [
        {
            key: value
            for key, value in row.items()
            if not key.endswith("outside_engine_s") and not key.startswith("router/")
        }
        for row in metrics
    ]


@pytest.mark.slow
def test_episodes_are_the_same_under_every_plan(tmp_path):
    keys = KEYS | {"sft_warm_up.max_steps": 60, "sft_warm_up.check_every": 60}
    first = train_here("grid-text", tmp_path / "collocated", keys | {"mode": "collocated"})
    second = train_here("grid-text", tmp_path / "disaggregated", keys | {"mode": "disaggregated"})
    assert without_times(rows(first)) == without_times(rows(second)) and weights(first) == weights(second)
    assert any(row["actor/grad_norm"] > 0 for row in rows(first))


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_lost_router_costs_no_number(tmp_path):
    keys = KEYS | {"mode": "collocated", "run.num_steps": 12, "run.evaluate_every": 12}
    expected = train_here("guess-team", tmp_path / "undisturbed", keys)
    done, _ = train_and_kill("guess-team", tmp_path / "disturbed", keys, "router/0", after_step=2)
    run = tmp_path / "disturbed"
    assert done.returncode == 0 and "router/0 on" in (run / "manifest.json").read_text()
    assert without_times(rows(run)) == without_times(rows(expected)) and weights(run) == weights(expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "tokens"), [("tool-calculator", 56), pytest.param("count-shapes-grpo", 64, marks=pytest.mark.slow)]
)
def test_a_killed_engine_costs_no_session_and_no_number(recipe, tokens, tmp_path):
    """One of three, killed by an episode while others sample. Episodes that were under way go on; none begins again."""
    keys = KEYS | {
        "mode": "disaggregated",
        "cluster.num_devices": 4,
        "plan.devices": "{rollout: [0, 1, 2], actor: [3]}",
        "rollout.num_prompts": 8,
        "rollout.agent": f"{{run: chance:counted, max_context_tokens: {tokens}}}",
        "reward": "{kind: episode}",
        "rollout.engine_options.refill": "true",
    }
    expected = train_here(recipe, tmp_path / "undisturbed", keys)
    begun = sorted((tmp_path / "begun").read_text().splitlines())
    (tmp_path / "begun").unlink()
    (tmp_path / "kill").write_text(str(tmp_path / "disturbed"))
    run = train_here(recipe, tmp_path / "disturbed", keys)
    assert len(logged_processes(run)["rollout/1"]) == 2, "the engine was killed and replaced"
    assert sorted((tmp_path / "begun").read_text().splitlines()) == begun
    assert without_times(rows(run)) == without_times(rows(expected)) and weights(run) == weights(expected)
    assert rows(run)[1]["router/lost_turns"] > 0


@pytest.mark.slow
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
