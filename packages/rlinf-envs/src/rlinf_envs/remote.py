"""Serves a simulator of any venv and any machine to `env.kind: remote`, over one TCP socket.

This file needs Python 3.8, numpy, msgpack and nothing else of RLinf: copy it beside any simulator.

    python -m rlinf_envs.remote my_simulator:make --port 7000    # in a venv with rlinf-envs
    python remote.py my_simulator:make --port 7000               # in any other

`my_simulator:make` is a callable that returns one environment with the interface of Gymnasium, or of the Gym before it.
If it has a parameter `num_envs`, it returns a batch of so many, with the interface of `rlinf_envs.BatchedEnv`: for
simulators that simulate all rows at once.
Each connection has a process of its own, which creates as many environments as the client asks for and ends with the
connection. So the client gets rid of a simulator that hangs by connecting again.

Protocol, all numbers big-endian:

* Proof, in which no side sends the secret (HMAC-SHA256 over 16 random bytes of each, as in ISO/IEC 9798-4):
  the server sends MAGIC and its random bytes; the client MAGIC, its own, and HMAC(secret, "client" + both); the server
  HMAC(secret, "server" + both). The last byte of MAGIC is the version of the protocol.
* Messages: a length of 8 bytes and so many bytes of MessagePack. An array is the extension type 1: its numpy dtype in 4
  bytes ("<f4" and a zero), the number of axes in 1 byte, each length in 8 bytes, and the elements in C order.
* The client sends {"call": name, ...}, a method of `ServedRows` and its arguments, or of `ServedBatch` after `make` has
  created one. The server answers {"answer": ...}, or {"error": text, "row": int, "trace": str}.
"""

from __future__ import annotations

import argparse
import hmac
import importlib
import importlib.util
import inspect
import multiprocessing
import os
import queue
import secrets
import select
import signal
import socket
import stat
import struct
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgpack
import numpy as np

MAGIC = b"rlenvs\x00\x02"
NONCE_BYTES = 16
PROOF_BYTES = 32
PROOF_TIMEOUT_S = 5.0
MIN_SECRET_CHARACTERS = 32
SECRET_FILE = os.path.join("~", ".config", "rlinf", "remote-secret")
"""Default of the server and of the client."""
MAX_CALL_BYTES = 64 << 20
"""Of a message to the server: actions of a chunk, or of the episodes to be replayed."""
MAX_ANSWER_BYTES = 1 << 30
"""Of a message to the client: the pictures of all rows, twice."""
MAX_CONNECTIONS = 64
END_PATIENCE_S = 5.0
"""Time that a simulator has to close when its client is gone."""
KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}
"""A host that vanishes is noticed after 11 s."""
PEER_CLOSED = 0x2000
"""POLLRDHUP of <poll.h>, which Python's `select` does not name."""
PR_SET_PDEATHSIG = 1
"""<linux/prctl.h>"""
ARRAY = 1
"""MessagePack extension type of arrays."""
ARRAY_KINDS = "biuf"
"""Kinds of numpy dtypes that are sent; never objects, whose bytes are pointers or pickles."""


class WireError(ConnectionError):
    """The other side is gone, or what it sent is not of this protocol."""


# -- messages ----------------------------------------------------------------------------------------------------------


def packed(message: Any) -> bytes:
    """Encodes a message; tuples become lists. Raises: TypeError for a value that is no plain one."""
    data = msgpack.packb(message, default=_packed_array)
    assert data is not None, "only packing into a stream returns nothing"
    return data


def unpacked(data: Any) -> Any:
    """Decodes a message; lists become tuples, and arrays are read-only. Raises: WireError."""
    try:
        return msgpack.unpackb(data, ext_hook=_unpacked_array, raw=False, strict_map_key=True, use_list=False)
    except Exception as error:
        raise WireError(f"a message cannot be decoded: {error}") from error


def _packed_array(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if not isinstance(value, np.ndarray) or value.dtype.kind not in ARRAY_KINDS:
        kind = value.dtype if isinstance(value, np.ndarray) else type(value).__name__
        raise TypeError(f"cannot send a value of type {kind}; numbers, texts and arrays of numbers can be sent")
    head = struct.pack(f">4sB{value.ndim}Q", value.dtype.str.encode(), value.ndim, *value.shape)
    return msgpack.ExtType(ARRAY, head + value.tobytes())


def _unpacked_array(code: int, data: bytes) -> np.ndarray:
    if code != ARRAY:
        raise ValueError(f"unknown extension type {code}")
    name, num_axes = struct.unpack_from(">4sB", data)
    dtype = np.dtype(name.rstrip(b"\0").decode("ascii"))
    if dtype.kind not in ARRAY_KINDS:
        raise ValueError(f"an array of dtype {dtype}")
    shape = struct.unpack_from(f">{num_axes}Q", data, 5)
    return np.frombuffer(data, dtype, offset=5 + 8 * num_axes).reshape(shape)


def send_message(connected: socket.socket, message: Any) -> None:
    """Raises: OSError if the other side is gone."""
    data = packed(message)
    connected.sendall(struct.pack(">Q", len(data)) + data if len(data) < 4096 else struct.pack(">Q", len(data)))
    if len(data) >= 4096:
        connected.sendall(data)


def receive_message(connected: socket.socket, limit_bytes: int) -> Any:
    """Raises: OSError if the other side is gone; WireError for more bytes than the limit, or no message."""
    (length,) = struct.unpack(">Q", receive_exactly(connected, 8))
    if length > limit_bytes:
        raise WireError(f"a message of {length} bytes; the limit is {limit_bytes}")
    return unpacked(receive_exactly(connected, length))


def receive_exactly(connected: socket.socket, num_bytes: int) -> bytearray:
    """Raises: OSError if the other side is gone."""
    data = bytearray(num_bytes)
    view = memoryview(data)
    num_received = 0
    while num_received < num_bytes:
        count = connected.recv_into(view[num_received:])
        if not count:
            raise WireError("the other side closed the connection")
        num_received += count
    return data


# -- the secret --------------------------------------------------------------------------------------------------------


def read_secret(path: str, create: bool = False) -> bytes:
    """Returns the secret in a file that only its owner can read.

    Raises: ValueError if there is none, others can read it, or it is short.
    """
    path = os.path.expanduser(path)
    if create and not os.path.exists(path):
        os.makedirs(os.path.dirname(path) or ".", mode=0o700, exist_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32) + "\n")
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        raise ValueError(
            f"the secret {path} cannot be read: {error.strerror}; the server of the simulator writes it when it "
            "starts, and a client on another machine needs a copy (chmod 600)"
        ) from error
    with open(descriptor) as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid not in (os.geteuid(), 0) or status.st_mode & 0o077:
            raise ValueError(f"the secret {path} must be a file that only you can read (chmod 600)")
        text = file.read().strip()
    if len(text) < MIN_SECRET_CHARACTERS:
        raise ValueError(f"the secret in {path} has {len(text)} characters; use {MIN_SECRET_CHARACTERS} or more")
    return text.encode()


def _proof(secret: bytes, side: bytes, server_nonce: bytes, client_nonce: bytes) -> bytes:
    return hmac.new(secret, side + server_nonce + client_nonce, "sha256").digest()


def prove_as_client(connected: socket.socket, secret: bytes) -> None:
    """Raises: OSError if the server has another secret, or does not answer in time."""
    connected.settimeout(PROOF_TIMEOUT_S)
    greeting = bytes(receive_exactly(connected, len(MAGIC) + NONCE_BYTES))
    if greeting[: len(MAGIC)] != MAGIC:
        raise WireError("what answers is no simulator server of this version")
    theirs, own = greeting[len(MAGIC) :], os.urandom(NONCE_BYTES)
    connected.sendall(MAGIC + own + _proof(secret, b"client", theirs, own))
    try:
        answer = bytes(receive_exactly(connected, PROOF_BYTES))
    except WireError as error:
        raise WireError("the server refuses the connection: its secret is another one, or it is full") from error
    if not hmac.compare_digest(answer, _proof(secret, b"server", theirs, own)):
        raise WireError("the server does not know the secret")
    connected.settimeout(None)


def prove_as_server(connected: socket.socket, secret: bytes) -> None:
    """Raises: OSError if the client has another secret, or does not prove it in time."""
    connected.settimeout(PROOF_TIMEOUT_S)
    own = os.urandom(NONCE_BYTES)
    connected.sendall(MAGIC + own)
    greeting = bytes(receive_exactly(connected, len(MAGIC) + NONCE_BYTES + PROOF_BYTES))
    theirs = greeting[len(MAGIC) : len(MAGIC) + NONCE_BYTES]
    is_known = hmac.compare_digest(greeting[-PROOF_BYTES:], _proof(secret, b"client", own, theirs))
    if greeting[: len(MAGIC)] != MAGIC or not is_known:
        raise WireError("a client without the secret")
    connected.sendall(_proof(secret, b"server", own, theirs))
    connected.settimeout(None)


def set_options(connected: socket.socket) -> None:
    """Sends small messages at once, and notices a host that vanishes."""
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


# -- environments ------------------------------------------------------------------------------------------------------


class RowFailed(Exception):
    """An environment raised an error, the cause of this one."""

    def __init__(self, row: int, doing: str) -> None:
        super().__init__(doing)
        self.row, self.doing = row, doing


class ServedRows:
    """The environments of one connection; its public methods are the calls of the protocol.

    A row whose episode ends begins the next one at once, with the seed in `next_seeds`; if that is None, it rests until
    `begin`. The observation of a row at rest is None.
    """

    def __init__(self, place: str) -> None:
        self._place = place
        self._envs: Sequence[Any] = ()
        self._counts: list = []
        """Actions of each row's current episode; None: it rests."""
        self._limit: Any = None
        self._ignores_terminations = False
        self.batch: Any = None
        """The `ServedBatch` in place of these rows, if the callable returns one."""

    def describe(self) -> Mapping[str, Any]:
        """Returns what is served here, without creating it."""
        versions = {"python": "{}.{}.{}".format(*sys.version_info[:3]), "numpy": np.__version__}
        return {"name": self._place, "versions": versions}

    def make(
        self, num_envs: int, max_episode_steps: Any, ignore_terminations: bool, options: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Creates the environments and returns their spaces, or what a batch says of itself."""
        create = _callable_at(self._place)
        if "num_envs" in inspect.signature(create).parameters:
            limits = {"max_episode_steps": max_episode_steps, "ignore_terminations": ignore_terminations or None}
            options = dict(options, **{name: value for name, value in limits.items() if value is not None})
            self.batch = ServedBatch(create(num_envs=num_envs, **options), num_envs)
            return {"batch": self.batch.description()}
        self._envs = [create(**options) for _ in range(num_envs)]
        self._counts = [None] * num_envs
        first = self._envs[0]
        spec = getattr(first, "spec", None)
        self._limit = max_episode_steps or getattr(spec, "max_episode_steps", None)
        self._ignores_terminations = ignore_terminations
        return {
            "action_space": space_description(first.action_space, "action_space"),
            "observation_space": space_description(first.observation_space, "observation_space"),
            "max_episode_steps": self._limit,
        }

    def reset(self, seeds: Sequence[int]) -> Mapping[str, Any]:
        """Begins an episode in each row and returns the observations."""
        return {"observations": [plain(self._begin(row, seed)) for row, seed in enumerate(seeds)]}

    def begin(self, rows: Sequence[int], seeds: Sequence[int], alone: bool) -> Mapping[str, Any]:
        """Begins an episode in these rows and returns their observations. `alone`: the other rows rest from now on."""
        if alone:
            self._counts = [None] * len(self._envs)
        return {"observations": [plain(self._begin(row, seeds[number])) for number, row in enumerate(rows)]}

    def step_chunk(self, actions: np.ndarray, next_seeds: Sequence[Any]) -> Mapping[str, Any]:
        """Executes actions [N, C, *shape] until they are used up or the episode ends, row by row."""
        rewards = np.zeros(actions.shape[:2], np.float64)
        successes = np.full(actions.shape[:2], -1, np.int8)
        num_steps = np.zeros(len(actions), np.int64)
        ended = {"terminated": np.zeros(len(actions), bool), "truncated": np.zeros(len(actions), bool)}
        observations, finals = [], []
        for row, chunk in enumerate(actions):
            observation = None
            for position, action in enumerate(() if self._counts[row] is None else chunk):
                observation, reward, terminated, truncated, success = self._step(row, action)
                rewards[row, position], successes[row, position] = reward, success
                num_steps[row] += 1
                if terminated or truncated:
                    ended["terminated"][row], ended["truncated"][row] = terminated, truncated
                    finals.append((row, plain(observation)))
                    observation = self._followed(row, next_seeds[row])
                    break
            observations.append(None if self._counts[row] is None else plain(observation))
        return dict(
            ended,
            rewards=rewards,
            successes=successes,
            num_steps=num_steps,
            observations=observations,
            finals=finals,
        )

    def restore(self, seeds: Sequence[Any], actions: Sequence[np.ndarray]) -> Mapping[str, Any]:
        """Begins an episode in each row and replays its actions [t, *shape]; returns their rewards too. A row without a
        seed rests."""
        observations = []
        rewards = [np.zeros(len(chunk), np.float64) for chunk in actions]
        successes = [np.full(len(chunk), -1, np.int8) for chunk in actions]
        for row, seed in enumerate(seeds):
            observation = self._followed(row, seed)
            for position, action in enumerate(actions[row]):
                observation, reward, terminated, truncated, success = self._step(row, action)
                rewards[row][position], successes[row][position] = reward, success
                if terminated or truncated:
                    raise ValueError(f"row {row} ended after {position + 1} replayed actions")
            observations.append(None if seed is None else plain(observation))
        return {"observations": observations, "rewards": rewards, "successes": successes}

    def render(self) -> np.ndarray:
        """Returns pictures of all rows, [N, H, W, 3] uint8."""
        pictures = [np.asarray(_rendered(env)) for env in self._envs]
        if any(one.dtype != np.uint8 or one.shape[2:] != (3,) for one in pictures):
            raise ValueError("render() gave no uint8 pictures [H, W, 3]")
        return np.stack(pictures)

    def close(self) -> None:
        """Closes the environments."""
        for env in self._envs:
            if hasattr(env, "close"):
                env.close()

    def _followed(self, row: int, seed: Any) -> Any:
        """Begins the episode with this seed, or lets the row rest if there is none."""
        if seed is not None:
            return self._begin(row, seed)
        self._counts[row] = None
        return None

    def _begin(self, row: int, seed: int) -> Any:
        env = self._envs[row]
        try:
            if _takes_seed(env.reset):
                returned = env.reset(seed=seed)
            else:  # the Gym before Gymnasium
                env.seed(seed)
                returned = env.reset()
        except Exception as error:
            raise RowFailed(row, f"reset(seed={seed})") from error
        self._counts[row] = 0
        has_facts = isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], dict)
        return returned[0] if has_facts else returned

    def _step(self, row: int, action: np.ndarray) -> Any:
        """Returns observation, reward, terminated, truncated, success (-1: unknown)."""
        env, count = self._envs[row], self._counts[row]
        try:
            returned = env.step(_native(action, env.action_space))
            if len(returned) == 5:
                observation, reward, terminated, truncated, facts = returned
            else:  # the Gym before Gymnasium
                observation, reward, done, facts = returned
                truncated = bool(facts.get("TimeLimit.truncated", False))
                terminated = done and not truncated
            reward, terminated, truncated = (np.asarray(one).item() for one in (reward, terminated, truncated))
            success = facts.get("success", facts.get("is_success"))
            success = -1 if success is None else int(bool(np.asarray(success).item()))
        except Exception as error:
            raise RowFailed(row, f"step {count} of its episode") from error
        self._counts[row] = count + 1
        terminated = bool(terminated) and not self._ignores_terminations
        at_limit = self._limit is not None and count + 1 >= self._limit
        return observation, float(reward), terminated, (bool(truncated) or at_limit) and not terminated, success


class ServedBatch:
    """A batch with the interface of `rlinf_envs.BatchedEnv`; its public methods are the calls of the protocol."""

    def __init__(self, env: Any, num_envs: int) -> None:
        lacks = [name for name in BATCH_PROPERTIES + BATCH_METHODS if not hasattr(env, name)]
        if lacks:
            raise TypeError("{} is no batch of environments: it lacks {}".format(type(env).__name__, ", ".join(lacks)))
        if env.num_envs != num_envs:
            raise ValueError(f"num_envs={num_envs} was asked for, and the batch has {env.num_envs}")
        self._env = env

    def description(self) -> Mapping[str, Any]:
        """Returns the specs of the batch, and what it can do."""
        actions, fields = self._env.action_spec, self._env.observation_spec
        return {
            "actions": {"kind": actions.kind, "low": plain(actions.low), "high": plain(actions.high)},
            "fields": {name: (list(one.shape), one.dtype, list(one.texts)) for name, one in fields.items()},
            "max_episode_steps": self._env.max_episode_steps,
            "notes": list(self._env.notes),
            "is_replayable": hasattr(self._env, "restore"),
            "begins_rows": hasattr(self._env, "begin") and bool(getattr(self._env, "begins_rows", True)),
        }

    def reset(self, seeds: Sequence[int]) -> Mapping[str, Any]:
        """Begins an episode in each row and returns the observation."""
        return _fields(self._env.reset(list(seeds)))

    def begin(self, rows: Sequence[int], seeds: Sequence[int], alone: bool) -> Mapping[str, Any]:
        """Begins an episode in these rows and returns their observations."""
        pairs = {row: seeds[number] for number, row in enumerate(rows)}
        return _fields(self._env.begin(pairs, alone=alone))

    def step(self, actions: np.ndarray) -> Mapping[str, Any]:
        """Executes an action in each row, [N, *shape]."""
        return self._result(self._env.step(_tensor(actions)))

    def step_chunk(self, actions: np.ndarray) -> Mapping[str, Any]:
        """Executes actions [N, C, *shape]."""
        return self._result(self._env.step_chunk(_tensor(actions)))

    def restore(self, rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Returns to the middle of episodes; a row has the fields of `rlinf_envs.RowSnapshot`."""
        snapshots = [types.SimpleNamespace(**dict(row, actions=_tensor(row["actions"]), rewards=None)) for row in rows]
        return _fields(self._env.restore(snapshots))

    def render(self) -> np.ndarray:
        """Returns pictures of all rows, [N, H, W, 3] uint8."""
        return plain(self._env.render())

    def close(self) -> None:
        self._env.close()

    @staticmethod
    def _result(result: Any) -> Mapping[str, Any]:
        answer = {name: plain(getattr(result, name)) for name in ("rewards", "terminated", "truncated", "num_steps")}
        answer["observation"] = _fields(result.observation)
        answer["final_observation"] = _fields(result.final_observation) if result.episodes else None
        answer["episodes"] = [{name: getattr(end, name) for name in END_FIELDS} for end in result.episodes]
        return answer


BATCH_PROPERTIES = ("num_envs", "action_spec", "observation_spec", "max_episode_steps", "notes")
BATCH_METHODS = ("reset", "step", "step_chunk", "render", "close")
"""Of `rlinf_envs.BatchedEnv`."""
END_FIELDS = ("env_index", "episode_index", "seed", "return_", "length", "success_once", "success_at_end", "task")
"""Of `rlinf_envs.EpisodeEnd`."""


def _fields(observation: Mapping[str, Any]) -> Mapping[str, Any]:
    """An observation whose texts are lists."""
    return {name: list(one) if isinstance(one, (list, tuple)) else plain(one) for name, one in observation.items()}


def _tensor(values: np.ndarray) -> Any:
    """A copy as a tensor, which batches take."""
    import torch

    return torch.from_numpy(np.array(values))


def plain(value: Any) -> Any:
    """Copies an observation as dicts, texts and arrays that can be sent; simulators reuse their buffers."""
    if isinstance(value, Mapping):
        return {str(key): plain(part) for key, part in value.items()}
    if isinstance(value, str):
        return value
    if hasattr(value, "detach"):  # a torch tensor, on any device
        value = value.detach().cpu().numpy()
    return np.array(value)


def space_description(space: Any, name: str) -> Mapping[str, Any]:
    """Describes a space of Gymnasium or of the Gym before it. Raises: TypeError for another kind of space."""
    kind = next((base.__name__ for base in type(space).__mro__ if base.__name__ in SPACES), "")
    if not kind:
        raise TypeError("{} is a {}; allowed: {}".format(name, type(space).__name__, ", ".join(SPACES)))
    return dict(SPACES[kind](space, name), kind=kind)


def _parts_of(space: Any, name: str) -> Mapping[str, Any]:
    parts = space.spaces.items()
    return {"parts": [(str(key), space_description(part, f"{name}[{key!r}]")) for key, part in parts]}


SPACES: Mapping[str, Callable[[Any, str], Mapping[str, Any]]] = {
    "Box": lambda space, _: {"low": space.low, "high": space.high, "dtype": np.dtype(space.dtype).str},
    "Discrete": lambda space, _: {"n": int(space.n), "start": int(getattr(space, "start", 0))},
    "MultiDiscrete": lambda space, _: {
        "nvec": np.asarray(space.nvec, np.int64),
        "start": np.asarray(getattr(space, "start", np.zeros_like(space.nvec)), np.int64),
    },
    "MultiBinary": lambda space, _: {"shape": [int(length) for length in space.shape]},
    "Text": lambda space, _: {"max_length": int(space.max_length)},
    "Dict": _parts_of,
}
"""Kind -> its description."""


def _native(action: np.ndarray, space: Any) -> Any:
    is_choice = any(base.__name__ == "Discrete" for base in type(space).__mro__)
    return int(action) if is_choice else np.array(action, dtype=space.dtype)


def _takes_seed(reset: Callable[..., Any]) -> bool:
    parameters = inspect.signature(reset).parameters
    return "seed" in parameters or any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())


def _rendered(env: Any) -> Any:
    if getattr(env, "render_mode", None) is not None or "mode" not in inspect.signature(env.render).parameters:
        return env.render()
    return env.render(mode="rgb_array")


def _callable_at(place: str) -> Callable[..., Any]:
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def _check_module(place: str) -> None:
    """Raises: ValueError if the module of an environment is missing. It is not imported here: simulators are large."""
    module, _, name = place.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # the processes of connections have the same path
    if not name or importlib.util.find_spec(module) is None:
        raise ValueError(f"{place!r} names no callable as module:callable in the current folder or on the path")


# -- the server --------------------------------------------------------------------------------------------------------


def _simulate(connected: socket.socket, place: str) -> None:
    """Main function of the process of one connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server ends its processes
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    rows = ServedRows(place)
    try:
        while True:
            message = dict(receive_message(connected, MAX_CALL_BYTES))
            send_message(connected, _answer(rows, message))
    except OSError:  # the client is gone
        (rows.batch or rows).close()


def _answer(rows: ServedRows, message: Any) -> Mapping[str, Any]:
    name = str(message.pop("call", ""))
    served = rows.batch or rows
    try:
        if name.startswith("_") or not callable(getattr(type(served), name, None)):
            raise ValueError(f"there is no call {name!r}")
        return {"answer": getattr(served, name)(**message)}
    except RowFailed as error:
        text = f"{error.doing} failed: {type(error.__cause__).__name__}: {error.__cause__}"
        return {"error": text, "row": error.row, "trace": traceback.format_exc()}
    except Exception as error:  # noqa: BLE001 - the client raises it
        text = f"{name} failed: {type(error).__name__}: {error}"
        row = int(getattr(error, "env_index", 0))  # an EnvCrashedError of rlinf_envs has one
        return {"error": text, "row": row, "trace": traceback.format_exc()}


class SimulatorServer:
    """Listens, lets in clients that know the secret, and starts a process for each.

    Args:
        place: "module:callable" of the environment.
        port: 0: any free one.
    """

    def __init__(self, place: str, host: str, port: int, secret: bytes, max_connections: int) -> None:
        self._place, self._secret, self._max_connections = place, secret, max_connections
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listening = socket.socket(family)
        self._listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._listening.bind((host, port))
        self._listening.listen(16)
        self.address = self._listening.getsockname()[:2]
        self._admitted: queue.Queue = queue.Queue()
        self._wake, self._woken = socket.socketpair()
        self._proving = threading.BoundedSemaphore(16)
        """Limits the threads in which clients prove the secret."""
        self._poll = select.poll()
        self._running: dict = {}
        """Descriptor of a connection -> connection, process. The connection stays open here too, so that the end of its
        client is noticed while the process hangs."""
        self._leaving: dict = {}
        """Descriptor -> when its process is killed, for clients that are gone."""

    def serve(self) -> None:
        """Serves until it is interrupted."""
        self._poll.register(self._listening, select.POLLIN)
        self._poll.register(self._woken, select.POLLIN)
        try:
            while True:
                for descriptor, _ in self._poll.poll(1000):
                    if descriptor == self._listening.fileno():
                        self._accept()
                    elif descriptor == self._woken.fileno():
                        self._woken.recv(64)
                    elif descriptor in self._running:
                        self._poll.unregister(descriptor)
                        self._leaving[descriptor] = time.monotonic() + END_PATIENCE_S
                while not self._admitted.empty():
                    self._start(self._admitted.get())
                self._clean_up()
        finally:
            for connected, process in self._running.values():
                process.kill()
                connected.close()

    def _accept(self) -> None:
        connected, _ = self._listening.accept()
        if len(self._running) >= self._max_connections or not self._proving.acquire(blocking=False):
            connected.close()
            return
        threading.Thread(target=self._admit, args=(connected,), daemon=True).start()

    def _admit(self, connected: socket.socket) -> None:
        try:
            set_options(connected)
            prove_as_server(connected, self._secret)
            self._admitted.put(connected)
            self._wake.send(b".")
        except OSError as error:
            print(f"refused a connection: {error}", file=sys.stderr, flush=True)
            connected.close()
        finally:
            self._proving.release()

    def _start(self, connected: socket.socket) -> None:
        """Starts a process in the main thread, which lives as long as this process."""
        context = multiprocessing.get_context("spawn")
        process = context.Process(target=_simulate, args=(connected, self._place))
        process.start()
        self._running[connected.fileno()] = connected, process
        self._poll.register(connected, PEER_CLOSED)
        self._poll.register(process.sentinel, select.POLLIN)

    def _clean_up(self) -> None:
        """Kills the processes of clients that are gone, and closes the connections of processes that have ended."""
        for descriptor, (connected, process) in list(self._running.items()):
            if self._leaving.get(descriptor, float("inf")) < time.monotonic():
                process.kill()
                process.join()
            if not process.is_alive():
                self._poll.unregister(process.sentinel)
                if self._leaving.pop(descriptor, None) is None:
                    self._poll.unregister(descriptor)
                del self._running[descriptor]
                connected.close()


def main() -> None:
    """`python -m rlinf_envs.remote MODULE:CALLABLE`."""
    parser = argparse.ArgumentParser(prog="remote.py", description="Serves a simulator to env.kind: remote of RLinf.")
    parser.add_argument("environment", metavar="MODULE:CALLABLE", help="creates one environment, or num_envs of them")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    parser.add_argument("--port", type=int, default=7000, help="0: any free one (default: 7000)")
    parser.add_argument("--secret-file", default=SECRET_FILE, help="created if missing (default: %(default)s)")
    parser.add_argument("--max-connections", type=int, default=MAX_CONNECTIONS, help="(default: %(default)s)")
    args = parser.parse_args()
    try:
        _check_module(args.environment)
        secret = read_secret(args.secret_file, create=True)
    except (ImportError, ValueError) as error:
        parser.error(str(error))
    server = SimulatorServer(args.environment, args.host, args.port, secret, args.max_connections)
    host, port = server.address
    print(f"serving {args.environment} at {host}:{port}; the secret is in {args.secret_file}", flush=True)
    if not host.startswith("127.") and host not in ("::1", "localhost"):
        print("other machines can connect; what is sent is not encrypted (docs/security.md)", file=sys.stderr)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        server.serve()
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main()
