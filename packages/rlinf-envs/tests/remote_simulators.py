"""Environments for tests of `env.kind: remote`: one of Gymnasium, the same with the interface of the older Gym, and a
server of either in a process that has nothing of RLinf but the server's file."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import rlinf_envs.remote

MODULE = '''
import os, signal, time
import gymnasium as gym
import numpy as np

class Quirky(gym.Env):
    """Sees a picture, a text and numbers; does what its action says."""
    action_space = gym.spaces.Discrete(6)
    observation_space = gym.spaces.Dict({
        "front": gym.spaces.Box(0, 255, (3, 3, 3), np.uint8),
        "task": gym.spaces.Text(9),
        "place": gym.spaces.Box(-9, 9, (2,), np.float64),
        "mode": gym.spaces.Discrete(3, start=1),
    })
    def __init__(self, scale=0.3, render_mode="rgb_array"):
        self.scale, self.render_mode = scale, render_mode
        self.place = np.zeros(2)
    def _observation(self):
        pixels = np.full((3, 3, 3), int(abs(self.place[0] * 100)) % 256, np.uint8)
        mode = 1 + int(abs(self.place[1]) * 10) % 3
        return {"front": pixels, "task": f"go {self.place[1]:.2f}", "place": self.place, "mode": mode}
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place[:] = self.np_random.uniform(-1, 1, 2)
        return self._observation(), {}
    def step(self, action):
        if action == 3:
            raise LookupError("no such joint")
        if action == 4:
            os.kill(os.getpid(), signal.SIGSEGV)
        if action == 5:
            time.sleep(60)
        self.place += self.scale * (action - 1)  # into the buffer that it has shown
        reward = np.float64(self.place[0]) / 3
        return self._observation(), reward, abs(self.place[0]) > 1, False, {"success": self.place[0] > 1}
    def render(self):
        return self._observation()["front"]

class Calm(Quirky):
    action_space = gym.spaces.Discrete(3)

class OldStyle:
    """The interface of Gym before 0.26: no seed in reset, four values from step."""
    action_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    observation_space = gym.spaces.Box(-9, 9, (2,), np.float32)
    def seed(self, seed):
        self.random = np.random.RandomState(seed)
    def reset(self):
        self.place, self.count = self.random.uniform(-1, 1, 2), 0
        return self.place
    def step(self, action):
        self.place, self.count = self.place + 0.2 * action, self.count + 1
        is_cut = self.count == 4
        return self.place, float(self.place[0]), is_cut or self.place[1] > 1, {"TimeLimit.truncated": is_cut}
    def render(self, mode="human"):
        return np.full((2, 2, 3), 7, np.uint8)
'''


BATCH_MODULE = '''
from rlinf_envs import EnvSpec, make_env

def batch(num_envs, max_episode_steps, ignore_terminations=False, scale=0.3):
    spec = EnvSpec(kind="import", id="remote_quirky:Quirky", num_envs=num_envs, options={"scale": scale},
        max_episode_steps=max_episode_steps, ignore_terminations=ignore_terminations)
    return make_env(spec)

class Lockstep:
    """Has no snapshots, as simulators that step all rows at once."""
    def __init__(self, num_envs, max_episode_steps):
        self._env = batch(num_envs, max_episode_steps)
    def __getattr__(self, name):
        if name in ("snapshot", "restore"):
            raise AttributeError(name)
        return getattr(self._env, name)

def of_three(num_envs):
    return batch(3, 6)
'''


class Server:
    """A simulator server in a process of its own, of a copy of its file; a context manager.

    Args:
        has_rlinf: whether its venv has torch and RLinf.
    """

    def __init__(
        self, folder: Path, *, place: str = "remote_quirky:Quirky", port: int = 0, has_rlinf: bool = False
    ) -> None:
        shutil.copy(rlinf_envs.remote.__file__, folder / "simulator_server.py")
        (folder / "remote_quirky.py").write_text(MODULE)
        (folder / "remote_batch.py").write_text(BATCH_MODULE)
        self.secret = folder / "secret"
        (folder / "without").mkdir(exist_ok=True)
        hide = "import sys; sys.modules.update(dict.fromkeys(('torch', 'rlinf_envs')))\n"
        (folder / "without" / "sitecustomize.py").write_text(hide)
        command = [sys.executable, "simulator_server.py", place, "--port", str(port), "--secret-file", "secret"]
        env = os.environ | ({} if has_rlinf else {"PYTHONPATH": str(folder / "without")})
        self.process = subprocess.Popen(
            command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        match = re.search(r"at (127\.0\.0\.1:(\d+));", line)
        assert match, line or (self.process.stderr and self.process.stderr.read())
        self.address, self.port = match[1], int(match[2])

    def simulators(self) -> list[int]:
        """Returns the process ids of connections, oldest first."""
        pids = map(int, Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split())
        return [pid for pid in pids if b"resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_bytes()]

    def stop(self) -> None:
        self.process.kill()
        self.process.communicate()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class Relay:
    """Passes bytes between clients and a server, until it cuts or delays them."""

    def __init__(self, port: int) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._port, self._sockets = port, list[socket.socket]()
        self.delay_s = 0.0
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Breaks every connection, also in the middle of a message."""
        for one in self._sockets:
            try:
                one.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # it was cut before
        self._sockets.clear()

    def _accept(self) -> None:
        while True:
            client, _ = self._listening.accept()
            server = socket.create_connection(("127.0.0.1", self._port))
            self._sockets += [client, server]
            for source, target in ((client, server), (server, client)):
                threading.Thread(target=self._pass, args=(source, target), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                time.sleep(self.delay_s)
                target.sendall(data)
        except OSError:
            pass  # it was cut
        for one in (source, target):
            try:
                one.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # the other direction did it


def wait_for(condition: Callable[[], bool], patience_s: float = 20.0) -> bool:
    """Returns whether the condition holds in time."""
    deadline_s = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.02)
    return True
