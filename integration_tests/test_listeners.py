"""Nobody on the network and no other user reaches a run on one machine. `train` of command_line.py asserts it of every
run that it makes; here the check itself is tested, and a run with a Ray cluster of its own."""

import os
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

import pytest

from command_line import TINY_SORT, train
from listeners import nothing_exposed

LISTEN = """
import os, socket, sys
os.umask(0)
name = sys.argv[1].replace("@", chr(0))
server = socket.socket(socket.AF_INET if name[0].isdigit() else socket.AF_UNIX)
server.bind((name, 0) if name[0].isdigit() else name)
server.listen()
print(flush=True)
sys.stdin.readline()
"""


def listening(address, env):
    """A process that listens there."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", LISTEN, address], env=env, **pipes)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def test_listeners_of_a_run_are_seen_and_those_of_others_are_not():
    env = dict(os.environ)
    with nothing_exposed(env) as listeners:
        processes = [listening("127.0.0.1", env), listening("0.0.0.0", os.environ)]
        listeners.look()
        assert (listeners.num_loopback, listeners.exposed) == (1, set())
        processes.append(listening("0.0.0.0", env))
        listeners.look()
        (exposed,) = listeners.exposed
        assert exposed.startswith("0.0.0.0:") and "import os, socket" in exposed
        listeners.exposed.clear()
    for process in processes:
        process.communicate("")


def test_unix_sockets_that_other_users_can_call_are_seen():
    env = dict(os.environ)
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, nothing_exposed(env) as listeners:
        names = [f"{folder}/closed", f"{folder}/open/socket", f"@{uuid.uuid4().hex}", f"@rlinf-comm/{uuid.uuid4().hex}"]
        Path(folder, "open").mkdir()
        processes = [listening(names[0], env)]
        listeners.look()
        assert (listeners.num_loopback, listeners.exposed) == (0, set()), "the folder is of mode 0700"
        Path(folder).chmod(0o711)
        processes += [listening(name, env) for name in names[1:]]
        listeners.look()
        assert {text.partition(" of ")[0] for text in listeners.exposed} == {names[1], names[2]}
        listeners.exposed.clear()
    for process in processes:
        process.communicate("")


@pytest.mark.slow
def test_a_ray_cluster_of_the_runs_own_is_private(tmp_path):
    """It listens at the loopback address, and leaves no token in the user's home."""
    pytest.importorskip("ray", reason="pip install 'rlinf[ray]'")
    (tmp_path / "home").mkdir()
    settings = TINY_SORT | {"cluster.launcher": "ray", "run.num_steps": 1, "run.evaluate_every": 1}
    run = train("sort-grpo", tmp_path / "run", settings, variables={"HOME": str(tmp_path / "home")})
    assert (run / "logs" / "ray.log").exists()
    assert not (tmp_path / "home" / ".ray").exists()
