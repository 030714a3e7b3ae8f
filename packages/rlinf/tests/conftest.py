"""The command line in this process, and inputs that it accepts."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlinf import jobs
from rlinf.cli.main import main

SCREEN_LINES = 24


class Outcome(SimpleNamespace):
    code: int
    out: str
    err: str


@pytest.fixture
def rlinf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Runs a command line in an empty folder; a job that would start fails the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # of a custom part in that folder

    def refuse(*_):
        raise AssertionError("a job was started")

    monkeypatch.setattr(jobs, "run", refuse)

    def run(*arguments: str) -> Outcome:
        capsys.readouterr()
        code = main(arguments)
        out, err = capsys.readouterr()
        return Outcome(code=code, out=out, err=err)

    return run


@pytest.fixture
def refused(rlinf, tmp_path: Path):
    """Runs a command line that must be refused the way all mistakes are; returns the message."""

    def run(*arguments: str) -> str:
        before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
        outcome = rlinf(*arguments)
        assert outcome.code == 2
        assert outcome.out == ""
        assert outcome.err.startswith("error: ")
        assert "Traceback" not in outcome.err
        assert len(outcome.err.splitlines()) <= SCREEN_LINES
        assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before, "something was written"
        return outcome.err.removeprefix("error: ")

    return run


@pytest.fixture
def model_folder(tmp_path: Path):
    """Makes `model` in the test's folder: config, tokenizer, and a whole safetensors file with no tensor in it."""

    def make(alphabet: str, *, max_positions: int) -> None:
        from rlinf.config.reasoning import ArchitectureConfig
        from rlinf.tasks.language import write_model_folder

        write_model_folder(tmp_path / "model", ArchitectureConfig(max_positions=max_positions), alphabet, "float32")
        (tmp_path / "model" / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")

    return make


@pytest.fixture
def gsm8k_inputs(tmp_path: Path, model_folder) -> Path:
    """A model folder and data files that pass, next to each other."""
    model_folder("abc", max_positions=1024)
    (tmp_path / "train.jsonl").write_text(
        '{"question": "a", "answer": "#### 1"}\n{"question": "b", "answer": "#### 2"}\n'
    )
    (tmp_path / "test.jsonl").write_text('{"question": "c", "answer": "#### 3"}\n')
    return tmp_path
