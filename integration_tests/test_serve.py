"""`rlinf serve`: the same episodes through the wire as in the processes of `rlinf play`, to the bit.

The counterparts openpi-client and vla-eval come from the package index, `pip install --no-deps openpi-client vla-eval`;
`tools/test.sh --all` installs them. Without them their tests are skipped.
"""

import asyncio
import json
import os
import re
import signal
import subprocess
import threading
from contextlib import contextmanager

import msgpack
import numpy as np
import pytest
import torch

from command_line import RLINF, environment, rlinf
from rlinf_envs import EnvSpec, make_env
from trained_policy import SPOTS, make_run

pytest.importorskip("websockets", reason="the extra `serve` is not installed")

NEEDS = "the counterpart is not installed: pip install --no-deps openpi-client vla-eval"
SEEDS = range(7, 11)
CHUNKED = SPOTS.replace("hidden_size: 16", "hidden_size: 16, chunk_size: 4, reads_state: true")
"""Episodes of 6 actions, so that the last answer is not used up."""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "spots", CHUNKED)


@pytest.fixture(scope="module")
def local(run, tmp_path_factory):
    """The local episodes: seed -> its row. One environment a group, so that the policy answers one at a time."""
    out = tmp_path_factory.mktemp("played") / "out"
    alone = ["--env.num_envs", "4", "--env.num_groups", "4", "--cluster.num_devices", "1"]
    seeds = ["--episodes", len(SEEDS), "--seed", SEEDS[0]]
    assert rlinf("play", run, *seeds, "--no-video", "--output", out, *alone).returncode == 0
    rows = [json.loads(line) for line in (out / "episodes.jsonl").read_text().splitlines()]
    return {row["seed"]: row for row in rows}


class Served:
    """`rlinf serve` in a process of its own."""

    def __init__(self, run, *options, port=0):
        command = [*RLINF, "serve", str(run), "--port", str(port), *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment())
        for line in self.process.stdout:
            if match := re.search(r"openpi (ws://127\.0\.0\.1:(\d+)),", line):
                break
        else:
            pytest.fail("it ended before it listened")
        self.address, self.port = match[1], int(match[2])
        threading.Thread(target=self.process.stdout.read, daemon=True).start()

    def stop(self):
        self.process.kill()
        self.process.wait()


@contextmanager
def serving(run, *options, port=0):
    served = Served(run, *options, port=port)
    try:
        yield served
    finally:
        served.stop()


@pytest.fixture(scope="module")
def served(run):
    with serving(run) as running:
        yield running


def one_env():
    """The run's environment, one row of it."""
    return make_env(
        EnvSpec(
            kind="import",
            id="integration_tests.extensions.spots:Spots",
            num_envs=1,
            max_episode_steps=6,
            options={"size": 40},
        )
    )


def observation_of(fields):
    """As openpi's client of LIBERO names them, with a state of float64 as there."""
    return {
        "observation/image": fields["image.above"][0].numpy(),
        "observation/state": fields["state"][0].numpy().astype(np.float64),
        "prompt": fields["instruction"][0],
    }


def played(seed, infer):
    """Runs an episode with `infer(observation) -> actions [K, A]`; returns its actions and its return."""
    env = one_env()
    observation, executed, episodes = env.reset([seed]), [], ()
    while not episodes:
        actions = torch.from_numpy(np.array(infer(observation_of(observation))))
        result = env.step_chunk(actions[None])
        executed += actions[: int(result.num_steps[0])].tolist()
        observation, episodes = result.observation, result.episodes
    return executed, episodes[0].return_


def require_same(local, seed, episode):
    actions, return_ = episode
    assert actions == local[seed]["actions"]
    assert return_ == local[seed]["return"]


def packed(observation):
    """openpi's encoding of arrays, written down here once more."""

    def array(value):
        parts = {"__ndarray__": True, "data": value.tobytes(), "dtype": value.dtype.str, "shape": value.shape}
        return {key.encode(): part for key, part in parts.items()}

    return msgpack.packb(observation, default=array)


def actions_of(data):
    answer = msgpack.unpackb(data)["actions"]
    return np.frombuffer(answer[b"data"], answer[b"dtype"]).reshape(answer[b"shape"])


@pytest.mark.slow
def test_episodes_over_openpis_protocol_are_the_local_ones(served, local):
    from websockets.sync.client import connect

    with connect(served.address, max_size=None) as connection:
        metadata = msgpack.unpackb(connection.recv())
        assert metadata["chunk_size"] == 4 and metadata["action"]["low"] == [-1.0, -1.0]
        assert set(metadata["reads"]) == {"image.above", "state"}

        def infer(observation):
            connection.send(packed(observation))
            return actions_of(connection.recv())

        for seed in SEEDS:
            require_same(local, seed, played(seed, infer))


def test_what_the_policy_cannot_read_is_named_and_web_pages_are_refused(served):
    from websockets.exceptions import InvalidStatus
    from websockets.sync.client import connect

    fields = one_env().reset([0])
    right = observation_of(fields)
    small = right | {"observation/image": right["observation/image"][:20]}
    for wrong, text in (
        ({"front": right["observation/image"]}, "looked up as image.above, images/above"),
        (small, r"observation/image has the shape \[20, 40, 3\]; the policy reads \[40, 40, 3\]"),
        (right | {"observation/image": np.zeros((40, 40, 3), np.float32)}, "is float32; the policy reads uint8"),
        (right | {"real_time/rest": np.zeros((2, 2))}, "the policy cannot continue a chunk; flow policies can"),
    ):
        with connect(served.address) as connection:
            connection.recv()
            connection.send(packed(wrong))
            assert re.search(text, connection.recv())
    for path, header, status in (("", {"Origin": "https://example.org"}, 403), ("/other", {}, 404)):
        with pytest.raises(InvalidStatus) as refused, connect(served.address + path, additional_headers=header):
            pass
        assert refused.value.response.status_code == status


def test_openpi_client_with_a_killed_and_a_stopped_server(run, local):
    """The client connects again and asks again; the policy remembers nothing."""
    client_of = pytest.importorskip("openpi_client.websocket_client_policy", reason=NEEDS).WebsocketClientPolicy
    from websockets.exceptions import ConnectionClosed

    server = Served(run)
    client, num_answers = client_of(host="127.0.0.1", port=server.port), 0

    def infer(observation):
        nonlocal server, client, num_answers
        num_answers += 1
        if num_answers == 2:  # in the middle of an episode
            server.process.kill()
        if num_answers == 4:
            os.kill(server.process.pid, signal.SIGSTOP)
            threading.Timer(0.5, os.kill, (server.process.pid, signal.SIGCONT)).start()
        try:
            return client.infer(observation)["actions"]
        except ConnectionClosed:
            server.stop()
            server = Served(run, port=server.port)
            client = client_of(host="127.0.0.1", port=server.port)
            return client.infer(observation)["actions"]

    try:
        for seed in SEEDS:
            require_same(local, seed, played(seed, infer))
    finally:
        server.stop()
    assert num_answers == 2 * len(SEEDS)


def benchmark_of(episodes):
    """vla-eval's interface of the run's environment; `episodes` collects (seed, actions, return)."""
    from vla_eval.benchmarks.base import StepBenchmark, StepResult

    class Spots(StepBenchmark):
        def get_tasks(self):
            return [{"name": str(seed), "seed": seed} for seed in SEEDS]

        def reset(self, task):
            self.seed, self.actions, self.env = task["seed"], [], one_env()
            return self.env.reset([task["seed"]])

        def step(self, action):
            self.actions.append(action["actions"].tolist())
            result = self.env.step(torch.from_numpy(np.array(action["actions"]))[None])
            for end in result.episodes:
                episodes.append((self.seed, self.actions, end.return_))
            return StepResult(obs=result.observation, reward=0.0, done=bool(result.episodes), info={})

        def make_obs(self, raw_obs, task):
            return {
                "images": {"above": raw_obs["image.above"][0].numpy()},
                "states": raw_obs["state"][0].numpy(),
                "task_description": raw_obs["instruction"][0],
            }

        def check_done(self, step_result):
            return step_result.done

        def get_step_result(self, step_result):
            return {"success": True}

    return Spots()


def test_vla_eval_with_a_server_that_is_killed_in_an_episode(run, local):
    """Its connection comes back by itself, and its harness repeats the episode."""
    connection_of = pytest.importorskip("vla_eval.connection", reason=NEEDS).Connection
    from vla_eval.runners.sync_runner import SyncEpisodeRunner

    server, episodes = Served(run), []
    benchmark = benchmark_of(episodes)
    step = benchmark.step

    def step_and_kill(action):
        if len(episodes) == 1 and len(benchmark.actions) == 3:  # within the second chunk's reach, but once
            server.process.kill()
            server.process.wait()
            benchmark.step = step
        return step(action)

    benchmark.step = step_and_kill

    async def evaluate():
        nonlocal server
        async with connection_of(f"{server.address}/vla-eval", backoff_base=0.1) as connection:
            assert connection.server_info["protocol_version"] == 1
            assert connection.server_info["observation_params"] == {"send_state": True}
            for task in benchmark.get_tasks():
                try:
                    await SyncEpisodeRunner().run_episode(benchmark, task, connection, max_steps=50)
                except Exception:  # noqa: BLE001 - as vla-eval's orchestrator, which repeats what failed
                    server = Served(run, port=server.port)
                    await SyncEpisodeRunner().run_episode(benchmark, task, connection, max_steps=50)

    try:
        asyncio.run(evaluate())
    finally:
        server.stop()
    assert [seed for seed, _, _ in episodes] == list(SEEDS)
    for seed, actions, return_ in episodes:
        require_same(local, seed, (actions, return_))


def test_a_key_is_needed_where_one_is_set(run, tmp_path):
    from websockets.exceptions import InvalidStatus
    from websockets.sync.client import connect

    with serving(run, "--api-key-file", str(tmp_path / "key")) as server:
        key = (tmp_path / "key").read_text().strip()
        assert (tmp_path / "key").stat().st_mode & 0o077 == 0
        with pytest.raises(InvalidStatus, match="401"), connect(server.address):
            pass
        with connect(server.address, additional_headers={"Authorization": f"Api-Key {key}"}) as connection:
            assert msgpack.unpackb(connection.recv())["server"] == "rlinf"
        with connect(server.address.replace("ws://", f"ws://any:{key}@")) as connection:
            assert msgpack.unpackb(connection.recv())["server"] == "rlinf"


def test_mistakes_are_refused_before_anything_is_loaded(run):
    open_to_all = rlinf("serve", run, "--host", "0.0.0.0")
    assert open_to_all.returncode == 2 and "--api-key-file FILE" in open_to_all.stderr
    random_weights = rlinf("serve", "env-ppo")
    assert random_weights.returncode == 2 and "random weights" in random_weights.stderr
    unread = rlinf("serve", run, "--rename", "{left: image.front}")
    assert unread.returncode == 2 and "the policy reads image.above, state" in unread.stderr
