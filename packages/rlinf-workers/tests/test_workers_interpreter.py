"""Interpreters of other environments: what is asked of them, what they are given, and what is refused."""

import os
import sys
from pathlib import Path

import pytest
from msgspec import structs

import rlinf_comm.protocol
import rlinf_workers
from rlinf_comm import DecodeError
from rlinf_comm.wire import Connection, Deadline, disagreement, encode_hello, receive_hello
from rlinf_workers.errors import InterpreterRefused
from rlinf_workers.launchers import interpreter
from rlinf_workers.protocol import PROTOCOL
from rlinf_workers.testing.venvs import second_venv


def test_an_interpreter_says_what_it_is(tmp_path):
    python = second_venv(tmp_path / "environment")
    environment = interpreter.examine_interpreter(python)
    assert (environment.path, environment.python.split(".")[:2]) == (python, [*map(str, sys.version_info[:2])])
    assert environment.packages["torch"] and environment.packages["rlinf-workers"] == rlinf_workers.__version__
    assert environment.folders["rlinf-workers"] == Path(rlinf_workers.__file__).parent


def executable(path: Path, script: str) -> str:
    path.write_text(script)
    path.chmod(0o755)
    return str(path)


def test_what_cannot_start_workers_is_refused(tmp_path):
    def refusal(python: str) -> str:
        with pytest.raises(InterpreterRefused) as caught:
            interpreter.examine_interpreter(python)
        return str(caught.value)

    second_venv(tmp_path / "other", protocol=987)
    (tmp_path / "bare").mkdir()
    bare = executable(tmp_path / "bare" / "python", f'#!/bin/sh\nexec {sys.executable} -S -E "$@"\n')
    plain = tmp_path / "data.txt"
    plain.write_text("no program")
    assert refusal(str(tmp_path / "nowhere")) == f"{tmp_path}/nowhere does not exist; give the path of its `python`"
    assert refusal(str(tmp_path / "other")).endswith(f"is a folder; did you mean {tmp_path}/other/bin/python?")
    assert "cannot be run: Permission denied" in refusal(str(plain))
    assert "is not a Python interpreter: it printed" in refusal(
        executable(tmp_path / "hello", "#!/bin/sh\necho hello\n")
    )
    assert f"{bare} -m pip install --find-links wheels rlinf-comm rlinf-workers rlinf-algos" in refusal(bare)
    other = refusal(str(tmp_path / "other" / "bin" / "python"))
    versions = f"rlinf-workers: 987 against {PROTOCOL}"
    for part in (str(tmp_path / "other"), sys.executable, versions, "install the same versions"):
        assert part in other


def test_an_environment_gets_the_users_folders_and_nothing_of_the_drivers(tmp_path, monkeypatch):
    (tmp_path / "site-packages").mkdir()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site-packages"))
    for folder in (tmp_path / "site-packages", tmp_path / "project"):
        monkeypatch.syspath_prepend(str(folder))
    folders = interpreter.own_path()
    assert str(tmp_path / "project") in folders
    assert not [folder for folder in folders if folder.endswith("-packages") or folder.startswith(sys.prefix)]
    assert str(Path(rlinf_workers.__file__).parents[1]) not in folders, "an editable install is the environment's own"
    monkeypatch.setenv("VIRTUAL_ENV", sys.prefix)
    monkeypatch.setenv("PYTHONHOME", sys.prefix)
    clean = interpreter.clean_env_vars({"A": "1"})
    assert not {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"} & clean.keys()
    assert clean == {**interpreter.clean_env_vars(), "A": "1"} and clean["PATH"] == os.environ["PATH"]


def test_a_hello_is_read_by_those_who_know_more_or_less():
    later = b'{"rlinf": "hello", "interpreter": "/p", "python": "3.15", "protocols": {"rlinf-comm": 7}, "mood": "good"}'
    own = structs.replace(interpreter.own_hello("worker"), interpreter="/d", python="3.11")
    text = disagreement(own, received(later))
    assert text is not None and "/p (Python 3.15)" in text and "/d (Python 3.11)" in text
    assert f"rlinf-comm: 7 against {rlinf_comm.protocol.PROTOCOL}, rlinf-workers: none against {PROTOCOL}" in text
    assert disagreement(own, received(encode_hello(own))) is None
    with pytest.raises(DecodeError, match="no hello"):
        received(b'{"role": "actor"}')


def received(message: bytes):
    ours, theirs = Connection.pair()
    with ours, theirs:
        theirs.send_bytes(message)
        return receive_hello(ours, Deadline(10.0))
