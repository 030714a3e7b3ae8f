"""The same values are read back from the files of each log writer, with the package itself where it is installed.

The packages are extras that bring 10 to 60 others, so this venv need not have them; the rest is in
test_rlinf_log_writers.py and, with fakes, in test_rlinf_wandb.py and below.
"""

import http.server
import json
import math
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

from rlinf.config.load import load_config
from rlinf.config.overrides import parse_overrides
from rlinf.errors import UserError
from rlinf.jobs.checks import loggers as check_loggers
from rlinf.log_writers.delivery import LogWriters
from rlinf.log_writers.mlflow import flat
from rlinf.run_folder import RunFolder

METRICS = [(step, {"reward/mean": step / 3, "actor/loss": math.nan if step == 1 else -0.5}) for step in range(4)]
EVALUATIONS = [(0, {"accuracy": 0.25}), (4, {"accuracy": 0.125, "accuracy/pick, (x)": 1.0})]
ROWS = [
    {"prompt_index": prompt, "prompt": f"p{prompt}", "completion": f"c{i}", "reward": float(i)}
    for prompt in range(2)
    for i in range(2)
]
EXPECTED = {
    "reward/mean": {step: step / 3 for step in range(4)},
    "actor/loss": {0: -0.5, 2: -0.5, 3: -0.5},
    "evaluation/accuracy": {0: 0.25, 4: 0.125},
    "evaluation/accuracy/pick, (x)": {4: 1.0},
}
"""Metric -> step -> value; NaN is left out, since not all formats have it."""
TABLE = [["p0", None, 0.5, "c0", 0.0, "c1", 1.0], ["p1", None, 0.5, "c0", 0.0, "c1", 1.0]]


@pytest.fixture
def logged(tmp_path, monkeypatch):
    """Writes a run in two sessions with one log writer; returns its folder."""
    monkeypatch.chdir(tmp_path)

    def write(name: str, **options):
        line = ["--run.loggers", json.dumps([{name: options}])]
        config = load_config("sort-grpo", parse_overrides(line))
        check_loggers(config)
        path = tmp_path / "run"
        for session in range(2):
            folder = RunFolder(
                path, config_yaml="name: x\n", command=["rlinf"], keep_checkpoints=1, resume=bool(session)
            )
            with folder:
                folder.log_to(LogWriters.begin(config.run.loggers, folder.logged_run(config.model_dump(mode="json"))))
                film = path / "videos" / f"step-{4 * session:06}.mp4"
                film.parent.mkdir(exist_ok=True)
                film.write_bytes(b"film")
                folder.evaluation(*EVALUATIONS[session], time_s=1.0)
                for step, values in METRICS[2 * session : 2 * session + 2]:
                    folder.metrics(step, values, time_s=1.0)
                folder.samples(2 * session, ROWS)
                with folder.new_checkpoint(2 * session + 2, {}):
                    pass
                folder.write("report.html", "<p>the report</p>")
                folder.send_files()
                assert folder.take_warnings() == []
            assert json.loads((path / "manifest.json").read_text())["notes"] == []
        return path

    return write


def without_nan(values: dict) -> dict:
    return {name: {step: v for step, v in steps.items() if not math.isnan(v)} for name, steps in values.items()}


def log_records(path: Path) -> list[bytes]:
    """The records of a LevelDB log, as W&B and SwanLab write them: blocks of 32 KiB, a header of 7 bytes a fragment."""
    content, at, records, partial = path.read_bytes(), 7, [], b""
    while at + 7 <= len(content):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        length, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        partial += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # full, last
            records.append(partial)
            partial = b""
    return records


def test_tensorboard(logged):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(logged("tensorboard") / "tensorboard"))
    events.Reload()
    scalars = {name: {event.step: event.value for event in events.Scalars(name)} for name in events.Tags()["scalars"]}
    assert without_nan(scalars) == {
        name: {step: pytest.approx(value) for step, value in steps.items()} for name, steps in EXPECTED.items()
    }
    assert math.isnan(scalars["actor/loss"][1])


def test_wandb(logged):
    pytest.importorskip("wandb", reason="wandb is an extra")
    from wandb.proto import wandb_internal_pb2  # pyright: ignore[reportMissingImports]

    path = logged("wandb", mode="offline", project="p", group="seeds", tags=["a"])
    files = sorted((path / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 2 and len({file.name for file in files}) == 1, "two sessions of one run"
    values, tables, run = {}, 0, None
    for file in files:
        for content in log_records(file):
            record = wandb_internal_pb2.Record.FromString(content)
            run = record.run if record.HasField("run") and record.run.project else run
            row = {"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
            tables += "samples/path" in row
            for name in row.keys() & EXPECTED.keys():
                values.setdefault(name, {})[json.loads(row["step"])] = json.loads(row[name])
    assert run is not None
    assert (run.project, run.run_group, list(run.tags), run.display_name) == ("p", "seeds", ["a"], "run")
    assert without_nan(values) == EXPECTED
    assert tables == 1, "every tenth step"
    (table,) = path.glob("wandb/offline-run-*/files/media/table/samples_*.json")
    assert json.loads(table.read_text())["data"] == TABLE
    assert len(list(path.glob("wandb/offline-run-*/files/media/videos/evaluation/*.mp4"))) == 2


def test_mlflow(logged, tmp_path):
    pytest.importorskip("mlflow", reason="mlflow is an extra; mlflow-skinny brings 40 packages")
    from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]

    logged("mlflow", experiment="sorting", tags={"team": "a"}, samples_every=2)
    client = MlflowClient((tmp_path / "mlruns").as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("sorting").experiment_id])
    values = {
        name: {metric.step: metric.value for metric in client.get_metric_history(run.info.run_id, name)}
        for name in run.data.metrics
    }
    expected = {name.replace("/pick, (x)", ".pick_ _x_"): steps for name, steps in EXPECTED.items()}
    assert without_nan(values) == expected
    assert math.isnan(values["actor/loss"][1])
    assert run.info.status == "FINISHED" and run.info.run_name == "run"
    assert run.data.tags["team"] == "a" and run.data.params["algorithm.name"] == "grpo"
    assert [table["path"] for table in json.loads(run.data.tags["mlflow.loggedArtifacts"])] == [
        "samples/step-000000.json",
        "samples/step-000002.json",
    ]
    stored = Path(client.download_artifacts(run.info.run_id, "", str(tmp_path)))
    assert json.loads((stored / "samples/step-000002.json").read_text())["data"] == TABLE
    assert (stored / "report.html").read_text() == "<p>the report</p>"
    assert sorted(file.name for file in (stored / "videos").iterdir()) == ["step-000000.mp4", "step-000004.mp4"]


def test_mlflow_says_when_the_run_to_continue_is_gone(logged, tmp_path):
    pytest.importorskip("mlflow", reason="mlflow is an extra; mlflow-skinny brings 40 packages")
    path = logged("mlflow")
    (path / "mlflow.json").write_text('{"run_id": "0123456789abcdef0123456789abcdef"}')
    config = load_config("sort-grpo", parse_overrides(["--run.loggers", "[mlflow]"]))
    with RunFolder(path, config_yaml="", command=[], keep_checkpoints=1, resume=True) as folder:
        says = r"run\.loggers\.mlflow: the run 0123\w+ of .*mlflow\.json cannot be continued at file:"
        with pytest.raises(UserError, match=says):
            LogWriters.begin(config.run.loggers, folder.logged_run({}))


def test_swanlab(logged):
    pytest.importorskip("swanlab", reason="swanlab is an extra")
    from swanlab.proto.swanlab.record.v1 import record_pb2  # pyright: ignore[reportMissingImports]

    path = logged("swanlab", mode="offline", project="p", samples_every=2)
    files = sorted((path / "swanlab").glob("run-*/*.swanlab"))
    assert len(files) == 2 and len({file.name for file in files}) == 1, "two sessions of one run"
    values = {}
    for file in files:
        for record in map(record_pb2.Record.FromString, log_records(file)):
            if record.HasField("scalar"):
                values.setdefault(record.scalar.key, {})[record.scalar.step] = record.scalar.value.number
    assert without_nan(values) == EXPECTED
    tables = sorted(path.glob("swanlab/run-*/media/echarts/*.json"))
    assert [table.name[:3] for table in tables] == ["000", "002"]
    assert all("c1" in table.read_text() for table in tables)
    assert len(list(path.glob("swanlab/run-*/media/html/*.html"))) == 4, "two films and two reports"


def test_trackio(logged, tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    pytest.importorskip("trackio", reason="trackio is an extra")
    from trackio.sqlite_storage import SQLiteStorage  # pyright: ignore[reportMissingImports]

    logged("trackio", project="p", samples_every=2)
    assert SQLiteStorage.get_runs("p") == ["run"], "two sessions of one run"
    values, tables = {}, {}
    for row in SQLiteStorage.get_logs("p", "run"):
        for name, value in row.items():
            if name == "samples":
                tables[row["step"]] = value
            elif isinstance(value, float | int) and "/" in name:
                values.setdefault(name, {})[row["step"]] = value
    assert without_nan(values) == EXPECTED
    assert sorted(tables) == [0, 2]
    assert len(list((tmp_path / "trackio" / "media").rglob("*.mp4"))) == 2


# -- without the packages ----------------------------------------------------------------------------------------------


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: SimpleNamespace(origin="x/__init__.py"))


class FakeMlflowClient:
    """Keeps runs in memory; the tests above check that MLflow's own client has these methods."""

    runs: ClassVar[dict[str, Any]] = {}

    def __init__(self, tracking_uri):
        self.uri = tracking_uri

    def get_experiment_by_name(self, name):
        return None

    def create_experiment(self, name):
        return f"id of {name}"

    def create_run(self, experiment_id, run_name, tags):
        run = SimpleNamespace(uri=self.uri, experiment=experiment_id, name=run_name, status="RUNNING")
        run.params, run.metrics, run.files, run.tags = {}, {}, [], dict(tags)
        self.runs["r1"] = run
        return SimpleNamespace(info=SimpleNamespace(run_id="r1"))

    def get_run(self, run_id):
        return SimpleNamespace(data=SimpleNamespace(tags=self.runs[run_id].tags))

    def update_run(self, run_id, status):
        self.runs[run_id].status = status

    set_terminated = update_run

    def log_batch(self, run_id, metrics=(), params=()):
        assert len(params) <= 100
        for key, value in params:
            assert key not in self.runs[run_id].params, "a resumed run does not write them again"
            self.runs[run_id].params[key] = value
        for key, value, _, step in metrics:
            self.runs[run_id].metrics.setdefault(key, {})[step] = value

    def log_dict(self, run_id, dictionary, artifact_file):
        self.runs[run_id].files.append(artifact_file)
        assert dictionary["data"] == TABLE

    def log_artifact(self, run_id, local_path, artifact_path=""):
        self.runs[run_id].files.append(str(Path(artifact_path, Path(local_path).name)))

    def set_tag(self, run_id, key, value):
        self.runs[run_id].tags[key] = value


@pytest.mark.parametrize("uri", [None, "sqlite:///runs.db"])
def test_mlflow_gets_everything_in_one_run(logged, installed, monkeypatch, tmp_path, uri):
    fake = ModuleType("mlflow")
    fake.__dict__.update(
        MlflowClient=FakeMlflowClient,
        entities=SimpleNamespace(Param=lambda *fields: fields, Metric=lambda *fields: fields),
        exceptions=SimpleNamespace(MlflowException=KeyError),
    )
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    monkeypatch.setattr(FakeMlflowClient, "runs", {})
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    path = logged("mlflow", samples_every=2, **({"tracking_uri": uri} if uri else {}))
    (run,) = FakeMlflowClient.runs.values()
    assert (run.uri, run.experiment) == (uri or (tmp_path / "mlruns").as_uri(), "id of rlinf")
    assert (run.name, run.status) == ("run", "FINISHED")
    assert json.loads((path / "mlflow.json").read_text()) == {"run_id": "r1", "tracking_uri": run.uri}
    assert without_nan(run.metrics) == {mlflow_name(name, uri is None): steps for name, steps in EXPECTED.items()}
    assert run.params["rollout.max_new_tokens"] == "9" and len(run.params) > 100
    assert run.files == [
        f"{file}{ending}"
        for film, table in (("000000", "000000"), ("000004", "000002"))
        for file, ending in (
            ("videos/step-", f"{film}.mp4"),
            ("samples/step-", f"{table}.json"),
            ("config.", "yaml"),
            ("report.", "html"),
        )
    ]


def mlflow_name(name: str, is_folder: bool) -> str:
    return name.replace("/pick, (x)", ".pick_ _x_" if is_folder else "/pick_ _x_")


class FakeSwanlabRun:
    def __init__(self):
        self.logs, self.files, self.ends = [], [], []

    def log(self, values, step):
        self.logs.append((values, step))

    def save(self, path, base_path, policy):
        self.files.append(Path(path).name)

    def finish(self, **arguments):
        self.ends.append(arguments)


def test_swanlab_gets_everything_in_one_run(logged, installed, monkeypatch):
    class Table(SimpleNamespace):
        def add(self, columns, cells):
            self.cells = cells

    inits, run, fake = [], FakeSwanlabRun(), ModuleType("swanlab")
    fake.__dict__.update(
        Settings=lambda: SimpleNamespace(mode="online", api_key=None),
        init=lambda **arguments: inits.append(arguments) or run,
        echarts=SimpleNamespace(Table=Table),
        Html=lambda page: ("html", page),
    )
    monkeypatch.setitem(sys.modules, "swanlab", fake)
    path = logged("swanlab", mode="offline", group="seeds", tags="a", samples_every=2)
    assert inits[0] == inits[1] and inits[0]["id"] and inits[0]["resume"] == "allow"
    assert (inits[0]["name"], inits[0]["group"], inits[0]["tags"], inits[0]["mode"]) == (
        "run",
        "seeds",
        ["a"],
        "offline",
    )
    assert values_of(run.logs) == EXPECTED
    tables = [(values["samples"].cells, step) for values, step in run.logs if "samples" in values]
    assert tables == [([["" if cell is None else cell for cell in row] for row in TABLE], step) for step in (0, 2)]
    films = [(values["evaluation/film"], step) for values, step in run.logs if "evaluation/film" in values]
    assert [step for _, step in films] == [0, 4] and "data:video/mp4;base64,ZmlsbQ==" in films[0][0][1]
    assert run.files == ["config.yaml", "report.html"] * 2 and run.ends == [{}, {}]
    assert ({"report": ("html", path / "report.html")}, 0) in run.logs


def test_trackio_gets_everything_in_one_run(logged, installed, monkeypatch):
    inits, logs, fake = [], [], ModuleType("trackio")
    run = SimpleNamespace(log=lambda values, step: logs.append((values, step)), finish=lambda: None)
    fake.__dict__.update(
        init=lambda **arguments: inits.append(arguments) or run,
        Table=lambda columns, data: data,
        Video=lambda path, format: Path(path).name,
    )
    monkeypatch.setitem(sys.modules, "trackio", fake)
    logged("trackio", group="seeds", samples_every=2)
    assert [init["resume"] for init in inits] == ["never", "allow"]
    assert (inits[0]["project"], inits[0]["name"], inits[0]["group"]) == ("rlinf", "run", "seeds")
    assert values_of(logs) == EXPECTED
    assert [(values["samples"], step) for values, step in logs if "samples" in values] == [(TABLE, 0), (TABLE, 2)]
    films = [(values["evaluation/film"], step) for values, step in logs if "evaluation/film" in values]
    assert films == [("step-000000.mp4", 0), ("step-000004.mp4", 4)]


def values_of(logs: list) -> dict:
    """Metric -> step -> value, without NaN."""
    values = {}
    for row, step in logs:
        for name in row.keys() & EXPECTED.keys():
            values.setdefault(name, {})[step] = row[name]
    return without_nan(values)


def test_a_config_is_parameters_by_dotted_key():
    config = {"run": {"num_steps": 5, "loggers": {}}, "seed": None, "actor": {"betas": [0.9, 0.99]}, "name": "x"}
    assert flat(config) == {
        "run.num_steps": "5",
        "run.loggers": "{}",
        "seed": "null",
        "actor.betas": "[0.9, 0.99]",
        "name": "x",
    }


def test_an_mlflow_server_that_does_not_answer_is_one_screen(installed, monkeypatch):
    pytest.importorskip("requests", reason="mlflow brings it")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    uri = f"http://127.0.0.1:{server.server_port}"
    config = load_config("sort-grpo", parse_overrides(["--run.loggers.mlflow.tracking_uri", uri]))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    check_loggers(config)  # it answers, with an error
    server.shutdown()
    server.server_close()
    thread.join()
    with pytest.raises(UserError, match=rf"run\.loggers\.mlflow\.tracking_uri={uri}: the server does not answer"):
        check_loggers(config)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    config = load_config("sort-grpo", parse_overrides(["--run.loggers", "[mlflow]"]))
    with pytest.raises(UserError, match=rf"MLFLOW_TRACKING_URI={uri}: the server does not answer"):
        check_loggers(config)


@pytest.mark.parametrize(
    ("mode", "of_env", "key", "passes"),
    [
        (None, "online", None, False),
        (None, "online", "k", True),
        ("offline", "online", None, True),
        (None, "local", None, True),
        ("online", "local", None, False),
    ],
)
def test_a_missing_login_of_swanlab_is_one_screen(installed, monkeypatch, mode, of_env, key, passes):
    fake = ModuleType("swanlab")
    fake.__dict__["Settings"] = lambda: SimpleNamespace(mode=of_env, api_key=key)
    monkeypatch.setitem(sys.modules, "swanlab", fake)
    options = json.dumps({"mode": mode} if mode else {})
    config = load_config("sort-grpo", parse_overrides(["--run.loggers.swanlab", options]))
    if passes:
        check_loggers(config)
        return
    with pytest.raises(
        UserError, match=r"run\.loggers\.swanlab: nobody is logged in to SwanLab\nhint: .*swanlab login"
    ):
        check_loggers(config)
