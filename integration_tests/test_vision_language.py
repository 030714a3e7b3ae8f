"""Vision-language models through the command line: training from pictures, and evaluating what was trained."""

import base64
import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from command_line import flags, last_checkpoint, rlinf, rows, train_here
from rlinf.config.reasoning import ArchitectureConfig
from rlinf.config.tasks import CountShapesTask
from rlinf.tasks import make_task
from rlinf.tasks.base import TaskProblem
from rlinf.tasks.language import write_model_folder

TINY = {
    "task.num_held_out": 20,
    "sft_warm_up.max_steps": 2,
    "sft_warm_up.batch_size": 4,
    "sft_warm_up.check_every": 2,
    "algorithm.group_size": 2,
    "rollout.num_prompts": 4,
    "run.num_steps": 2,
    "run.evaluate_every": 2,
    "run.checkpoint_every": 2,
    "run.stop_at_score": "null",
    "cluster.oversubscribe": "true",
}


def row(problem: TaskProblem):
    picture = base64.b64encode(problem.pictures[0].content).decode()
    return {"question": problem.prompt, "answer": problem.answer, "image": {"bytes": picture}}


def test_a_model_trains_from_pictures_and_is_evaluated_with_them(tmp_path):
    """The checkpoint has what its pictures need, and its accuracy on the same problems from a file is the run's."""
    run = train_here("count-shapes-grpo", tmp_path / "run", TINY)
    accuracy = rows(run, "evaluations.jsonl")[-1]["accuracy"]
    held_out = make_task(CountShapesTask(kind="count-shapes", num_held_out=20), 0).held_out()[""]
    (tmp_path / "own.jsonl").write_text("".join(f"{json.dumps(row(problem))}\n" for problem in held_out))
    settings = {"model": last_checkpoint(run) / "model", "temperature": 0, "max_new_tokens": 2}
    settings |= {"benchmarks.own.reward": "exact", "cluster.oversubscribe": "true"}
    done = rlinf("eval", f"own={tmp_path / 'own.jsonl'}", *flags(settings), "--output", tmp_path / "eval")
    assert done.returncode == 0
    samples = [json.loads(line) for line in (tmp_path / "eval" / "samples.jsonl").read_text().splitlines()]
    assert [sample["num_prompt_tokens"] for sample in samples] == [17] * 20
    assert sum(sample["outcome"] == "right" for sample in samples) == round(20 * accuracy)


@pytest.mark.slow
def test_an_agent_trains_with_pictures_that_messages_bring_and_is_evaluated(tmp_path):
    """The second turn of each episode follows the picture of the task and one that the agent adds. Trainer and engine
    give the sampled tokens the same log-probabilities."""
    agent = {"run": "integration_tests.extensions.zooms:look_again", "max_context_tokens": 48}
    settings = TINY | {f"rollout.agent.{name}": value for name, value in agent.items()}
    settings |= {"rollout.engine_options.refill": "true", "reward.kind": "random"}
    run = train_here("count-shapes-grpo", tmp_path / "run", settings)
    for step in rows(run):
        assert step["agent/turns"] == 2 and step["actor/trained_token_fraction"] > 0
        assert abs(step["actor/rollout_kl"]) < 1e-6
    held_out = make_task(CountShapesTask(kind="count-shapes", num_held_out=20), 0).held_out()[""]
    (tmp_path / "own.jsonl").write_text("".join(f"{json.dumps(row(problem))}\n" for problem in held_out[:4]))
    settings = {"model": last_checkpoint(run) / "model", "max_new_tokens": 2, "engine_options.refill": "true"}
    settings |= {"benchmarks.own.reward": "exact", "cluster.oversubscribe": "true"}
    settings |= {f"agent.{name}": value for name, value in agent.items()}
    done = rlinf("eval", f"own={tmp_path / 'own.jsonl'}", *flags(settings), "--output", tmp_path / "eval")
    assert done.returncode == 0
    samples = [json.loads(line) for line in (tmp_path / "eval" / "samples.jsonl").read_text().splitlines()]
    assert [sample["num_prompt_tokens"] for sample in samples] == [17] * 4


SUPERVISED = {
    "task.num_held_out": 4,
    "task.max_tokens": 32,
    "actor.batch_size": 4,
    "actor.learning_rate": 1e-2,
    "actor.max_tokens_per_micro_batch": 64,
    "actor.num_shards": 2,
    "cluster.num_devices": 1,
    "run.num_steps": 4,
    "run.evaluate_every": 4,
    "run.checkpoint_every": 4,
}


@pytest.fixture
def new_model(tmp_path):
    """A tiny Qwen2.5-VL with random weights."""
    task = make_task(CountShapesTask(kind="count-shapes"), 0)
    architecture = ArchitectureConfig(family="qwen2_5_vl", max_positions=64)
    write_model_folder(tmp_path / "new", architecture, task.alphabet or "", "float32")
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(tmp_path / "new"))
    model.save_pretrained(tmp_path / "new")
    return tmp_path / "new"


@pytest.mark.slow
def test_a_judge_from_a_folder_sees_the_problems_pictures(new_model, tmp_path):
    """A random judge prefers some completions; with the pictures of other problems it judges otherwise."""
    judge = {"kind": "judge", "path": new_model, "question": "{completion}{prompt}", "accepts": "1", "rejects": "0"}
    settings = TINY | {f"reward.{name}": value for name, value in judge.items()} | {"reward.graded": "true"}
    means = []
    for shuffled in ("false", "true"):
        keys = {"task.shuffle_pictures": shuffled, "run.num_steps": 1, "sft_warm_up": "null"}
        run = train_here("count-shapes-grpo", tmp_path / shuffled, settings | keys)
        assert "does not see" not in (run / "manifest.json").read_text()
        (step,) = rows(run)
        assert 0 < step["reward/mean"] < 1 and step["reward/judge_failures"] == 0
        means.append(step["reward/mean"])
    assert means[0] != means[1]


@pytest.mark.slow
def test_demonstrations_and_pairs_are_learned_with_their_pictures(new_model, tmp_path):
    """Both learn; with the pictures of other rows the losses are others. Demonstrations have theirs as the frames of a
    video."""
    task = make_task(CountShapesTask(kind="count-shapes"), 0)
    problems = [task.train_problem(index) for index in range(12)]
    for job, answers, to_columns in (
        ("sft", lambda one: {"completion": one.answer}, lambda image: {"videos": [[image, image]]}),
        ("dpo", lambda one: {"chosen": one.answer, "rejected": "?"}, lambda image: {"image": image}),
    ):
        losses = []
        for shift in (0, 1):
            data = [
                {"prompt": one.prompt.removeprefix("<image>"), **answers(one), **to_columns(row(other)["image"])}
                for one, other in zip(problems, [*problems[shift:], *problems[:shift]], strict=True)
            ]
            file = tmp_path / f"{job}-{shift}.jsonl"
            file.write_text("".join(f"{json.dumps(one)}\n" for one in data))
            settings = SUPERVISED | {"model.path": new_model, "task.train_files": file}
            run = train_here(job, tmp_path / f"{job}-{shift}", settings)
            losses.append([one["loss"] for one in rows(run, "evaluations.jsonl")])
        assert losses[0][-1] < losses[0][0], "it learns"
        assert losses[0][-1] != losses[1][-1], "it sees"


@pytest.mark.slow
def test_counting_is_learned_from_the_pictures(tmp_path):
    """The control has the same problems with the pictures of others: then guessing a number, one of five, is all that
    can be learned."""
    settings = {"run.max_minutes": "null", "run.stop_at_score": 0.85}
    run = train_here("count-shapes-grpo", tmp_path / "run", settings)
    scores = [row["accuracy"] for row in rows(run, "evaluations.jsonl")]
    assert scores[0] < 0.5 and scores[-1] >= 0.85
    control = {"task.shuffle_pictures": "true", "sft_warm_up.max_steps": 60, "run.num_steps": 40}
    shuffled = train_here("count-shapes-grpo", tmp_path / "control", {**settings, **control})
    assert max(row["accuracy"] for row in rows(shuffled, "evaluations.jsonl")) < 0.35
