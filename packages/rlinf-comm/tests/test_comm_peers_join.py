"""Processes that find each other by name: the example of the package's README, and a replacement that joins."""

import subprocess
import sys

import pytest

SCRIPT = """
import multiprocessing, os, signal, socket, sys
import torch
from rlinf_comm import PeerLost
from rlinf_comm.peers import Peer

def engine(directory, scale):
    with Peer.join(directory, "engine/0") as me:
        weights = me.receive("trainer/0", timeout_s=60)
        me.send("trainer/0", {"sum": (weights["w"] * scale).sum().item()})
        me.receive("trainer/0", timeout_s=60)

if __name__ == "__main__":
    with socket.create_server(("127.0.0.1", 0)) as server:
        directory = "127.0.0.1:%d" % server.getsockname()[1]
    spawn = multiprocessing.get_context("spawn")
    with Peer.join(directory, "trainer/0") as me:
        for scale in (1, 2):
            process = spawn.Process(target=engine, args=(directory, scale))
            process.start()
            me.wait_for("engine/0", timeout_s=60)
            me.send("engine/0", {"w": torch.ones(4, 6).T})
            print(me.receive("engine/0", timeout_s=60), me.transport_to("engine/0").name, flush=True)
            os.kill(process.pid, signal.SIGKILL)
            try:
                me.receive("engine/0", timeout_s=60)
            except PeerLost as error:
                print("lost", process.pid == int(str(error).split("process ")[1].split()[0]), flush=True)
            process.join()
            try:
                while True:
                    me.send("engine/0", 0)
            except PeerLost:
                pass
"""


@pytest.mark.slow
def test_an_engine_is_killed_and_its_replacement_joins(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run([sys.executable, str(script)], check=True, timeout=120, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["{'sum': 24.0} shared", "lost True", "{'sum': 48.0} shared", "lost True"]
