"""Nobody on the network reaches a run on one machine. `train` of command_line.py asserts it of every run that it makes;
here the check itself is tested, and a run with a Ray cluster of its own."""

import os
import subprocess
import sys

import pytest

from command_line import TINY_SORT, train
from listeners import nothing_exposed

LISTEN = """
import socket, sys
server = socket.create_server((sys.argv[1], 0))
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
        assert exposed.startswith("0.0.0.0:") and "server = socket.create_server" in exposed
        listeners.exposed.clear()
    for process in processes:
        process.communicate("")


def test_a_ray_cluster_of_the_runs_own_is_private(tmp_path):
    """It listens at the loopback address, and leaves no token in the user's home."""
    pytest.importorskip("ray", reason="pip install 'rlinf[ray]'")
    (tmp_path / "home").mkdir()
    settings = TINY_SORT | {"cluster.launcher": "ray", "run.num_steps": 1, "run.evaluate_every": 1}
    run = train("sort-grpo", tmp_path / "run", settings, variables={"HOME": str(tmp_path / "home")})
    assert (run / "logs" / "ray.log").exists()
    assert not (tmp_path / "home" / ".ray").exists()
