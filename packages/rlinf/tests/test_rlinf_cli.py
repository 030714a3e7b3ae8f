"""The command line, in this process: what it accepts, and how each mistake ends. No job runs."""

import argparse
import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rlinf import jobs
from rlinf.cli import config_command, table
from rlinf.cli.main import main, make_parser
from rlinf.config.catalog import shipped_recipes
from rlinf.config.load import load_config, to_yaml
from rlinf.errors import RunFailed, Terminated, UserError
from rlinf.jobs.reasoning.memory import with_actor

# -- the public command line ---------------------------------------------------------------------------------------


def command_line(parser: argparse.ArgumentParser, name: str = "rlinf") -> dict[str, list[str]]:
    """Command -> its options and positional arguments."""
    options: dict[str, list[str]] = {name: []}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command, below in action.choices.items():
                options |= command_line(below, f"{name} {command}")
        else:
            options[name] += action.option_strings or [action.dest]
    return options


def test_the_public_command_line_is_this():
    venv = {
        "rlinf venv": ["-h", "--help"],
        "rlinf venv create": ["-h", "--help", "name", "--cpu", "--python"],
        "rlinf venv list": ["-h", "--help"],
        "rlinf venv check": ["-h", "--help", "name"],
        "rlinf venv remove": ["-h", "--help", "name"],
    }
    assert command_line(make_parser()) == {
        "rlinf": ["-h", "--help", "--version", "-V", "--traceback", "--log-level"],
        "rlinf train": ["-h", "--help", "recipe", "--output", "--resume", "--accept-changed-inputs"],
        "rlinf eval": [
            *("-h", "--help", "benchmarks", "--suite", "--compare", "--protocol", "--force"),
            *("--output", "--resume"),
        ],
        "rlinf play": [
            *("-h", "--help", "path", "--checkpoint", "--episodes", "--seed", "--protocol"),
            *("--one-by-one", "--no-video", "--output"),
        ],
        "rlinf explain": ["-h", "--help", "run_folder", "--all", "--json"],
        "rlinf serve": [
            *("-h", "--help", "path", "--checkpoint", "--host", "--port", "--api-key-file", "--rename"),
        ],
        "rlinf export": [
            "-h",
            "--help",
            "path",
            "--output",
            "--push",
            "--private",
            "--checkpoint",
            "--policy",
            "--dtype",
            "--merged",
        ],
        "rlinf profile": ["-h", "--help", "recipe", "--output"],
        "rlinf data": ["-h", "--help", "sources", "--recipe", "--examples"],
        "rlinf plan": [
            *(
                "-h",
                "--help",
                "problem",
                "--gpu",
                "--env-step-s",
                "--mode",
                "--draws",
                "--what-if",
                "--output",
                "--json",
                "--schema",
            ),
        ],
        "rlinf check": ["-h", "--help", "recipe", "--demonstrations", "--checkpoint"],
        "rlinf config": ["-h", "--help"],
        "rlinf config list": ["-h", "--help"],
        "rlinf config show": ["-h", "--help", "recipe"],
        "rlinf config schema": ["-h", "--help"],
        "rlinf config explain": ["-h", "--help", "key"],
        "rlinf report": ["-h", "--help", "run_folder", "--output"],
        "rlinf replay": [
            *("-h", "--help", "run_folder", "--from", "--output"),
            *("--list", "--step", "--env", "--episode", "--film", "--no-film"),
            *("--continue-at", "--checkpoint", "--export", "--fps"),
        ],
        "rlinf compare": ["-h", "--help", "runs", "--output"],
        "rlinf summary": ["-h", "--help", "runs", "--output"],  # the old name
        **venv,
        **{command.replace("venv", "env"): options for command, options in venv.items()},  # the old name
        "rlinf doctor": ["-h", "--help", "--json", "--output", "--recipe", "--cluster", "--launcher", "--links"],
        "rlinf completion": ["-h", "--help"],
    }


def test_bash_completes_commands_options_recipes_and_keys(rlinf):
    script = rlinf("completion").out

    def completed(*words: str) -> list[str]:
        ask = f"{script}\nCOMP_WORDS=({' '.join(words)})\nCOMP_CWORD={len(words) - 1}\n_rlinf\necho ${{COMPREPLY[@]}}"
        return subprocess.run(["bash", "-c", ask], capture_output=True, text=True).stdout.split()

    assert completed("rlinf", "ex") == ["export", "explain"]
    assert completed("rlinf", "train", "sort") == ["sort-grpo", "sort-grpo-megatron-sglang"]
    assert completed("rlinf", "train", "x", "--algorithm.clip_") == ["--algorithm.clip_high", "--algorithm.clip_low"]
    assert completed("rlinf", "train", "x", "--task.prompt_t") == ["--task.prompt_template"]
    assert completed("rlinf", "train", "x", "--res") == ["--resume"]
    assert completed("rlinf", "eval", "x", "--max_new") == ["--max_new_tokens"]
    assert completed("rlinf", "doctor", "--c") == ["--cluster"]
    assert completed("rlinf", "report", "x") == [], "files are bash's own"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", "the following arguments are required: COMMAND\nhint: see rlinf --help"),
        ("trian sort-grpo", "'trian' is no command; did you mean rlinf train?\nhint: commands: train, eval, play"),
        ("xyz", "'xyz' is no command\nhint: commands: train, eval, play"),
        (
            "train sort-grpo actor.lr=1e-6",
            "unknown argument 'actor.lr=1e-6'\nhint: an override is written --actor.learning_rate 1e-6",
        ),
        ("train sort-grpo +a.b=c", "unknown argument '+a.b=c'\nhint: an override is written --a.b c"),
        (
            "train sort-grpo actor_rollout_ref.rollout.n=8",
            "unknown argument 'actor_rollout_ref.rollout.n=8'\nhint: an override is written --algorithm.group_size 8",
        ),
        (
            "train sort-grpo sft_warm_up.max_steps=3",
            "unknown argument 'sft_warm_up.max_steps=3'\nhint: an override is written --sft_warm_up.max_steps 3",
        ),
        ("train sort-grpo --num-generations 8", "--num-generations is not a key; did you mean --algorithm.group_size?"),
        ("train pushcube-ppo --env.num-envs 8", "--env.num-envs is not a key; did you mean --env.num_envs?"),
        ("train sort-grpo --num_generations 8", "--num_generations is not a key; did you mean --algorithm.group_size?"),
        ("train sort-grpo --beta 0.1", "--beta is not a key; did you mean --algorithm.kl_coef?"),
        (
            "train sort-grpo --actor_rollout_ref.rollout.n 8",
            "--actor_rollout_ref is not a key; did you mean --algorithm.group_size?",
        ),
        (
            "train pushcube-ppo --num_generations 8",
            "--num_generations is not a key; did you mean --algorithm.group_size?",
        ),
        ("eval a.b=c --model x", "'a.b=c' is no benchmark\nhint: a setting is --a.b c; a benchmark is NAME=FILE"),
        ("config", "the following arguments are required: ACTION\nhint: see rlinf config --help"),
        ("config show", "the following arguments are required: recipe"),
        ("config list x", "unknown argument 'x'"),
        ("config list --a.b 3", "unknown argument '--a.b'"),
        ("train", "give a recipe to start a run, or --resume with --output FOLDER"),
        ("train sort-grpo x", "unknown argument 'x'"),
        ("train sort-grpo -x", "unknown argument '-x'"),
        ("train sort-grpo --run.num_steps", "--run.num_steps has no value"),
        ("train sort-grpo --out x", "unknown option --out; did you mean --output?\nhint: see rlinf train --help"),
        ("train sort-grpo --resum", "unknown option --resum; did you mean --resume?"),
        ("train sort-grpo --sead 3", "--sead is not a key; did you mean --seed?"),
        ("train sort-grpo --resume --output x", "give a recipe to start a run, or --resume with --output FOLDER"),
        ("train --resume", "--resume needs --output FOLDER"),
        ("train --resume --output x --run.num_steps 5", "--output=x: nothing to resume, there is no such folder"),
        ("train --run.num_steps 5 sort-grop", "'sort-grop' is neither a shipped recipe nor a YAML file; did you mean"),
        ("summary", "the following arguments are required: RUN"),
        ("compare x", "there is no run folder x\nhint: give the folder that `rlinf train` wrote"),
        ("compare .", ". is not a run's folder: it has no manifest.json"),
    ],
)
def test_a_wrong_command_line_is_refused(refused, line: str, expected: str):
    assert refused(*line.split()).startswith(expected)


@pytest.mark.parametrize("flag", ["--version", "-V"])
def test_version(capsys: pytest.CaptureFixture[str], flag: str):
    with pytest.raises(SystemExit, match="0"):
        main([flag])
    assert capsys.readouterr().out == "rlinf 2026.11.0\n"


@pytest.mark.parametrize(("line", "first"), [("help", "usage: rlinf [-h]"), ("help train", "usage: rlinf train [-h]")])
def test_help_is_a_command_too(capsys: pytest.CaptureFixture[str], line: str, first: str):
    with pytest.raises(SystemExit, match="0"):
        main(line.split())
    assert capsys.readouterr().out.startswith(first)


# -- train refuses -------------------------------------------------------------------------------------------------

GSM8K = ["train", "gsm8k-grpo", "--model.path", "model", "--task.train_files", "[train.jsonl]"]
GSM8K += ["--task.eval_files", "[test.jsonl]"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("train sort-grop", "'sort-grop' is neither a shipped recipe nor a YAML file; did you mean sort-grpo?"),
        (
            "train sort-grpo --rollout.temprature 1",
            "--rollout.temprature is not a key; did you mean --rollout.temperature?",
        ),
        ("train sort-grpo --rollout.temperature hot", "--rollout.temperature='hot'; allowed: a number"),
        ("train sort-grpo --job embodied", "the config has 10 mistakes:\n  - env is not set"),
        ("train sort-grpo --cluster.num_devices 9999", "cluster.num_devices=9999: this machine has "),
        (
            "train sort-grpo --mode collocated --plan.devices.actor [0,9999]",
            "plan.devices.actor=[0, 9999]: device 9999 does not exist",
        ),
        ("train sort-grpo --model.architecture null --model.path absent", "model.path="),
    ],
)
def test_train_refuses_a_wrong_config(refused, line: str, expected: str):
    assert refused(*line.split()).startswith(expected)


def test_train_points_into_the_recipe_file(refused, tmp_path: Path):
    (tmp_path / "mine.yaml").write_text("extends: sort-grpo\nrollout:\n  temprature: 1\n")
    assert (
        refused("train", "mine.yaml")
        == "mine.yaml:3: rollout.temprature is not a key; did you mean rollout.temperature?\n"
    )


def test_train_refuses_a_placement_that_does_not_fit_the_flow(refused):
    assert "did you mean 'actor'?" in refused("train", "sort-grpo", "--mode=hybrid", "--plan.devices={actr: [0]}")
    assert "did you mean 'rollout'?" in refused("train", "sort-grpo", "--mode=hybrid", "--plan.granularity.rolout=1")


def test_train_accepts_the_inputs_that_the_next_tests_break(rlinf, gsm8k_inputs: Path):
    with pytest.raises(AssertionError, match="a job was started"):
        rlinf(*GSM8K)


def test_train_refuses_a_model_folder_that_is_not_there_or_not_whole(refused, gsm8k_inputs: Path):
    model = gsm8k_inputs / "model"
    (model / "config.json").rename(model / "config.txt")
    assert refused(*GSM8K).startswith(f"model.path={model}: the folder holds no config.json")
    model.rename(gsm8k_inputs / "other")
    assert refused(*GSM8K).startswith(f"model.path={model}: does not exist\nhint: give a folder")


@pytest.mark.parametrize(
    ("second_line", "expected"),
    [
        ('{"question": "b", "ans', "not a JSON object (Unterminated string"),
        ('{"question": "b"}\n', "no field 'answer' or another usual name of it; the row"),
    ],
)
def test_train_refuses_a_torn_or_incomplete_data_line(refused, gsm8k_inputs: Path, second_line: str, expected: str):
    file = gsm8k_inputs / "train.jsonl"
    file.write_text('{"question": "a", "answer": "#### 1"}\n' + second_line)
    assert refused(*GSM8K).startswith(f"{file}:2: {expected}")


def test_train_refuses_a_missing_data_file_and_evaluation_on_training_data(refused, gsm8k_inputs: Path):
    (gsm8k_inputs / "test.jsonl").write_text('{"question": "a", "answer": "#### 1"}\n')
    assert "in the training files too" in refused(*GSM8K)
    (gsm8k_inputs / "test.jsonl").unlink()
    assert refused(*GSM8K).startswith(f"{gsm8k_inputs / 'test.jsonl'}: No such file or directory")


@pytest.mark.maniskill
def test_train_refuses_an_environment_that_maniskill_does_not_have(refused):
    pytest.importorskip("mani_skill")
    text = refused("train", "pushcube-ppo", "--env.id", "PushCub-v1")
    assert text.startswith("env.id='PushCub-v1': ManiSkill has no task 'PushCub-v1'; did you mean PushCube-v1")


def test_train_refuses_an_output_that_is_in_use(refused, tmp_path: Path):
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").write_text("")
    text = refused("train", "sort-grpo", "--output", "used")
    assert text.startswith("the output folder used exists and is not empty\nhint: go on with the run in it")
    text = refused("train", "sort-grpo", "--output", "used/file/below")
    assert text == "--output=used/file/below: cannot write there: Not a directory\nhint: choose another folder\n"


def test_resume_refuses_overrides_outside_run(refused, tmp_path: Path):
    (tmp_path / "config.yaml").write_text(to_yaml(load_config("sort-grpo")))
    text = refused("train", "--resume", "--output", ".", "--seed", "1")
    assert text.startswith("a resumed run goes on with the config it was started with:\n  - --seed would change")
    assert refused("train", "--resume", "--output", ".").startswith(
        "there is no run to resume in .: it has no manifest"
    )


# -- train runs ----------------------------------------------------------------------------------------------------


def result(*_):
    return "the table\nreport: the/report.html"


def test_train_makes_the_folder_and_hands_it_to_the_job(rlinf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen = {}

    def run(job, folder):
        seen.update(config=job.config, path=folder.path)
        return result()

    monkeypatch.setattr(jobs, "run", run)
    arguments = ["train", "--seed", "3", "sort-grpo", "--output", "out/run"]
    outcome = rlinf(*arguments)
    assert (outcome.code, outcome.out, outcome.err) == (0, "\nthe table\nreport: the/report.html\n", "")
    config = load_config("sort-grpo").model_copy(update={"seed": 3})
    config = with_actor(config, max_tokens_per_micro_batch=None)  # on CPU slots
    assert seen == {"config": config, "path": Path("out/run")}
    assert (tmp_path / "out/run/config.yaml").read_text() == to_yaml(seen["config"])
    manifest = json.loads((tmp_path / "out/run/manifest.json").read_text())
    assert manifest["sessions"][0]["command"] == ["rlinf", *arguments]


def test_a_run_may_be_resumed_with_more_steps(rlinf, monkeypatch: pytest.MonkeyPatch):
    steps = []
    monkeypatch.setattr(jobs, "run", lambda job, folder: steps.append(job.config.run.num_steps) or result())
    assert rlinf("train", "sort-grpo", "--run.num_steps", "5", "--output", "run").code == 0
    assert rlinf("train", "--resume", "--run.num_steps", "9", "--output", "run").code == 0
    assert rlinf("train", "--resume", "--output", "run").code == 0
    assert steps == [5, 9, 9]


def test_a_run_that_is_refused_after_its_folder_was_made_leaves_none(
    rlinf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def refuse(job, folder):
        raise UserError("the server does not know the project")

    monkeypatch.setattr(jobs, "run", refuse)
    assert rlinf("train", "sort-grpo", "--output", "run").code == 2
    assert list(tmp_path.iterdir()) == []

    def refuse_later(job, folder):
        folder.metrics(0, {"reward/mean": 0.5}, time_s=1.0)
        refuse(job, folder)

    monkeypatch.setattr(jobs, "run", refuse_later)
    assert rlinf("train", "sort-grpo", "--output", "run").code == 2
    assert (tmp_path / "run" / "metrics.jsonl").is_file()


def test_a_step_that_asks_problems_more_than_once_says_so(rlinf, monkeypatch: pytest.MonkeyPatch, gsm8k_inputs: Path):
    notes = []
    monkeypatch.setattr(jobs, "run", lambda job, folder: notes.extend(job.notes) or "done")
    files = "--model.path model --task.train_files train.jsonl --task.eval_files test.jsonl --rollout.num_prompts"
    assert rlinf("train", "gsm8k-grpo", *files.split(), "2", "--output", "a").code == 0
    assert not [note for note in notes if "times a step" in note]
    assert rlinf("train", "gsm8k-grpo", *files.split(), "5", "--output", "b").code == 0
    assert "task.train_files hold 2 problems: each is asked 2.5 times a step" in " ".join(notes)


def test_changed_data_and_models_are_refused_when_a_run_is_resumed(
    rlinf, monkeypatch: pytest.MonkeyPatch, gsm8k_inputs: Path
):
    monkeypatch.setattr(jobs, "run", lambda job, folder: "done")
    line = (
        "train gsm8k-grpo --model.path model --task.train_files train.jsonl --task.eval_files test.jsonl --output run"
    )
    again = ["train", "--resume", "--output", "run"]
    assert rlinf(*line.split()).code == rlinf(*again).code == 0
    for name, text in (("train.jsonl", "task.train_files"), ("test.jsonl", "task.eval_files")):
        file = gsm8k_inputs / name
        before = file.read_text()
        file.write_text(before + '\n{"question": "x", "answer": "#### 9"}\n')
        outcome = rlinf(*again)
        assert outcome.code == 2 and outcome.err.startswith(f"error: {text}={file} has changed since the run in run be")
        file.write_text(before)
    assert rlinf(*again).code == 0
    file = gsm8k_inputs / "model" / "config.json"
    file.write_text(file.read_text() + " ")
    assert rlinf(*again).err.startswith(f"error: model.path={gsm8k_inputs / 'model'} has changed since")
    assert rlinf(*again, "--accept-changed-inputs").code == rlinf(*again).code == 0


def test_changed_code_of_a_custom_part_is_noted_when_a_run_is_resumed(
    rlinf, monkeypatch: pytest.MonkeyPatch, gsm8k_inputs: Path
):
    monkeypatch.setattr(jobs, "run", lambda job, folder: "done")
    monkeypatch.syspath_prepend(str(gsm8k_inputs))
    file = gsm8k_inputs / "reward_of_a_test.py"
    file.write_text("def score(completion, answer): return 0.5\n")
    files = "--model.path model --task.train_files train.jsonl --task.eval_files test.jsonl --output run"
    reward = "--reward.kind function --reward.path reward_of_a_test:score"
    again = ["train", "--resume", "--output", "run"]
    assert rlinf("train", "gsm8k-grpo", *files.split(), *reward.split()).code == 0
    assert "has changed" not in rlinf(*again).out
    file.write_text("def score(completion, answer): return 1.0\n")
    note = "code of reward.path=reward_of_a_test:score has changed since the run began"
    outcome = rlinf(*again)
    assert outcome.code == 0 and f"note: {note}" in outcome.out
    assert note in (gsm8k_inputs / "run" / "manifest.json").read_text()
    assert note not in rlinf(*again).out, "said once"


def test_resuming_a_finished_run_touches_nothing_and_says_how_to_train_on(
    rlinf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def finish(job, folder):
        folder.result({"num_steps": 5, "after": 0.5, "training_s": 1.0})
        return result()

    monkeypatch.setattr(jobs, "run", finish)
    assert rlinf("train", "sort-grpo", "--output", "run", "--run.num_steps", "5").code == 0
    before = {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in (tmp_path / "run").rglob("*")}
    outcome = rlinf("train", "--resume", "--output", "run")
    assert outcome.code == 0
    assert "finished after 5 steps: all of run.num_steps=5 are done" in outcome.out
    assert "to train on: rlinf train --resume --output run --run.num_steps 10\n" in outcome.out
    assert before == {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in (tmp_path / "run").rglob("*")}


def test_the_default_folder_has_the_runs_name_and_is_always_new(rlinf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jobs, "run", result)
    monkeypatch.setattr("rlinf.cli.output_folder.time.strftime", lambda _: "20300102-030405")
    for _ in range(3):
        assert rlinf("train", "sort-grpo", "--name", "mine.1").code == 0
    names = sorted(folder.name for folder in (tmp_path / "runs").iterdir())
    assert names == ["mine.1-20300102-030405", "mine.1-20300102-030405-2", "mine.1-20300102-030405-3"]


def test_runs_that_begin_in_the_same_second_have_folders_of_their_own_and_an_unused_one_is_removed(
    tmp_path: Path,
):
    script = """if True:
        import sys, time
        from rlinf.cli import output_folder
        time.strftime = lambda _: "now"
        folder = output_folder.new_folder("mine")
        print(folder, flush=True)
        sys.stdin.readline()
        (folder / "config.yaml").touch() if folder.name.endswith("now") else None
    """
    begun = [
        subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(3)
    ]
    names = sorted(process.stdout.readline().decode().strip() for process in begun if process.stdout)
    assert names == ["runs/mine-now", "runs/mine-now-2", "runs/mine-now-3"]
    for process in begun:
        process.communicate(b"\n")
    assert [str(path.relative_to(tmp_path)) for path in (tmp_path / "runs").iterdir()] == ["runs/mine-now"]


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (RunFailed("worker actor/0 was lost"), 1, "error: worker actor/0 was lost\n"),
        (
            KeyboardInterrupt(),
            130,
            "go on with: rlinf train --resume --output run\ninterrupted; nothing is left running\n",
        ),
        (
            Terminated(),
            143,
            "go on with: rlinf train --resume --output run\ninterrupted; nothing is left running\n",
        ),
    ],
)
def test_how_a_run_ends_is_the_exit_code(rlinf, monkeypatch: pytest.MonkeyPatch, error, code: int, text: str):
    def run(*_):
        raise error

    monkeypatch.setattr(jobs, "run", run)
    outcome = rlinf("train", "sort-grpo", "--output", "run")
    assert (outcome.code, outcome.err) == (code, text)


def test_a_run_that_fails_after_a_checkpoint_says_how_to_go_on(rlinf, monkeypatch: pytest.MonkeyPatch):
    def run(job, folder):
        with folder.new_checkpoint(3, {"own_score": None}):
            pass
        raise OSError(errno.ENOSPC, "No space left on device", "run/metrics.jsonl")

    monkeypatch.setattr(jobs, "run", run)
    outcome = rlinf("train", "sort-grpo", "--output", "run")
    assert outcome.code == 1
    assert outcome.err.splitlines() == [
        "go on with, once it is mended: rlinf train --resume --output run",
        "error: run/metrics.jsonl: No space left on device",
        "hint: make room on that disk",
    ]


def test_what_is_nested_too_deep_anywhere_is_one_message(refused, monkeypatch: pytest.MonkeyPatch):
    def read(*_):
        raise RecursionError("maximum recursion depth exceeded")

    monkeypatch.setattr(config_command, "show_recipe", read)
    assert refused("config", "show", "sort-grpo").startswith("something is nested too deep: maximum recursion depth")


def test_a_traceback_is_shown_on_request(rlinf):
    with pytest.raises(ValueError, match="did you mean sort-grpo"):
        rlinf("--traceback", "config", "show", "sort-grop")
    with pytest.raises(ValueError, match="did you mean sort-grpo"):
        rlinf("config", "show", "sort-grop", "--traceback")


# -- config and summary --------------------------------------------------------------------------------------------


def test_config_list_shows_each_recipe_with_its_first_line(rlinf):
    lines = rlinf("config", "list").out.splitlines()
    assert [line.split()[0] for line in lines] == list(shipped_recipes())
    first_line = next(line for line in lines if line.split()[0] == "sort-grpo").removeprefix("sort-grpo").strip()
    assert first_line.startswith("A small language model learns to sort eight digits, from rewards alone")


def test_config_show_prints_what_train_would_use(rlinf):
    outcome = rlinf("config", "show", "--run.num_steps", "7", "sort-grpo")
    config = load_config("sort-grpo")
    expected = config.model_copy(update={"run": config.run.model_copy(update={"num_steps": 7})})
    assert outcome.out == to_yaml(expected)


def test_config_schema_is_json(rlinf):
    assert json.loads(rlinf("config", "schema").out)["title"] == "RLinf recipe"


def test_runs_are_compared_side_by_side(rlinf, refused, tmp_path: Path):
    def write(name: str, seed: int, scores: list[float], *, lr: float = 1e-3, result: dict | None = None) -> None:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.yaml").write_text(f"name: sort\nseed: {seed}\nactor: {{learning_rate: {lr}}}\n")
        for file, key in (("metrics.jsonl", "reward/mean"), ("evaluations.jsonl", "accuracy")):
            rows = [{"step": i, "time_s": i, "metrics": {key: score}} for i, score in enumerate(scores)]
            (folder / file).write_text("".join(json.dumps(row) + "\n" for row in rows))
        if result is not None:
            (folder / "result.json").write_text(json.dumps({"score": "accuracy", **result}))

    ended = {"training_s": 80.4, "stage_seconds": {"reward": 1.0, "actor": 20.0}}
    write("one", 0, [0.3, 0.9], result={**ended, "best": {"score": 0.95, "checkpoint": "step-1"}})
    write("two", 1, [0.3, 0.8], result=ended)
    write("other", 0, [0.1, 0.2, 0.4], lr=1e-2)
    outcome = rlinf("compare", "one", "two", "other", "--output", "page.html")
    assert outcome.code == 0, outcome.err
    blocks = [block.splitlines() for block in outcome.out.split("\n\n")]
    cells = [re.split(r"  +", line) for line in blocks[0]]
    assert cells[1] == ["one", "accuracy", "30.0 %", "90.0 %", "95.0 % (step-1)", "2", "80 s", "actor 20 s, reward 1 s"]
    assert cells[3] == ["other", "accuracy", "10.0 %", "40.0 %", "-", "3, not finished", "2 s", "-"]
    # mean of 0.9 and 0.8, and 12.706 * 0.0707 / sqrt(2)
    assert blocks[1] == ["accuracy of 2 seeds (0, 1): 85.0 % ± 63.5 % (95 % interval)"]
    assert [re.split(r"  +", line) for line in blocks[2]] == [
        ["key", "one", "two", "other"],
        ["seed", "0", "1", "0"],
        ["actor.learning_rate", "0.001", "0.001", "0.01"],
    ]
    page = (tmp_path / "page.html").read_text()
    assert page.count("<polyline") == 6 and "63.5" in page and "actor.learning_rate" in page
    assert "absent" in refused("compare", "absent")


# -- the terminal's width ----------------------------------------------------------------------------------------------


def test_tables_and_texts_follow_the_terminal(
    rlinf, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(table, "terminal_width", lambda: 50)
    rows = [("run", "score", "before"), ("a" * 40, "accuracy", "30 %"), ("b" * 30, "return", "5.00")]
    assert table.aligned(rows) == "\n".join(
        [
            f"run     {'a' * 40}",
            "score   accuracy",
            "before  30 %",
            "",
            f"run     {'b' * 30}",
            "score   return",
            "before  5.00",
        ]
    )
    assert len(table.aligned([row[1:] for row in rows]).splitlines()) == 3
    lines = rlinf("config", "list").out.splitlines()
    assert max(map(len, lines)) <= 58 and len(lines) > len(shipped_recipes())
    assert {line.split()[0] for line in lines if line[0] != " "} == set(shipped_recipes())


@pytest.mark.parametrize("arguments", ["--log-level debug config list", "config list --log-level=debug"])
def test_the_log_level_reaches_workers_by_their_environment(arguments, capsys, monkeypatch):
    monkeypatch.setenv("RLINF_LOG_LEVEL", "error")
    assert main(arguments.split()) == 0
    assert os.environ["RLINF_LOG_LEVEL"] == "debug"
    assert main(["config", "list", "--log-level", "loud"]) == 2
    assert "--log-level loud; allowed: debug, info, warning, error" in capsys.readouterr().err
