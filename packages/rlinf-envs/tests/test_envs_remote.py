"""`env.kind: remote`: the numbers of a local simulator, whatever happens to the server and the connection."""

from __future__ import annotations

import ast
import os
import signal
import socket
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import msgpack
import numpy as np
import pytest
import torch
from remote_simulators import Relay, Server, wait_for

from rlinf_envs import EnvCrashedError, EnvError, EnvSpec, Replayable, kind_spec, make_env, remote
from rlinf_envs.core.patience import Patience
from rlinf_envs.core.protocol import BatchedEnv
from rlinf_envs.core.subprocess_env import SubprocessVector
from rlinf_envs.core.vector import InProcessVector
from rlinf_envs.testing import _difference, _result_difference, check_env

QUIRKY = "remote_quirky:Quirky"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("remote")
    sys.path.append(str(folder))  # for the local environments
    with Server(folder) as running:
        yield running
    sys.path.remove(str(folder))


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlinf_envs.adapters.remote.connection.CONNECT_PATIENCE_S", 1.0)


def local(num_envs: int = 3, **options: float) -> EnvSpec:
    return EnvSpec(kind="import", id=QUIRKY, num_envs=num_envs, max_episode_steps=6, options=options)


def at(address: str, server: Server, num_envs: int = 3, num_processes: int = 0, **options: float) -> EnvSpec:
    return EnvSpec(
        kind="remote",
        id=address,
        num_envs=num_envs,
        num_processes=num_processes,
        max_episode_steps=6,
        options={"secret_file": str(server.secret), **options},
    )


def chunks(num_chunks: int, num_envs: int = 3, length: int = 4) -> torch.Tensor:
    """[num_chunks, N, length] of actions 0..2."""
    return torch.randint(0, 3, (num_chunks, num_envs, length), generator=torch.Generator().manual_seed(1))


def require_same(env: BatchedEnv, reference: BatchedEnv, actions: torch.Tensor) -> int:
    """Steps both by chunks; returns the number of episodes that ended."""
    num_ends = 0
    for number, chunk in enumerate(actions):
        result, expected = env.step_chunk(chunk), reference.step_chunk(chunk)
        assert (problem := _result_difference(result, expected)) is None, f"chunk {number}: {problem}"
        num_ends += len(result.episodes)
    return num_ends


def test_the_numbers_are_those_of_a_local_environment(server: Server) -> None:
    env, reference = make_env(at(server.address, server, num_processes=2)), make_env(local())
    assert env.observation_spec == reference.observation_spec
    assert env.max_episode_steps == reference.max_episode_steps == 6
    assert torch.equal(env.action_spec.high, reference.action_spec.high)
    assert _difference(env.reset([3, 1, 4]), reference.reset([3, 1, 4])) is None
    assert require_same(env, reference, chunks(12)) > 8
    for action in chunks(4)[:, :, 0]:
        assert _result_difference(env.step(action), reference.step(action)) is None
    assert isinstance(env, Replayable) and isinstance(reference, Replayable)
    rows = env.snapshot()
    expected = env.step_chunk(chunks(1)[0])
    assert _difference(env.restore(rows), reference.restore(rows)) is None
    assert _result_difference(env.step_chunk(chunks(1)[0]), expected) is None
    assert require_same(env, reference, chunks(0)) == 0
    assert torch.equal(env.render(), make_restored(rows, chunks(1)[0]))
    env.close()


def make_restored(rows: tuple, chunk: torch.Tensor) -> torch.Tensor:
    """Returns the pictures of a local environment after a restore and a chunk."""
    env = make_env(local())
    assert isinstance(env, Replayable)
    env.restore(rows)
    env.step_chunk(chunk)
    return env.render()


def test_options_reach_the_constructor_and_others_are_refused(server: Server) -> None:
    env, reference = make_env(at(server.address, server, scale=0.7)), make_env(local(scale=0.7))
    assert _difference(env.reset([0] * 3), reference.reset([0] * 3)) is None
    assert require_same(env, reference, chunks(3)) > 0
    env.close()
    with pytest.raises(EnvCrashedError, match="unexpected keyword argument 'sise'"):
        make_env(at(server.address, server, sise=3))


def test_lost_simulators_are_replaced_and_nothing_changes(server: Server) -> None:
    """The server's process is killed or stopped, the connection cut or slow, at every kind of call."""
    relay, messages = Relay(server.port), list[str]()
    env, reference = make_env(at(relay.address, server), on_replaced=messages.append), make_env(local())
    assert isinstance(env, SubprocessVector)
    env._patience = Patience(longest_s=20, limit_s=1.0)
    actions = chunks(12)
    relay.cut()
    assert _difference(env.reset([3, 1, 4]), reference.reset([3, 1, 4])) is None
    os.kill(server.simulators()[-1], signal.SIGKILL)
    require_same(env, reference, actions[:3])
    stopped = server.simulators()[-1]
    os.kill(stopped, signal.SIGSTOP)
    require_same(env, reference, actions[3:5])
    relay.cut()
    require_same(env, reference, actions[5:8])
    relay.delay_s = 0.05
    assert require_same(env, reference, actions[8:]) > 1
    relay.delay_s = 0.0
    os.kill(server.simulators()[-1], signal.SIGKILL)
    assert torch.equal(env.render(), reference.render())
    assert len(messages) >= 5  # a busy machine may be slow enough to lose more
    assert all(text.startswith(f"the simulator of envs 0..2 at {relay.address} ") for text in messages)
    assert any("gave no answer to step_chunk in 1 s" in text for text in messages)
    assert all("begun again over a new connection: env 0 " in text for text in messages)
    assert wait_for(lambda: stopped not in server.simulators()), "the server kills a simulator whose client is gone"
    env.close()
    assert wait_for(lambda: not server.simulators())


@pytest.fixture(scope="module")
def batch_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("batch"), place="remote_batch:batch", has_rlinf=True) as running:
        yield running


@pytest.mark.parametrize("name", ["server", "batch_server"])
def test_rows_begin_one_by_one_though_simulators_are_lost(name: str, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue("server")  # for the local environments
    server: Server = request.getfixturevalue(name)
    relay, messages = Relay(server.port), list[str]()
    env, reference = make_env(at(relay.address, server), on_replaced=messages.append), make_env(local())
    assert isinstance(env, SubprocessVector) and isinstance(reference, InProcessVector) and env.begins_rows
    script: list[dict[int, int]] = [{2: 5}, {0: 6}, {}, {1: 7, 2: 8}, {}, {0: 9}, {}, {2: 3, 1: 4}, {}]
    losses = {1: relay.cut, 3: lambda: os.kill(server.simulators()[-1], signal.SIGKILL), 5: relay.cut, 6: relay.cut}
    num_ends = 0
    for number, (seeds, chunk) in enumerate(zip(script, chunks(len(script)), strict=True)):
        losses.get(number, lambda: None)()  # while some rows rest and others are in the middle of an episode
        relay.delay_s = 0.03 if number == 7 else 0.0
        if seeds or number == 0:
            begun = [one.begin(seeds, alone=number == 0) for one in (env, reference)]
            assert _difference(*begun) is None, f"chunk {number}"
        num_ends += require_same(env, reference, chunk[None])
    assert num_ends > 4 and len(messages) >= 4
    env.begin({1: 7})
    rows = env.snapshot()
    assert [row.rests for row in rows] == [True, False, True]
    expected = env.step_chunk(chunks(1)[0])
    env.restore(rows)
    assert _result_difference(env.step_chunk(chunks(1)[0]), expected) is None
    env.close()


def test_a_batch_has_the_numbers_of_its_environments(server: Server, batch_server: Server) -> None:
    env = make_env(at(batch_server.address, batch_server, scale=0.7))
    reference = make_env(local(scale=0.7))
    assert env.observation_spec == reference.observation_spec and env.notes == reference.notes
    assert torch.equal(env.action_spec.high, reference.action_spec.high)
    assert _difference(env.reset([3, 1, 4]), reference.reset([3, 1, 4])) is None
    os.kill(batch_server.simulators()[-1], signal.SIGKILL)
    assert require_same(env, reference, chunks(8)) > 3
    for action in chunks(3)[:, :, 0]:
        assert _result_difference(env.step(action), reference.step(action)) is None
    assert torch.equal(env.render(), reference.render())
    env.reset([0] * 3)
    with pytest.raises(EnvCrashedError, match="env 1: step 0 of its episode failed: LookupError: no such joint"):
        env.step(torch.tensor([1, 3, 1]))
    env.close()


def test_a_batch_without_snapshots_is_not_replaced(tmp_path: Path, server: Server) -> None:
    with Server(tmp_path, place="remote_batch:Lockstep", has_rlinf=True) as lockstep:
        env, reference = make_env(at(lockstep.address, lockstep)), make_env(local())
        assert _difference(env.reset([3, 1, 4]), reference.reset([3, 1, 4])) is None
        require_same(env, reference, chunks(2))
        os.kill(lockstep.simulators()[-1], signal.SIGKILL)
        with pytest.raises(EnvCrashedError, match=r"env 0: the simulator of envs 0\.\.2 at .* was lost .*; ended"):
            env.step_chunk(chunks(1)[0])


def test_a_callable_that_returns_another_batch_is_named(tmp_path: Path) -> None:
    with Server(tmp_path, place="remote_batch:of_three", has_rlinf=True) as three:
        spec = EnvSpec(kind="remote", id=three.address, num_envs=2, options={"secret_file": str(three.secret)})
        with pytest.raises(EnvCrashedError, match="num_envs=2 was asked for, and the batch has 3"):
            make_env(spec)


@pytest.mark.slow
def test_a_server_that_starts_again_goes_on(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlinf_envs.adapters.remote.connection.CONNECT_PATIENCE_S", 20.0)
    first = Server(tmp_path)
    env, reference = make_env(at(first.address, first)), make_env(local())
    assert _difference(env.reset([1, 2, 3]), reference.reset([1, 2, 3])) is None
    require_same(env, reference, chunks(2))
    simulators = first.simulators()
    first.stop()
    assert wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in simulators)), "simulators outlive it"
    with Server(tmp_path, port=first.port):
        assert require_same(env, reference, chunks(4)) > 0
        env.close()


def test_a_simulator_that_dies_at_one_place_again_and_again_ends_it(server: Server) -> None:
    env = make_env(at(server.address, server, num_envs=2))
    env.reset([5, 6])
    with pytest.raises(EnvCrashedError, match=r"env 0: the simulator of envs 0\.\.1 at .*, 3 times in a row"):
        env.step(torch.tensor([1, 4]))


def test_an_error_of_an_environment_has_the_traceback_of_the_server(server: Server) -> None:
    env = make_env(at(server.address, server))
    env.reset([0] * 3)
    with pytest.raises(EnvCrashedError) as caught:
        env.step(torch.tensor([1, 3, 1]))
    text = str(caught.value)
    assert text.startswith(
        "env 1: step 0 of its episode failed: LookupError: no such joint\nin the simulator of envs 0..2"
    )
    assert "remote_quirky.py" in text and 'raise LookupError("no such joint")' in text
    with pytest.raises(EnvError, match="after a failure"):
        env.step(torch.ones(3, dtype=torch.int64))
    env.reset([0] * 3)
    env.close()


def test_the_interface_of_the_older_gym_is_read(tmp_path: Path) -> None:
    with Server(tmp_path, place="remote_quirky:OldStyle") as old:
        spec = EnvSpec(kind="remote", id=old.address, num_envs=2, options={"secret_file": str(old.secret)})
        env = make_env(spec)
        state = env.reset([7, 8])["state"]
        expected = np.stack([np.random.RandomState(seed).uniform(-1, 1, 2) for seed in (7, 8)]).astype(np.float32)
        assert torch.equal(torch.as_tensor(state), torch.from_numpy(expected))
        result = env.step_chunk(torch.tensor([[[0.0, 0.0]] * 5, [[0.0, 1.0]] * 5]))
        assert result.truncated.tolist() == [True, False] or result.terminated.tolist()[1]
        assert result.num_steps.tolist()[0] == 4
        assert [end.success_once for end in result.episodes] == [None, None]
        assert env.render().tolist() == [[[[7] * 3] * 2] * 2] * 2
        env.close()


@pytest.mark.slow
def test_conformance(tmp_path: Path) -> None:
    with Server(tmp_path, place="remote_quirky:Calm") as calm:
        check_env(lambda: make_env(at(calm.address, calm)), num_steps=30)


def test_an_address_without_a_server_and_a_wrong_secret_are_named(server: Server, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(EnvError, match=rf"at 127.0.0.1:{port} cannot be reached .* python -m rlinf_envs.remote"):
        make_env(at(f"127.0.0.1:{port}", server))
    with pytest.raises(EnvError, match="no address; allowed: host:port"):
        make_env(at("localhost", server))
    other = tmp_path / "other"
    other.write_text("x" * 64)
    spec = EnvSpec(kind="remote", id=server.address, num_envs=1, options={"secret_file": str(other)})
    with pytest.raises(EnvError, match="must be a file that only you can read"):
        make_env(spec)
    other.chmod(0o600)
    with pytest.raises(EnvError, match=r"was refused .*its secret is another one"):
        make_env(spec)


def greeted(server: Server) -> socket.socket:
    connected = socket.create_connection(("127.0.0.1", server.port), timeout=10)
    remote.prove_as_client(connected, remote.read_secret(str(server.secret)))
    connected.settimeout(10)
    return connected


def test_a_client_without_the_secret_starts_nothing(server: Server) -> None:
    num_before = len(server.simulators())
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connected:
        remote.receive_exactly(connected, len(remote.MAGIC) + remote.NONCE_BYTES)
        connected.sendall(remote.MAGIC + bytes(remote.NONCE_BYTES + remote.PROOF_BYTES))
        assert connected.recv(1) == b""
    assert len(server.simulators()) == num_before


def test_a_server_without_the_secret_is_not_believed(server: Server) -> None:
    """It knows no proof; one that it has seen fits no other pair of random numbers."""
    ours, theirs = socket.socketpair()
    theirs.sendall(remote.MAGIC + bytes(remote.NONCE_BYTES) + bytes(remote.PROOF_BYTES))
    with pytest.raises(remote.WireError, match="does not know the secret"):
        remote.prove_as_client(ours, b"s" * 32)


def test_large_and_damaged_messages_end_a_connection(server: Server) -> None:
    for data in (struct.pack(">Q", remote.MAX_CALL_BYTES + 1), struct.pack(">Q", 3) + b"\xc1\xc1\xc1"):
        with greeted(server) as connected:
            connected.sendall(data)
            assert connected.recv(1) == b""


def test_only_arrays_of_numbers_are_sent_and_read() -> None:
    numbers = {"a": np.arange(6, dtype=">i2").reshape(2, 3), "b": np.float64(0.1), "c": ("x", [np.zeros((0, 2))])}
    got = remote.unpacked(remote.packed(numbers))
    assert got["a"].tolist() == [[0, 1, 2], [3, 4, 5]] and got["a"].dtype == ">i2"
    assert got["b"] == 0.1 and got["c"][0] == "x" and got["c"][1][0].shape == (0, 2)
    with pytest.raises(TypeError, match="object"):
        remote.packed(np.array([object()]))
    head = struct.pack(">4sBQ", b"|O", 1, 1)
    with pytest.raises(remote.WireError, match="dtype object"):
        remote.unpacked(msgpack.packb(msgpack.ExtType(remote.ARRAY, head + bytes(8))))


def test_an_evaluation_names_what_is_served(server: Server) -> None:
    options = {"secret_file": str(server.secret), "scale": 0.3}
    facts = kind_spec("remote").evaluation_facts(server.address, options)
    assert facts["remote.environment"] == QUIRKY and facts["option.scale"] == "0.3"
    assert "version.python" in facts and "option.secret_file" not in facts


def test_the_servers_file_is_valid_for_python_38() -> None:
    ast.parse(Path(remote.__file__).read_text(), feature_version=(3, 8))
