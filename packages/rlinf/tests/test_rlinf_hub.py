"""Names on the Hugging Face Hub, against a Hub on loopback and with the real client, each in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hub_server import HubServer, commit_of, hub_server
from rlinf.config.downloads import with_downloads
from rlinf.config.load import load_config, to_yaml
from rlinf.config.overrides import parse_overrides
from rlinf.hub import KNOWN_DATASETS, HubName, hub_name, known_dataset, public_name
from rlinf.tasks.published import PUBLISHED

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CARD = """---
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: main/test-*
- config_name: other
  data_files: other/*.jsonl
---
"""


def test_what_counts_as_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    assert hub_name(Path("Qwen/Qwen2.5-0.5B")) == HubName(repo="Qwen/Qwen2.5-0.5B")
    assert hub_name(Path("a/b@refs/pr/3:main[train[:10]]")) == HubName(
        repo="a/b", revision="refs/pr/3", subset="main", split="train[:10]"
    )
    for local in ("model", "a/b/c", "/a/b", "../a/b", "runs/b", "data/train.jsonl", "a/*.json"):
        assert hub_name(Path(local)) is None, local


def test_known_data_sets_have_short_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "math").write_text("")
    flags = ["--model.path=m", "--task.train_files=['gsm8k[train]', dapo17k]", "--task.eval_files=[aime24, math]"]
    task = load_config("gsm8k-grpo", parse_overrides(flags)).model_dump()["task"]
    assert [str(path) for path in task["train_files"]] == ["openai/gsm8k:main[train]", KNOWN_DATASETS["dapo17k"]]
    assert [str(path) for path in task["eval_files"]] == ["HuggingFaceH4/aime_2024[train]", str(tmp_path / "math")]
    for one in PUBLISHED.values():
        assert known_dataset(Path(one.source)) is not None


def test_a_snapshot_of_the_users_cache_has_a_name():
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE) / "models--org--m" / "snapshots" / COMMIT
    assert public_name(folder) == f"org/m@{COMMIT}"
    assert public_name(Path("/other") / folder.relative_to(folder.parents[3])) is None
    config = load_config("gsm8k-grpo", parse_overrides([f"--model.path={folder}", *DATA_FLAGS]))
    assert f"path: org/m@{COMMIT}\n" in to_yaml(config)


def test_a_config_without_names_stays_as_it_is():
    config = load_config("sort-grpo")
    assert with_downloads(config) is config


DATA_FLAGS = ("--task.train_files=org/d:main[train]", "--task.eval_files=org/d:main[test]")


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A model, a private and a gated one, and data sets with a card and without."""
    top = tmp_path_factory.mktemp("hub")

    def write(name: str, **files: str) -> Path:
        for path, text in files.items():
            file = top / name / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        return top / name

    row = '{"question": "%s", "answer": "#### 2"}\n'
    model = write("m", **{"config.json": "{}", "model.safetensors": "x" * 300_000, "pytorch_model.bin": "y"})
    write("m", **{"original/params.json": "{}", "README.md": "", "run.py": "print()"})
    data = write("d", **{"README.md": CARD, "main/train-0.jsonl": row % 1 + row % 2, "main/test-0.jsonl": row % 3})
    write("d", **{"other/x.jsonl": row % 4, "main/picture.png": "no data"})
    with hub_server() as served:
        for name in ("org/m", "org/private", "org/gated", "org/busy"):
            served.add(name, model)
        served.add("org/bin", write("bin", **{"config.json": "{}", "pytorch_model.bin": "y"}))
        served.tokens["org/private"] = "hf_right"
        served.gated.add("org/gated")
        served.statuses["org/busy"] = 429
        served.add("org/d", data, "datasets")
        served.add("org/plain", write("plain", **{"train.csv": "question,answer\na,1\n"}), "datasets")
        yield served


CALLS = """
import json, os, sys
from pathlib import Path
from rlinf.errors import UserError
from rlinf.hub import fetch_model, fetch_same, hub_name
from rlinf.tasks.row_files import read_rows

for kind, name in json.load(sys.stdin):
    try:
        if kind == "HF_TOKEN":
            os.environ[kind] = name
            print("null")
            continue
        if kind == "rows":
            print(json.dumps([row.values["question"] for row in read_rows(Path(name))]), flush=True)
            continue
        if kind == "same":
            folder = Path(name)
            fetch_same(folder, ["config.json"])
        else:
            folder = fetch_model(hub_name(Path(name)), "model.path", config_only=kind == "config")
        files = [str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()]
        print(json.dumps(sorted(files)), flush=True)
    except UserError as error:
        print(json.dumps(str(error)), flush=True)
"""


MODEL_FILES = ["README.md", "config.json", "model.safetensors"]
ONLINE = (
    ("config", "org/m"),
    ("model", "org/m"),
    ("again", "org/m"),
    ("model", "org/bin"),
    ("model", "org/private"),
    ("HF_TOKEN", "hf_right"),
    ("again", "org/private"),
    ("model", "org/absent"),
    ("model", "org/gated"),
    ("model", "org/m@v9"),
    ("model", "org/busy"),
    ("rows", "org/d"),
    ("rows", "org/d:none[train]"),
    ("rows", "org/d:main"),
    ("rows", "org/d:main[train]"),
    ("rows", "org/d:main[train[:1]]"),
    ("rows", "org/d:main[test]"),
    ("rows", "org/d:other"),
    ("rows", "org/plain"),
)


def ask(hub: HubServer, calls: tuple[tuple[str, str], ...], **env: str) -> dict[tuple[str, str], list[str] | str]:
    """Calls in a fresh process: (kind, name) -> files, questions, or the message of the refusal."""
    done = subprocess.run(
        [sys.executable, "-c", CALLS],
        input=json.dumps(calls),
        env={key: value for key, value in os.environ.items() if key != "HF_TOKEN"}
        | {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": hub.url}
        | env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(calls, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("hf_home")


@pytest.fixture(scope="module")
def answers(hub: HubServer, home: Path):
    """What the calls of `ONLINE` return, one after the other, with an empty cache and one cut download."""
    hub.cut_after = 100_000
    return ask(hub, ONLINE, HF_HOME=str(home))


def test_a_model_comes_with_the_files_that_are_needed_and_once(answers, hub: HubServer):
    assert answers["config", "org/m"] == ["config.json"]
    assert answers["model", "org/m"] == answers["again", "org/m"] == answers["again", "org/private"] == MODEL_FILES
    assert answers["model", "org/bin"] == ["config.json", "pytorch_model.bin"]
    assert hub.cut_after is None, "one download was cut"
    gets = [request for request in hub.requests if request.startswith("GET /org/m/") and "safetensors" in request]
    assert len(gets) == 2, "the cut one, and where it went on"


def test_a_data_set_is_read_by_subset_and_split(answers, hub: HubServer):
    names = ("org/d:main[train]", "org/d:main[train[:1]]", "org/d:main[test]", "org/d:other", "org/plain")
    assert [answers["rows", name] for name in names] == [["1", "2"], ["1"], ["3"], ["4"], ["a"]]
    assert not any("picture" in request for request in hub.requests if "/resolve/" in request)


def test_refusals_say_what_to_do(answers):
    assert answers["model", "org/absent"].startswith(
        "model.path=org/absent: there is no folder of this name, and http://127.0.0.1"
    )
    assert "if it is private, log in with `hf auth login`, or set HF_TOKEN" in answers["model", "org/private"]
    assert "accept the terms on http" in answers["model", "org/gated"]
    assert "org/m has no revision 'v9'" in answers["model", "org/m@v9"]
    assert "answers 429" in answers["model", "org/busy"] and "wait some minutes" in answers["model", "org/busy"]
    assert answers["rows", "org/d:main"] == (
        "org/d:main: holds several splits: train, test\nhint: name one of them, for example org/d:main[train]"
    )
    assert "the data set has no subset 'none': main, other" in answers["rows", "org/d:none[train]"]
    assert answers["rows", "org/d"].endswith(
        "several subsets: main, other\nhint: name one of them, for example org/d:main"
    )


def test_another_machine_gets_the_same_files_at_the_same_path(hub: HubServer, tmp_path: Path):
    commit = commit_of(hub.repos["models", "org/m"])
    folder = str(tmp_path / "cache" / "models--org--m" / "snapshots" / commit)
    readable = (("same", folder), ("same", f"/proc/none/models--org--m/snapshots/{commit}"))
    answers = ask(hub, readable, HF_HOME=str(tmp_path / "home"))
    assert answers["same", folder] == ["config.json"], "only what was asked for, outside of this process's cache"
    assert f"org/m@{commit}: /proc/none cannot be written to" in answers[readable[1]]
    again = ask(hub, (("same", folder),), HF_HUB_OFFLINE="1")
    assert again["same", folder] == ["config.json"], "nothing is asked of the Hub where the files are there"


@pytest.mark.usefixtures("answers")
def test_what_is_cached_needs_no_network(hub: HubServer, home: Path):
    del hub.requests[:]
    calls = (("model", "org/m"), ("rows", "org/d:main[train]"), ("model", "org/other"))
    offline = ask(hub, calls, HF_HOME=str(home), HF_HUB_OFFLINE="1")
    unreachable = ask(hub, calls, HF_HOME=str(home), HF_ENDPOINT="http://127.0.0.1:9")
    for answer, why in ((offline, "HF_HUB_OFFLINE is set"), (unreachable, "cannot be reached")):
        assert list(answer.values())[:2] == [MODEL_FILES, ["1", "2"]]
        assert why in answer["model", "org/other"]
    assert hub.requests == []
