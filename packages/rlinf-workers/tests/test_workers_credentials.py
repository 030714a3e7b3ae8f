"""Credentials in env vars stay with the driver, however a worker is started."""

import os
import sys

import pytest
from workers_agents import ProcessAgents

from rlinf_workers.launchers.base import Identity, WorkerSpec
from rlinf_workers.launchers.credentials import is_credential, worker_variables
from rlinf_workers.launchers.local.launcher import LocalLauncher
from rlinf_workers.testing.launchers import START_S, launched
from rlinf_workers.testing.toy_flow import Fault

CREDENTIALS = {
    "WANDB_API_KEY": "0a1b2c3d",
    "HF_TOKEN": "hf_abc",
    "HUGGING_FACE_HUB_TOKEN": "hf_abc",
    "aws_secret_access_key": "x+y/z",
    "AWS_ACCESS_KEY_ID": "AKIA0",
    "GITHUBTOKEN": "ghp_1",
    "OPENAI_API_KEYS": "sk-1,sk-2",
    "PGPASSWORD": "1234",
    "DB_PASS": "hunter2",
    "MYSQL_PWD": "hunter2",
    "GOOGLE_APPLICATION_CREDENTIALS": "/home/u/key.json",
    "SSH_AUTH_SOCK": "/tmp/ssh/agent.1",
    "RAY_AUTH_TOKEN": "aa",
    "https_proxy": "http://user:pass@proxy:3128",
    "DATABASE_URL": "postgres://u:p@db/x",
    "SLACK_WEBHOOK_URL": "https://hooks/x",
}
SETTINGS = {
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1",
    "SGLANG_MAX_TOKENS": "4096",
    "HF_HUB_OFFLINE": "1",
    "RAY_AUTH_MODE": "token",
    "RLINF_JOB_SECRET": "0" * 64,
    "RLINF_JOB_SECRET_FILE": "/run/secret",
    "PWD": "/work",
    "OLDPWD": "/work",
    "KEYBOARD_LAYOUT": "de",
    "PASSENGERS": "many",
    "HTTPS_PROXY": "http://proxy:3128",
    "PYTHONHASHSEED": "0",
}


@pytest.mark.parametrize(("name", "value"), CREDENTIALS.items())
def test_credentials(name, value):
    assert is_credential(name, value)


@pytest.mark.parametrize(("name", "value"), SETTINGS.items())
def test_settings(name, value):
    assert not is_credential(name, value)


class Variables(Fault):
    """Says which env vars it has."""

    def variables(self) -> list[str]:
        return sorted(os.environ)


@pytest.mark.parametrize("python", [None, sys.executable], ids=["spawned", "interpreter"])
@pytest.mark.parametrize("make", [LocalLauncher, pytest.param(ProcessAgents, marks=pytest.mark.slow)])
def test_a_worker_has_none_but_those_that_are_passed(make, python, tmp_path, monkeypatch):
    for name, value in (CREDENTIALS | SETTINGS).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("RLINF_JOB_SECRET_FILE")  # only one of the two may be set
    monkeypatch.setenv("HF_SETTING", "forwarded to every node")
    identity = Identity(role="variables", rank=0, num_ranks=1)
    spec = WorkerSpec(
        identity=identity,
        worker_class=Variables,
        log_path=tmp_path / "variables" / "0.log",
        env_vars={"OPENAI_API_KEY": "sk-1"},
        python=python,
    )
    with launched(make) as launcher:
        variables = launcher.start(spec).call("variables").result(START_S)
    assert set(variables) & {*CREDENTIALS, "OPENAI_API_KEY"} == {"OPENAI_API_KEY"}
    assert {"RLINF_JOB_SECRET", "HF_SETTING", "TOKENIZERS_PARALLELISM"} <= set(variables)


def test_the_driver_has_its_own_again_afterwards(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "0a1b")
    monkeypatch.setenv("THREADS", "4")
    before = dict(os.environ)
    with worker_variables({"THREADS": "1", "OPENAI_API_KEY": "sk-1"}):
        assert "WANDB_API_KEY" not in os.environ and os.environ["THREADS"] == "1"
        os.environ["SET_MEANWHILE"] = "by another thread"
        before["SET_MEANWHILE"] = "by another thread"
    assert dict(os.environ) == before
    del os.environ["SET_MEANWHILE"]
