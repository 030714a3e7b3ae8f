"""W&B gets what TensorBoard gets, is asked for before anything starts, and goes on where a run goes on."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from rlinf.config.common import WandbConfig
from rlinf.errors import UserError
from rlinf.run_folder import RunFolder
from rlinf.run_folder.wandb_sink import WandbSink, check_wandb


class FakeRun:
    """Keeps what was logged."""

    def __init__(self):
        self.rows, self.axes, self.is_finished = [], [], False

    def define_metric(self, name, step_metric=None):
        self.axes.append((name, step_metric))

    def log(self, row):
        self.rows.append(row)

    def finish(self):
        self.is_finished = True


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
    module.__dict__.update(init=init, __spec__=object())
    monkeypatch.setitem(sys.modules, "wandb", module)
    return record


@pytest.fixture
def folder(tmp_path):
    with RunFolder(tmp_path / "run", config_yaml="{}", command=["rlinf"], keep_checkpoints=1) as run_folder:
        yield run_folder


def test_metrics_and_evaluations_go_there_too(fake, folder):
    settings = WandbConfig(project="sorting", entity="team", mode="offline")
    folder.add_sink(WandbSink(settings, folder.path, {"seed": 3}))
    folder.metrics(0, {"reward/mean": 0.5}, time_s=1.0)
    folder.evaluation(1, {"accuracy": 0.25}, time_s=2.0)
    (run,) = fake.runs
    assert run.rows == [{"reward/mean": 0.5, "step": 0}, {"evaluation/accuracy": 0.25, "step": 1}]
    assert ("*", "step") in run.axes
    assert not run.is_finished
    folder.close()
    assert run.is_finished
    (call,) = fake.calls
    assert {key: call[key] for key in ("project", "entity", "name", "mode", "dir", "config")} == {
        "project": "sorting",
        "entity": "team",
        "name": "run",
        "mode": "offline",
        "dir": str(folder.path),
        "config": {"seed": 3},
    }


def test_a_resumed_run_goes_on_in_the_same_run(fake, folder):
    for _ in range(2):
        WandbSink(WandbConfig(project="sorting"), folder.path, {})
    first, second = fake.calls
    assert first["id"] == second["id"]
    assert first["resume"] == "allow"
    assert first["mode"] is None, "WANDB_MODE decides"


def test_what_wandb_refuses_is_one_message(fake, folder):
    fake.error = RuntimeError("no API key")
    with pytest.raises(UserError, match=r"run\.wandb\.project=sorting: wandb did not start: RuntimeError: no API key"):
        WandbSink(WandbConfig(project="sorting"), folder.path, {})


@pytest.mark.parametrize("spec", [None, SimpleNamespace(origin=None)], ids=["nothing", "a folder"])
def test_a_missing_package_is_told_before_anything_starts(monkeypatch, spec):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
    check_wandb(None)
    with pytest.raises(UserError, match=r"run\.wandb\.project=sorting: wandb is not installed"):
        check_wandb(WandbConfig(project="sorting"))


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
def test_a_missing_login_is_told_before_anything_starts(monkeypatch, fake, key, variables, mode, passes, release):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: SimpleNamespace(origin="wandb/__init__.py"))
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    calls = []

    def login(*, prompt=True, verify=True):
        calls.append((prompt, verify))
        return key is not None

    of_release = {"api": SimpleNamespace(api_key=key), "login": login}
    sys.modules["wandb"].__dict__[release] = of_release[release]
    if passes:
        check_wandb(WandbConfig(project="sorting", mode=mode))
        return
    with pytest.raises(UserError, match=r"run\.wandb\.project=sorting: nobody is logged in.*\n.*wandb login"):
        check_wandb(WandbConfig(project="sorting", mode=mode))
    assert calls == ([(False, False)] if release == "login" else []), "it must not wait for an answer, nor for a server"


def test_a_mode_that_wandb_does_not_have_is_named(monkeypatch, fake):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: SimpleNamespace(origin="wandb/__init__.py"))
    monkeypatch.setenv("WANDB_MODE", "offlin")
    with pytest.raises(UserError, match=r"WANDB_MODE=offlin is no mode of W&B\nhint: use one of online, offline"):
        check_wandb(WandbConfig(project="sorting"))
