"""Log writers: what a recipe may say of them, and that none of them stops, delays or falsifies a run."""

import inspect
import json
import re
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlinf import jobs
from rlinf.config.base import Section
from rlinf.config.common import RunConfig
from rlinf.config.load import load_config, load_for_resume, to_yaml
from rlinf.config.loggers import LoggersConfig
from rlinf.config.overrides import parse_overrides
from rlinf.errors import UserError
from rlinf.jobs.checks import check_names, loggers as check_loggers
from rlinf.log_writers import LoggedRun, LogWriter, Uploads, side_by_side
from rlinf.log_writers.delivery import LogWriters
from rlinf.log_writers.spec import LOG_WRITERS
from rlinf.run_folder import RunFolder
from rlinf.training import run_training

DOCS = Path(__file__).parents[3] / "docs"


def configured(line: str = "", text: str = "", tmp_path: Path | None = None) -> LoggersConfig:
    """The log writers of a recipe that extends sort-grpo, with overrides."""
    recipe = "sort-grpo"
    if tmp_path is not None:
        (tmp_path / "mine.yaml").write_text(f"extends: sort-grpo\n{text}")
        recipe = str(tmp_path / "mine.yaml")
    return load_config(recipe, parse_overrides(line.split())).run.loggers


# -- config ------------------------------------------------------------------------------------------------------------


def test_tensorboard_is_the_default():
    assert list(configured().chosen) == ["tensorboard"]
    assert list(RunConfig(num_steps=1).loggers.chosen) == ["tensorboard"]


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("--run.loggers [wandb]", ["wandb"]),
        ("--run.loggers wandb", ["wandb"]),
        ("--run.loggers []", []),
        ("--run.loggers null", []),
        ("--run.loggers.tensorboard null", []),
        ("--run.loggers [tensorboard,{wandb:{project:a}}]", ["tensorboard", "wandb"]),
        ("--run.loggers.wandb.project a", ["tensorboard", "wandb"]),
        ("--run.loggers [mlflow] --run.loggers.wandb.project a", ["wandb", "mlflow"]),
        ("--run.loggers.wandb {} --run.loggers.mlflow.experiment a", ["tensorboard", "wandb", "mlflow"]),
        ("--run.loggers [own:Writer]", ["own:Writer"]),
    ],
)
def test_a_list_names_all_and_a_section_adds(line, names):
    line = line.replace("project:a", "project: a").replace("wandb:{", "wandb: {").split(" ")
    joined = [" ".join(line)] if "project: a}" in " ".join(line) else None
    overrides = ["--run.loggers", joined[0].removeprefix("--run.loggers ")] if joined else line
    assert list(load_config("sort-grpo", parse_overrides(overrides)).run.loggers.chosen) == names


def test_a_recipe_changes_one_writer_of_the_recipe_that_it_extends(tmp_path):
    base = "run:\n  loggers: [mlflow, {wandb: {project: a, tags: one}}]\n"
    (tmp_path / "base.yaml").write_text(f"extends: sort-grpo\n{base}")
    (tmp_path / "child.yaml").write_text("extends: base.yaml\nrun:\n  loggers: {wandb: {group: g}}\n")
    loggers = load_config(str(tmp_path / "child.yaml")).run.loggers
    assert list(loggers.chosen) == ["wandb", "mlflow"]
    wandb = loggers.chosen["wandb"]
    assert (wandb.project, wandb.group, wandb.tags) == ("a", "g", ("one",))
    (tmp_path / "child.yaml").write_text("extends: base.yaml\nrun:\n  loggers: [trackio]\n")
    assert list(load_config(str(tmp_path / "child.yaml")).run.loggers.chosen) == ["trackio"]


def test_the_resolved_config_says_the_same(tmp_path):
    config = load_config("sort-grpo", parse_overrides(["--run.loggers", "[{wandb: {project: a}}, {own:W: {x: 1}}]"]))
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert load_for_resume(tmp_path).run.loggers == config.run.loggers
    assert config.run.loggers.chosen["own:W"] == {"x": 1}
    resumed = load_for_resume(tmp_path, parse_overrides(["--run.loggers.mlflow", "{}"]))
    assert list(resumed.run.loggers.chosen) == ["wandb", "mlflow", "own:W"], "a resumed run may have other writers"


def test_the_old_key_of_wandb_counts(tmp_path):
    text = "run:\n  loggers: [mlflow]\n  wandb: {project: a, mode: offline}\n"
    loggers = configured("--run.wandb.name b", text, tmp_path)
    assert list(loggers.chosen) == ["wandb", "mlflow"]
    wandb = loggers.chosen["wandb"]
    assert (wandb.project, wandb.mode, wandb.name) == ("a", "offline", "b")
    assert list(configured("--run.wandb null", text, tmp_path).chosen) == ["mlflow"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "run:\n  loggers:\n    - tensorboard\n    - wandb: {projct: a}\n",
            r"mine\.yaml:5: run\.loggers\.wandb\.projct is not a key; did you mean run\.loggers\.wandb\.project\?",
        ),
        (
            "run:\n  loggers: {wandb: {samples_every: -1}}\n",
            r"mine\.yaml:3: run\.loggers\.wandb\.samples_every=-1; allowed: 0 or more",
        ),
        ("run:\n  loggers: [wanbd]\n", r"mine\.yaml:3: run\.loggers\.wanbd is not a key; did you mean .*wandb"),
        ("run:\n  loggers: 3\n", r"mine\.yaml:3: run\.loggers=3; allowed: a section with the keys"),
    ],
)
def test_mistakes_are_answered_with_their_line(tmp_path, text, says):
    with pytest.raises(UserError, match=says):
        configured("", text, tmp_path)


def test_every_option_has_a_description_and_stands_in_the_docs():
    text = (DOCS / "loggers.md").read_text()
    for spec in LOG_WRITERS.specs():
        assert spec.section is not None and issubclass(spec.section, Section)
        for option, field in spec.section.model_fields.items():
            assert field.description, f"{spec.name}.{option}"
            assert f"`{option}`" in text, f"{spec.name}.{option}"
        assert f"`{spec.name}`" in text or spec.title in text


@pytest.mark.parametrize("name", ["wandb", "mlflow", "swanlab", "trackio"])
@pytest.mark.parametrize("spec", [None, SimpleNamespace(origin=None)], ids=["nothing", "a folder"])
def test_a_missing_package_is_one_screen(monkeypatch, name, spec):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
    config = load_config("sort-grpo", parse_overrides(["--run.loggers", f"[{name}]"]))
    with pytest.raises(UserError, match=rf"run\.loggers\.{name}: {name} is not installed\nhint: .*rlinf\[{name}\]"):
        check_loggers(config)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nowhere:Writer", "cannot be imported: No module named 'nowhere'"),
        ("rlinf.log_writers:LoggedRun", "has to define write"),
        ("rlinf.log_writers:LogWriter", "has to define write"),
        ("custom_log_writer:CsvWriter: {separator: 3}", r"its options\.separator=3: .* wants it to be a valid string"),
        ("custom_log_writer:CsvWriter: {seperator: a}", "unexpected keyword argument 'seperator'"),
    ],
)
def test_a_wrong_custom_writer_is_one_screen(monkeypatch, name, says):
    monkeypatch.syspath_prepend(DOCS / "examples")
    entry = f"{{{name}}}" if ": " in name else name
    config = load_config("sort-grpo", parse_overrides(["--run.loggers", f"[{entry}]"]))
    with pytest.raises(UserError, match=says):
        check_loggers(config)


def test_an_unknown_package_is_named_before_anything_is_imported():
    from rlinf.jobs.checks import names

    config = load_config("sort-grpo", parse_overrides(["--run.loggers", "[nowhere:Writer]"]))
    check_names(config)
    with pytest.raises(UserError, match=r"run\.loggers\.nowhere:Writer: .*No module named 'nowhere'"):
        names(config)


# -- delivery ----------------------------------------------------------------------------------------------------------


class Recorder(LogWriter):
    """Keeps what it gets; raises for what `fails` is true of."""

    def __init__(self, fails=lambda what: False):
        self.calls, self.fails, self.failure, self.threads = [], fails, "not closed", set()

    def take(self, *what):
        self.threads.add(threading.current_thread().name)
        if self.fails(what):
            raise ConnectionError("network down")
        self.calls.append(what)

    def write(self, step, values):
        self.take("write", step, values)

    def samples(self, step, rows):
        self.take("samples", step, list(rows))

    def video(self, step, path):
        self.take("video", step, path.name)

    def artifact(self, name, path):
        self.take("artifact", name, path.name)

    def rewind(self, step):
        self.take("rewind", step)

    def close(self, failure):
        self.failure = failure


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr("rlinf.log_writers.delivery.MAX_DELAY_S", 0.01)


def run_folder(path: Path) -> RunFolder:
    return RunFolder(path, config_yaml="name: x\n", command=["rlinf"], keep_checkpoints=1)


def test_a_writer_gets_everything_in_the_order_of_the_run(tmp_path):
    writer, uploads = Recorder(), Recorder()
    folder = run_folder(tmp_path / "run")
    folder.log_to(LogWriters({"own:W": writer, "w": uploads}, {"w": Uploads(samples_every=2, artifacts=False)}))
    folder.evaluation(0, {"accuracy": 0.25}, time_s=0.0)
    rows = [{"completion": "a", "reward": 1.0}, {"completion": "b", "reward": 0.0}, {"worst_token": "x"}]
    for step in range(3):
        folder.metrics(step, {"reward/mean": step / 2}, time_s=1.0)
        folder.samples(step, rows)
    (tmp_path / "run" / "videos").mkdir()
    (tmp_path / "run" / "videos" / "step-000003.mp4").write_bytes(b"film")
    folder.evaluation(3, {"accuracy": 0.5}, time_s=2.0)
    folder.send_files()
    folder.close()
    completions = [{"step": 0, **row} for row in rows[:2]]
    assert [call for call in writer.calls if call[0] != "samples"] == [
        ("write", 0, {"evaluation/accuracy": 0.25}),
        *(("write", step, {"reward/mean": step / 2}) for step in range(3)),
        ("write", 3, {"evaluation/accuracy": 0.5}),
        ("video", 3, "step-000003.mp4"),
        ("artifact", "config", "config.yaml"),
    ]
    assert [call[1] for call in writer.calls if call[0] == "samples"] == [0, 1, 2]
    assert next(call for call in writer.calls if call[0] == "samples") == ("samples", 0, completions)
    assert [call[1] for call in uploads.calls if call[0] == "samples"] == [0, 2]
    assert not [call for call in uploads.calls if call[0] == "artifact"]
    assert writer.failure is None and writer.threads == {"log writer own:W"}


def test_a_failed_session_and_a_rewound_one_are_said(tmp_path):
    writer = Recorder()
    folder = run_folder(tmp_path / "run")
    folder.log_to(LogWriters({"w": writer}))
    folder.begin_again("a worker died")
    folder.close("ValueError: boom")
    assert writer.calls == [("rewind", 0)] and writer.failure == "ValueError: boom"


def test_an_outage_is_one_warning_and_nothing_is_lost(tmp_path):
    is_down = threading.Event()
    is_down.set()
    writer = Recorder(lambda what: is_down.is_set())
    folder = run_folder(tmp_path / "run")
    folder.log_to(LogWriters({"w": writer}))
    for step in range(20):
        folder.metrics(step, {"a": 1.0}, time_s=1.0)
    warnings = []
    while not warnings:
        time.sleep(0.001)
        warnings = folder.take_warnings()
    is_down.clear()
    folder.close()
    assert len(warnings) == 1
    assert re.match(
        r"run\.loggers\.w: metrics of step \d+: ConnectionError: network down\. Training goes on", warnings[0]
    )
    assert sorted(call[1] for call in writer.calls) == list(range(20))
    assert json.loads((folder.path / "manifest.json").read_text())["notes"] == warnings


def test_what_never_gets_through_is_counted_at_the_end(tmp_path, capsys):
    folder = run_folder(tmp_path / "run")
    folder.log_to(LogWriters({"w": Recorder(lambda what: True)}))
    for step in range(5):
        folder.metrics(step, {"a": 1.0}, time_s=1.0)
    folder.close()
    assert "warning: run.loggers.w: 5 records did not get through; the run's folder has all" in capsys.readouterr().err
    assert len((folder.path / "metrics.jsonl").read_text().splitlines()) == 5


def test_one_record_that_is_refused_does_not_hold_up_the_others(tmp_path, capsys):
    writer = Recorder(lambda what: what[1] == 1)
    folder = run_folder(tmp_path / "run")
    folder.log_to(LogWriters({"w": writer}))
    for step in range(200):
        folder.metrics(step, {"a": 1.0}, time_s=1.0)
        time.sleep(0.001)
    folder.close()
    assert [call[1] for call in writer.calls] == [0, *range(2, 200)]
    assert "1 records did not get through" in capsys.readouterr().err


def test_a_writer_that_hangs_holds_up_neither_training_nor_its_end(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("rlinf.log_writers.delivery.CLOSE_S", 0.1)
    forever = threading.Event()
    writer = Recorder(lambda what: forever.wait())
    folder = run_folder(tmp_path / "run")
    folder.log_to(LogWriters({"w": writer}))
    folder.metrics(0, {"a": 1.0}, time_s=1.0)
    folder.close()
    assert "not finished after 0.1 s without progress" in capsys.readouterr().err
    forever.set()


def test_a_writer_that_does_not_start_closes_the_others_and_is_one_screen(tmp_path, monkeypatch):
    begun = Recorder()

    class Refused(Recorder):
        def begin(self, run):
            raise RuntimeError("no such project")

    monkeypatch.setattr(LOG_WRITERS, "_added", {"first": lambda: begun, "second": Refused})
    config = LoggersConfig.model_construct(custom={"first": {}, "second": {}})
    with pytest.raises(UserError, match=r"run\.loggers\.second: it did not start: RuntimeError: no such project"):
        LogWriters.begin(config, LoggedRun(id="1", name="run", folder=tmp_path, config={}))
    assert begun.failure != "not closed"


# -- tables, the custom example, TensorBoard ---------------------------------------------------------------------------


def test_a_table_has_the_completions_of_a_prompt_side_by_side():
    rows = [
        {"step": 3, "prompt_index": i, "prompt": "1+1=", "completion": text, "reward": reward, **more}
        for i, text, reward, more in [(0, "2", 1.0, {"answer": "2"}), (0, "3", 0.0, {}), (1, "4", 0.5, {})]
    ]
    columns, cells = side_by_side([{"step": 3, "worst_token": "x"}, *rows])
    each = ["completion", "reward", "answer"]
    assert columns == [
        "prompt",
        "reference_answer",
        "mean_reward",
        *(f"{n}_1" for n in each),
        *(f"{n}_2" for n in each),
    ]
    assert cells == [
        ["1+1=", None, 0.5, "2", 1.0, "2", "3", 0.0, None],
        ["1+1=", None, 0.5, "4", 0.5, None, None, None, None],
    ]
    assert side_by_side([])[1] == []


def test_the_example_of_the_docs_is_short_and_continues_its_file(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(DOCS / "examples")
    entry = "[{custom_log_writer:CsvWriter: {separator: ;}}]"
    config = load_config("sort-grpo", parse_overrides(["--run.loggers", entry])).run.loggers
    for _ in range(2):
        path = tmp_path / "run"
        path.mkdir(exist_ok=True)
        writers = LogWriters.begin(config, LoggedRun(id="1", name="run", folder=path, config={}))
        writers.metrics(0, {"reward/mean": 0.5})
        writers.evaluation(1, {"accuracy": 0.25})
        assert writers.close() == []
    assert (tmp_path / "run" / "metrics.csv").read_text().splitlines() == [
        "0;reward/mean;0.5",
        "1;evaluation/accuracy;0.25",
    ] * 2
    import custom_log_writer  # pyright: ignore[reportMissingImports]

    source = inspect.getsource(custom_log_writer.CsvWriter)
    assert source.strip() in (DOCS / "loggers.md").read_text()
    assert len(inspect.getsource(custom_log_writer).splitlines()) <= 27


def test_values_are_remembered_over_sessions(tmp_path):
    run = LoggedRun(id="1", name="run", folder=tmp_path, config={})
    assert run.recall("mine") == {}
    run.remember("mine", {"id": 7})
    assert run.recall("mine") == {"id": 7}


def test_a_writer_that_refuses_to_begin_leaves_no_folder(tmp_path, monkeypatch):
    module = (
        "from rlinf.log_writers import LogWriter\nclass Closed(LogWriter):\n    def write(self, step, values): ...\n"
    )
    module += "    def begin(self, run):\n        (run.folder / 'closed').mkdir()\n        raise OSError('no access')\n"
    (tmp_path / "refusing.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    config = load_config("sort-grpo", parse_overrides(["--run.loggers", "[refusing:Closed]"]))
    monkeypatch.setattr(jobs, "prepare", lambda config: SimpleNamespace(config=config, inputs={}))
    monkeypatch.setattr("rlinf.processes.fork_server.start", lambda config: False)
    says = r"run\.loggers\.refusing:Closed: it did not start: OSError: no access\nhint: leave it out"
    with pytest.raises(UserError, match=says):
        run_training(config, tmp_path / "run", command=["rlinf"])
    assert not (tmp_path / "run").exists()
