"""Opens a connection to a simulator server and creates its environments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlinf_envs.adapters.remote.batch import RemoteBatch, ReplayableRemoteBatch
from rlinf_envs.adapters.remote.connection import ServerConnection, addresses
from rlinf_envs.adapters.remote.rows import RemoteRows
from rlinf_envs.core.protocol import BatchedEnv
from rlinf_envs.errors import EnvError


def make_remote(
    env_id: str,
    num_envs: int,
    *,
    max_episode_steps: int | None = None,
    ignore_terminations: bool = False,
    picture_layout: str | None = None,
    secret_file: str | None = None,
    **options: Any,
) -> BatchedEnv:
    """Creates environments at the first address of an id. `make_env` creates them so that a lost connection is
    replaced; here it is an error (`SimulatorLost`)."""
    return opened(
        ServerConnection(addresses(env_id)[0], secret_file),
        num_envs,
        max_episode_steps=max_episode_steps,
        ignore_terminations=ignore_terminations,
        picture_layout=picture_layout,
        options=options,
    )


def opened(
    connection: ServerConnection,
    num_envs: int,
    *,
    max_episode_steps: int | None,
    ignore_terminations: bool,
    picture_layout: str | None,
    options: Mapping[str, Any],
) -> BatchedEnv:
    """Raises: EnvError for environments that cannot be read; SimulatorLost if the connection breaks."""
    connection.open()
    described = connection.call(
        "make",
        num_envs=num_envs,
        max_episode_steps=max_episode_steps,
        ignore_terminations=ignore_terminations,
        options=dict(options),
    )
    if "batch" not in described:
        return RemoteRows(
            connection, num_envs, described, ignore_terminations=ignore_terminations, picture_layout=picture_layout
        )
    if picture_layout is not None:
        raise EnvError("picture_layout is for single environments; the server has a batch, which says what it shows")
    is_replayable = described["batch"]["is_replayable"]
    return (ReplayableRemoteBatch if is_replayable else RemoteBatch)(connection, num_envs, described["batch"])
