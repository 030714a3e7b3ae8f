"""SessionRouter: one process in which the episodes of several rollout ranks run; see agents/router.py."""

from __future__ import annotations

import os
from dataclasses import replace

from rlinf_workers.addresses import ADDRESS_VARIABLE, LOOPBACK
from rlinf_workers.agents.host import yield_to_engine
from rlinf_workers.agents.process import RouterAddress
from rlinf_workers.agents.router_server import RouterServer
from rlinf_workers.execution.groups import RANKS_PER_SHARED_PROCESS
from rlinf_workers.roles.language.agent_rollout import settings_of_agents
from rlinf_workers.roles.language.rollout import RolloutSettings
from rlinf_workers.worker import Worker


class SessionRouter(Worker):
    """Serves a router to ranks of the group that shares it.

    Args:
        settings: of that group.

    Raises: SettingsRefused if the agents cannot run.
    """

    def __init__(self, settings: RolloutSettings) -> None:
        yield_to_engine()
        episodes = settings_of_agents(settings)
        of_all_ranks = replace(episodes, max_episodes=RANKS_PER_SHARED_PROCESS * episodes.max_episodes)
        self._server = RouterServer(of_all_ranks, os.environ.get(ADDRESS_VARIABLE) or LOOPBACK)

    def address(self) -> RouterAddress:
        """Where ranks reach it."""
        return self._server.address

    def close(self) -> None:
        self._server.close()
