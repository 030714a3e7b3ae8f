"""`rlinf eval`, in this process: what it accepts, and how each mistake ends. Nothing is sampled."""

import json
import shutil
from pathlib import Path

import pytest

from rlinf.cli.main import main
from rlinf.config.evaluation import EvalConfig
from rlinf.config.load import load_config, load_eval, load_eval_for_resume, to_yaml
from rlinf.config.overrides import parse_overrides
from rlinf.config.tasks import FilesTask
from rlinf.errors import UserError
from rlinf.evaluation.run import EvalRun
from rlinf.run_folder.checksums import write_checksums

ALPHABET = "".join(map(chr, range(32, 127))) + "\n"


@pytest.fixture
def inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_folder) -> Path:
    """A folder with a model of 512 positions and data files, in which the command runs."""
    monkeypatch.chdir(tmp_path)
    model_folder(ALPHABET, max_positions=512)
    rows = [{"question": f"{i} + 1?", "answer": f"#### {i + 1}"} for i in range(3)]
    (tmp_path / "gsm8k.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "torn.jsonl").write_text('{"question": "a", "answer": "#### 1"}\n{"question": "b", "ans')
    return tmp_path


@pytest.fixture
def refused(inputs: Path, capsys: pytest.CaptureFixture[str]):
    """Runs a command line that must be refused; returns the message."""

    def run(line: str) -> str:
        before = sorted(inputs.rglob("*"))
        code = main(["eval", *line.split()])
        out, err = capsys.readouterr()
        assert (code, out) == (2, ""), err
        assert err.startswith("error: ")
        assert "Traceback" not in err
        assert sorted(inputs.rglob("*")) == before, "something was written"
        return err.removeprefix("error: ")

    return run


SHORT = "--max_new_tokens 16"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", "give at least one benchmark, NAME=FILE, or a YAML file with settings\nhint: for example: rlinf eval"),
        ("gsm9k", "'gsm9k' is no benchmark\nhint: a benchmark is NAME=FILE"),
        ("gsm8k --model model", "benchmarks.gsm8k.file=openai/gsm8k:main[test]: HF_HUB_OFFLINE is set"),
        ("gsm8k=", "'gsm8k=' is no benchmark"),
        ("gsm8k=gsm8k.jsonl", "model is not set; give --model VALUE"),
        (
            "gsm8k=gsm8k.jsonl --model model --k 4 --num_samples 2",
            "--k=4 is more than num_samples=2; draw at least 4",
        ),
        ("gsm8k=gsm8k.jsonl --model model --k 0", "--k=0; allowed: 1 or more"),
        ("gsm8k=gsm8k.jsonl --model model --k x", "--k='x'; allowed: a list, [a, b]"),
        ("gsm8k=gsm8k.jsonl --model model --k 4 --temperature 0", "--temperature=0 makes the 4 samples"),
        ("gsm8k=gsm8k.jsonl --model model --temprature 1", "--temprature is not a key; did you mean --temperature?"),
        ("gsm8k=gsm8k.jsonl --model model --out x", "unknown option --out; did you mean --output?"),
        (
            "gsm8k=gsm8k.jsonl --model model --benchmarks.gsm8k.rewrd x",
            "--benchmarks.gsm8k.rewrd is not a key; did you",
        ),
        (
            "gsm8k=gsm8k.jsonl --model model --prompt_format plain --system_prompt x",
            "--system_prompt is",
        ),
        ("--resume", "--resume needs --output FOLDER"),
        ("--resume --output absent", "--output=absent: nothing to resume, there is no such folder"),
        ("gsm8k=gsm8k.jsonl --model model --output model", "the output folder model exists and is not empty"),
        ("absent.yaml", "absent.yaml: No such file or directory"),
    ],
)
def test_a_wrong_command_line_is_refused(refused, line: str, expected: str):
    assert refused(line).startswith(expected)


def test_wrong_names_and_rewards_say_what_is_near(refused):
    text = refused(f"gms8k=gsm8k.jsonl --model model {SHORT}")
    assert text.startswith(
        "no benchmark is called 'gms8k'; did you mean gsm8k?\nhint: a file of your own needs a reward"
    )
    text = refused(f"mine=gsm8k.jsonl --benchmarks.mine.reward exact_mach --model model {SHORT}")
    assert text.startswith(
        "benchmarks.mine.reward=exact_mach: no reward is called 'exact_mach'; did you mean 'exact_match'?"
    )


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("gsm8k=gsm8k.jsonl --model absent", "model={}/absent: does not exist"),
        ("gsm8k=gsm8k.jsonl --model gsm8k.jsonl", "model={}/gsm8k.jsonl: is a file, not a folder"),
        ("gsm8k=gsm8k.jsonl --model .", "model={}: the folder holds no config.json"),
        ("gsm8k=absent.jsonl --model model --max_new_tokens 16", "{}/absent.jsonl: No such file or directory"),
        ("gsm8k=torn.jsonl --model model --max_new_tokens 16", "{}/torn.jsonl:2: not a JSON object"),
        ("gsm8k=gsm8k.jsonl --model model", "max_new_tokens=2048 leaves no position for a prompt: the model has 512"),
        (
            "gsm8k=gsm8k.jsonl --model model --max_new_tokens 16 --max_prompt_tokens 500",
            "max_prompt_tokens=500 + max_new_tokens=16 is more than the model's 512 positions\nhint: use --max_prompt",
        ),
        (
            "gsm8k=gsm8k.jsonl --model model --max_new_tokens 500",
            "GSM8K: 3 of 3 prompts are longer than 12 tokens (up to 90); the model has 512 positions and "
            "max_new_tokens=500 are kept free, the first at {}/gsm8k.jsonl:1\nhint: use fewer new tokens, or use --",
        ),
        (
            "gsm8k=gsm8k.jsonl --model model --max_new_tokens 16 --prompt_format chat",
            "prompt_format=chat: the tokenizer of the model has no chat template\nhint: use --prompt_format plain",
        ),
        (
            "gsm8k=gsm8k.jsonl --model model --max_new_tokens 16 --system_prompt x",
            "system_prompt is set, but the tokenizer of {}/model has no chat template",
        ),
        (
            "mine=gsm8k.jsonl --benchmarks.mine.reward numeric_match --benchmarks.mine.columns.answer question "
            "--benchmarks.mine.columns.prompt reply --model model --max_new_tokens 16",
            "{0}/gsm8k.jsonl:1: no field 'reply'; the row has 'answer', 'question'\n{0}/gsm8k.jsonl:2: ",
        ),
        ("gsm8k=gsm8k.jsonl --model model --cluster.num_devices 4096", "cluster.num_devices=4096: this machine has"),
    ],
)
def test_wrong_inputs_are_refused(refused, inputs: Path, line: str, expected: str):
    assert refused(line).startswith(expected.format(inputs))


def test_an_answer_that_the_reward_cannot_use_is_named_before_anything_starts(refused, inputs: Path):
    (inputs / "mine.jsonl").write_text('{"question": "a", "answer": "1"}\n{"question": "b", "answer": "one"}\n')
    text = refused(f"mine=mine.jsonl --benchmarks.mine.reward numeric_match --model model {SHORT}")
    assert text.startswith(f"{inputs / 'mine.jsonl'}:2: numeric_match: the reference 'one' contains no number")


# -- what is accepted ----------------------------------------------------------------------------------------------


@pytest.fixture
def prepared(inputs: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs a command line up to where the sampling would begin; returns the evaluation."""

    def run(line: str) -> EvalRun:
        seen: list[EvalRun] = []

        def stop(evaluation: EvalRun, *_: object, **__: object) -> None:
            seen.append(evaluation)
            raise UserError("stopped here")

        monkeypatch.setattr(EvalRun, "run", stop)
        assert main(["eval", *line.split()]) == 2
        assert seen, "refused before"
        return seen[0]

    return run


def test_the_command_line_and_a_yaml_file_say_the_same(prepared, inputs: Path):
    by_line = prepared("gsm8k=gsm8k.jsonl --model model --k 1,4 --max_new_tokens 16 --seed 3")
    (inputs / "mine.yaml").write_text(
        "model: model\nbenchmarks:\n  gsm8k: gsm8k.jsonl\nk: [1, 4]\nmax_new_tokens: 16\nseed: 3\n"
    )
    by_file = prepared("mine.yaml")
    assert by_line.config == by_file.config
    assert by_line.config.samples_per_problem == 4
    assert prepared("mine.yaml --seed 4").config.seed == 4


def test_a_chat_template_is_used_where_there_is_one(prepared, inputs: Path):
    assert not prepared(f"gsm8k=gsm8k.jsonl --model model {SHORT}").benchmarks.encoder.is_chat
    (inputs / "model" / "chat_template.jinja").write_text(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
    )
    chat = prepared(f"gsm8k=gsm8k.jsonl --model model {SHORT} --system_prompt hi")
    assert chat.benchmarks.encoder.is_chat
    text = chat.benchmarks.encoder.text(chat.benchmarks.sets[0].problems[0].prompt)
    assert text.startswith("<system>hi<user>0 + 1?\n\nThink it through")
    assert text.endswith("<a>")
    assert not prepared(f"gsm8k=gsm8k.jsonl --model model {SHORT} --prompt_format plain").benchmarks.encoder.is_chat


@pytest.mark.parametrize(("name", "function"), [("exact", "exact_match"), ("numeric_match", "numeric_match")])
def test_a_reward_has_the_name_of_training_or_of_its_function(prepared, name: str, function: str):
    (one,) = prepared(f"mine=gsm8k.jsonl --benchmarks.mine.reward {name} --model model {SHORT}").benchmarks.sets
    assert one.reward.rule == function


def test_what_a_reader_must_know_is_noted(prepared, inputs: Path):
    (inputs / "own.jsonl").write_text(
        '{"question": "a", "answer": "1"}\n{"question": "%s", "answer": "2"}\n{"question": "\u03c0", "answer": "3"}\n{'
        % ("b" * 60)
    )
    line = f"mine=own.jsonl --benchmarks.mine.reward exact_match --model model {SHORT} --on_bad_row skip"
    benchmarks = prepared(f"{line} --max_prompt_tokens 20 --long_prompts drop").benchmarks
    bad, long, unknown = benchmarks.sets[0].notes
    assert bad.startswith(f"{inputs / 'own.jsonl'}: 1 bad rows were skipped, the first is {inputs / 'own.jsonl'}:4: ")
    assert long == "mine: 1 of 3 prompts are longer than 20 tokens (up to 61); these problems were dropped"
    assert unknown == "mine: the tokenizer has no token for some of the text of 1 of 2 prompts"
    assert [problem.number for problem in benchmarks.sets[0].problems] == [1, 3]
    assert benchmarks.max_prompt_tokens == 2
    assert prepared(f"{line} --benchmarks.mine.num_problems 1").benchmarks.sets[0].problems[0].prompt == "a\n"


# -- settings ------------------------------------------------------------------------------------------------------


def settings(*arguments: str) -> EvalConfig:
    return load_eval(None, parse_overrides(["--benchmarks.gsm8k", "x.jsonl", "--model", "m", *arguments]))


def test_settings_are_written_and_read_back(tmp_path: Path):
    config = settings("--k", "1,8", "--chat_options", "{enable_thinking: false}", "--benchmarks.mine", "y.csv")
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert load_eval_for_resume(tmp_path, []) == config
    assert config.k == (1, 8)
    assert list(config.benchmarks) == ["gsm8k", "mine"]


def test_a_changed_setting_is_named(tmp_path: Path):
    (tmp_path / "config.yaml").write_text(to_yaml(settings()))
    changed = ["--temperature", "0.7", "--cluster.num_devices", "3", "--benchmarks.gsm8k.file", "y.jsonl"]
    with pytest.raises(UserError) as caught:
        load_eval_for_resume(tmp_path, parse_overrides(changed))
    text = str(caught.value)
    assert "--temperature would change temperature from 0.6 to 0.7" in text
    assert "--benchmarks.gsm8k.file would change" in text
    assert "num_devices" not in text.partition("hint")[0]
    assert load_eval_for_resume(tmp_path, parse_overrides(changed[2:4])).cluster.num_devices == 3


@pytest.mark.parametrize(("name", "is_noted"), [("number", True), ("truth", False)])
def test_a_custom_reward_that_gives_scores_is_noted(
    prepared, inputs: Path, monkeypatch: pytest.MonkeyPatch, name: str, is_noted: bool
):
    (inputs / "eval_scores.py").write_text(
        "def number(c, a):\n    return 0.5\n\n\ndef truth(c, a):\n    return c == a\n"
    )
    monkeypatch.syspath_prepend(inputs)
    reward = f"--benchmarks.mine.reward eval_scores:{name}"
    evaluation = prepared(f"mine=gsm8k.jsonl {reward} --model model --max_new_tokens 16")
    note = f"benchmarks.mine.reward=eval_scores:{name} returns numbers: an answer counts as right from 1 on"
    assert (note in evaluation.notes) == is_noted


# -- a run's model is asked as it was trained ----------------------------------------------------------------

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


@pytest.fixture
def run_of(inputs: Path):
    """Makes `run/` with the model as its checkpoint, from a recipe and overrides."""

    def make(recipe: str, *overrides: str, chat_template: str | None = None) -> Path:
        run, model = inputs / "run", inputs / "run" / "checkpoints" / "step-000002" / "model"
        shutil.copytree(inputs / "model", model)
        if chat_template is not None:
            (model / "chat_template.jinja").write_text(chat_template)
        (run / "config.yaml").write_text(to_yaml(load_config(recipe, parse_overrides(overrides))))
        (model.parent / "state.json").write_text(json.dumps({"step": 2}))
        write_checksums(model.parent, {})
        return run

    return make


def first_prompt(evaluation: EvalRun) -> str:
    """The first prompt as the model reads it."""
    benchmarks = evaluation.benchmarks
    return benchmarks.encoder.text(benchmarks.sets[0].problems[0].prompt)


FILES = ("--model.path=model", "--task.train_files=[gsm8k.jsonl]", "--task.eval_files=[gsm8k.jsonl]")


@pytest.mark.parametrize("path", ["run", "run/checkpoints/step-000002", "run/checkpoints/step-000002/model"])
def test_the_quick_starts_model_is_asked_with_the_bare_digits(prepared, run_of, inputs: Path, path: str):
    run_of("sort-grpo")
    (inputs / "own.jsonl").write_text('{"question": "3120=", "answer": "0123"}\n')
    evaluation = prepared(f"own=own.jsonl --benchmarks.own.reward exact_match --model {path} {SHORT}")
    assert first_prompt(evaluation) == "3120=", "a newline, or an instruction, was never trained"
    assert evaluation.notes == [f"asked as in the run {inputs / 'run'}: prompt_format=plain, template '{{question}}'"]


def test_template_chat_and_system_prompt_come_from_the_run(prepared, run_of, inputs: Path):
    overrides = ("--task.prompt_template=Q: {question}!", "--task.system_prompt=hi", "--task.prompt_format=chat")
    run_of("gsm8k-grpo", *FILES, *overrides, chat_template=TEMPLATE)
    evaluation = prepared(f"gsm8k=gsm8k.jsonl --model run {SHORT}")
    assert first_prompt(evaluation) == "<system>hi<user>Q: 0 + 1?!<a>"
    assert len(evaluation.notes) == 1
    stored = load_eval_for_resume_of(evaluation, inputs)
    assert (stored.prompt_format, stored.system_prompt) == ("chat", "hi")
    assert stored.benchmarks["gsm8k"].prompt_template == "Q: {question}!"


@pytest.mark.parametrize(("line", "stop"), [("", ("!",)), ("--stop END", ("END",)), ("--stop []", ())])
def test_stop_strings_are_those_of_the_run_or_ones_own(
    prepared, run_of, inputs: Path, line: str, stop: tuple[str, ...]
):
    run_of("gsm8k-grpo", *FILES, "--rollout.stop=!", chat_template=TEMPLATE)
    assert prepared(f"gsm8k=gsm8k.jsonl --model run {SHORT} {line}".strip()).config.stop == stop


def load_eval_for_resume_of(evaluation: EvalRun, inputs: Path) -> EvalConfig:
    """The settings as a resumed evaluation would find them."""
    (inputs / "eval").mkdir()
    (inputs / "eval" / "config.yaml").write_text(to_yaml(evaluation.config))
    return load_eval_for_resume(inputs / "eval", [])


def test_what_asks_otherwise_than_the_run_is_told(prepared, run_of):
    run_of("gsm8k-grpo", *FILES, chat_template=TEMPLATE)
    line = f"gsm8k=gsm8k.jsonl --model run {SHORT}"
    plain = prepared(f"{line} --prompt_format plain")
    assert plain.notes[1:] == [
        "prompt_format='plain', but the run trained with 'chat': the score is that of another prompt"
    ]
    other = prepared(f"{line} --system_prompt hi --benchmarks.gsm8k.prompt_template {{question}}")
    assert first_prompt(other) == "<system>hi<user>0 + 1?<a>"
    assert [note.partition("=")[0] for note in other.notes[1:3]] == [
        "system_prompt",
        "benchmarks.gsm8k.prompt_template",
    ]


def test_letters_are_asked_for_as_published(prepared, run_of, inputs: Path):
    run_of("gsm8k-grpo", *FILES)
    row = {"question": "q", "choices": ["1", "2", "3", "4"], "answer": 2}
    (inputs / "mmlu.jsonl").write_text(json.dumps(row) + "\n")
    evaluation = prepared(f"mmlu_stem=mmlu.jsonl --model run {SHORT}")
    assert "the letter of one choice" in first_prompt(evaluation)
    assert evaluation.notes[1].startswith("benchmarks.mmlu_stem.prompt_template=")


def test_a_recipe_asks_as_the_benchmark_of_its_data_does():
    from rlinf.tasks.published import PUBLISHED

    task = load_config("gsm8k-grpo", parse_overrides(FILES)).task  # type: ignore[union-attr]
    assert isinstance(task, FilesTask)
    assert task.prompt_template == PUBLISHED["gsm8k"].template
    assert task.prompt_format == "auto"


def test_the_help_names_the_model(capsys):
    with pytest.raises(SystemExit):
        main(["eval", "--help"])
    assert "--model MODEL" in capsys.readouterr().out.splitlines()[0]
