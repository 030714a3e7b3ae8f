"""A launcher whose agents are plain processes of this machine, one for each pretended node: all of a cluster but what
manages it."""

import base64
import subprocess
import sys

import msgspec

from rlinf_workers.launchers.agent import Agent, AgentSettings
from rlinf_workers.launchers.agents import AgentLauncher

GPUS = (["0", "1"], ["5", "7"])
"""Of each node, as its own tools name them."""


class ProcessAgents(AgentLauncher):
    """Two nodes of two GPUs."""

    def __init__(self, *, heartbeat_timeout_s=60.0, pins_slots=False):
        super().__init__(listen_at="127.0.0.1", heartbeat_timeout_s=heartbeat_timeout_s, pins_slots=pins_slots)
        self.processes = []
        for node in range(len(GPUS)):
            settings = base64.b64encode(msgspec.msgpack.encode(self._settings_of(node))).decode()
            self.processes.append(subprocess.Popen([sys.executable, __file__, settings], stdin=subprocess.DEVNULL))
            self._arrival_of(node)

    def shutdown(self):
        super().shutdown()
        for process in self.processes:
            process.wait(timeout=60)


if __name__ == "__main__":
    settings = msgspec.msgpack.decode(base64.b64decode(sys.argv[1]), type=AgentSettings)
    Agent(settings, GPUS[settings.node]).run()
