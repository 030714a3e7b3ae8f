"""W&B gets what the run's folder gets, is checked before a run starts, and continues its run when one is resumed."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from rlinf.config.load import load_config
from rlinf.config.overrides import parse_overrides
from rlinf.errors import UserError
from rlinf.jobs.checks import loggers as check_loggers
from rlinf.log_writers.delivery import LogWriters
from rlinf.log_writers.wandb import WandbOptions, WandbWriter
from rlinf.run_folder import RunFolder


class FakeRun:
    """Keeps what was logged."""

    def __init__(self):
        self.id, self.rows, self.axes, self.artifacts, self.exit_code = "f00", [], [], [], None

    def define_metric(self, name, step_metric=None):
        self.axes.append((name, step_metric))

    def log(self, row):
        self.rows.append(row)

    def log_artifact(self, artifact):
        self.artifacts.append(artifact)

    def finish(self, exit_code):
        self.exit_code = exit_code


class FakeArtifact(SimpleNamespace):
    def __init__(self, name, type):
        super().__init__(name=name, type=type, files=[])

    def add_file(self, path):
        self.files.append(path)


@pytest.fixture
def fake(monkeypatch):
    """A module called wandb, and what its `init` was called with."""
    record = SimpleNamespace(calls=[], runs=[], error=None)

    def init(**arguments):
        record.calls.append(arguments)
        if record.error is not None:
            raise record.error
        record.runs.append(FakeRun())
        return record.runs[-1]

    module = ModuleType("wandb")
    module.__dict__.update(
        init=init,
        __spec__=object(),
        Table=lambda columns, data: ("table", columns, data),
        Video=lambda path, format: ("video", path, format),
        Html=lambda text, inject: ("html", text),
        Artifact=FakeArtifact,
    )
    monkeypatch.setitem(sys.modules, "wandb", module)
    for name in ("WANDB_MODE", "WANDB_PROJECT", "WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    return record


@pytest.fixture
def folder(tmp_path):
    with RunFolder(tmp_path / "run", config_yaml="{}", command=["rlinf"], keep_checkpoints=1) as run_folder:
        yield run_folder


def recipe(line: str):
    return load_config("sort-grpo", parse_overrides(line.split()))


def log_to(folder, line: str, config=None):
    folder.log_to(
        LogWriters.begin(recipe(f"--run.loggers.tensorboard null {line}").run.loggers, folder.logged_run(config or {}))
    )


def test_everything_goes_there_too(fake, folder):
    log_to(
        folder,
        "--run.wandb.project sorting --run.wandb.entity team --run.wandb.mode offline --run.loggers.wandb.group seeds "
        "--run.loggers.wandb.tags [a,b] --run.loggers.wandb.job_type train",
        {"seed": 3},
    )
    folder.metrics(0, {"reward/mean": 0.5}, time_s=1.0)
    folder.samples(0, [{"prompt": "1+1=", "completion": "2", "reward": 1.0}])
    (folder.path / "videos").mkdir()
    (folder.path / "videos" / "step-000001.mp4").write_bytes(b"film")
    folder.evaluation(1, {"accuracy": 0.25}, time_s=2.0)
    folder.write("report.html", "<p>")
    folder.send_files()
    folder.close()
    (run,) = fake.runs
    columns = ["prompt", "reference_answer", "mean_reward", "completion_1", "reward_1"]
    assert run.rows == [
        {"reward/mean": 0.5, "step": 0},
        {"samples": ("table", columns, [["1+1=", None, 1.0, "2", 1.0]]), "step": 0},
        {"evaluation/accuracy": 0.25, "step": 1},
        {"evaluation/film": ("video", str(folder.path / "videos" / "step-000001.mp4"), "mp4"), "step": 1},
        {"report": ("html", "<p>")},
    ]
    assert ("*", "step") in run.axes
    assert [(artifact.name, artifact.type) for artifact in run.artifacts] == [
        ("f00-config", "config"),
        ("f00-report", "report"),
    ]
    assert run.artifacts[1].files == [str(folder.path / "report.html")]
    assert run.exit_code == 0
    (call,) = fake.calls
    expected = {
        "project": "sorting",
        "entity": "team",
        "name": "run",
        "mode": "offline",
        "group": "seeds",
        "tags": ["a", "b"],
        "job_type": "train",
        "dir": str(folder.path),
        "config": {"seed": 3},
    }
    assert {key: call[key] for key in expected} == expected


def test_a_run_that_fails_is_a_failed_run_there(fake, folder):
    log_to(folder, "--run.loggers.wandb.project sorting")
    folder.close("RunFailed: a worker died")
    assert fake.runs[0].exit_code == 1


def test_a_resumed_run_goes_on_in_the_same_run(fake, folder):
    for _ in range(2):
        WandbWriter(WandbOptions(project="sorting")).begin(folder.logged_run({}))
    first, second = fake.calls
    assert first["id"] == second["id"]
    assert first["resume"] == "allow"
    assert first["mode"] is None, "WANDB_MODE decides"
    (folder.path / "wandb.json").write_text('{"id": "0a1b2c3d"}')  # of a run that an earlier version began
    WandbWriter(WandbOptions(project="sorting")).begin(folder.logged_run({}))
    assert fake.calls[-1]["id"] == "0a1b2c3d" != first["id"]


@pytest.mark.parametrize(("variable", "project"), [(None, "rlinf"), ("mine", "mine")])
def test_a_project_need_not_be_given(fake, folder, monkeypatch, variable, project):
    if variable:
        monkeypatch.setenv("WANDB_PROJECT", variable)
    WandbWriter(WandbOptions()).begin(folder.logged_run({}))
    assert fake.calls[0]["project"] == project


def test_what_wandb_refuses_is_one_message(fake, folder):
    fake.error = RuntimeError("no API key")
    says = r"run\.loggers\.wandb\.project=sorting: wandb did not start: RuntimeError: no API key\nhint: log in with"
    with pytest.raises(UserError, match=says):
        log_to(folder, "--run.wandb.project sorting")


@pytest.mark.parametrize(
    ("key", "variables", "mode", "passes"),
    [
        (None, {}, None, False),
        (None, {}, "online", False),
        (None, {"WANDB_MODE": "offline"}, None, True),
        (None, {}, "offline", True),
        (None, {"WANDB_API_KEY": "k"}, None, True),
        ("from netrc", {}, None, True),
    ],
)
@pytest.mark.parametrize("release", ["api", "login"])
def test_a_missing_login_is_one_screen_before_anything_starts(monkeypatch, fake, key, variables, mode, passes, release):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: SimpleNamespace(origin="wandb/__init__.py"))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    calls = []

    def login(*, prompt=True, verify=True):
        calls.append((prompt, verify))
        return key is not None

    of_release = {"api": SimpleNamespace(api_key=key), "login": login}
    sys.modules["wandb"].__dict__[release] = of_release[release]
    config = recipe("--run.wandb.project sorting" + (f" --run.wandb.mode {mode}" if mode else ""))
    if passes:
        check_loggers(config)
        return
    with pytest.raises(UserError, match=r"run\.loggers\.wandb: nobody is logged in.*\n.*wandb login"):
        check_loggers(config)
    assert calls == ([(False, False)] if release == "login" else []), "it must not wait for an answer, nor for a server"


def test_a_mode_that_wandb_does_not_have_is_named(monkeypatch, fake):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: SimpleNamespace(origin="wandb/__init__.py"))
    monkeypatch.setenv("WANDB_MODE", "offlin")
    with pytest.raises(UserError, match=r"WANDB_MODE=offlin is no mode of W&B\nhint: use one of online, offline"):
        check_loggers(recipe("--run.wandb.project sorting"))
