"""What a weight link has to do, as functions that raise AssertionError. Each takes the class and its options:

    @pytest.mark.parametrize("check", CHECKS)
    def test_my_link_conforms(check):
        check(MyLink)

    def test_it_refuses_a_flipped_byte():
        check_a_flipped_byte(MyLink, flip)

The class stands at the top of a module: senders are in this process, receivers in another one, which gets its ports
through the codec, as workers do.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from rlinf_comm import codec
from rlinf_comm.errors import WeightMismatchError, WeightTimeout
from rlinf_comm.weights import Layout, ReshardPlan, TensorSpec, plan
from rlinf_workers.links.base import WeightLink, WeightPort
from rlinf_workers.registry import WEIGHT_LINKS

MakeLink = Callable[..., WeightLink]

SPECS = {"a": TensorSpec((5, 4), "float32"), "b": TensorSpec((6,), "int64")}
WHOLE, EACH = Layout.replicated(SPECS, 1), Layout.replicated(SPECS, 2)
ROWS, COLUMNS = Layout.sharded(SPECS, 2), Layout.sharded(SPECS, 2, dim=1)
HALVED = Layout.replicated(SPECS, 2, dtype="bfloat16")
"""The server rounds."""
START_S = 60.0
SHORT_S = 0.3


def check_versions(make: MakeLink, **options: Any) -> None:
    """Each version arrives as it was when it was published, in the server's own tensors. A publication waits for
    nobody who has taken the versions before."""
    with _Edge(make, WHOLE, EACH, options) as edge:
        for version in (0, 1, 5):
            tensors = _whole(version)
            edge.senders[0].publish(tensors, version)
            for tensor in tensors.values():
                tensor.zero_()
            for found in edge.receive(version):
                _equal(found, _whole(version), f"version {version}")


def check_a_missing_version(make: MakeLink, **options: Any) -> None:
    """A receiver waits as long as it was told to, says what it waited for, and can be asked again."""
    with _Edge(make, ROWS, WHOLE, options) as edge:
        edge.publish(ROWS, 1)
        edge.receive(1)
        edge.senders[0].publish(_parts(ROWS, 7)[0], 7)
        start_s = time.monotonic()
        name, text = edge.refused(7, SHORT_S)
        assert name == WeightTimeout.__name__, f"half of a version came, and receive() raised {name}: {text}"
        assert time.monotonic() - start_s >= SHORT_S, "receive() did not wait"
        assert "edge" in text and "version 7" in text, f"the message does not name edge and version: {text}"
        edge.senders[1].publish(_parts(ROWS, 7)[1], 7)
        _equal(edge.receive(7)[0], _whole(7), "the version that came late")


def check_layouts(make: MakeLink, **options: Any) -> None:
    """Shards become whole tensors, whole tensors shards, and shards others; the server's dtype is its own."""
    for source, target in ((ROWS, EACH), (EACH, COLUMNS), (COLUMNS, ROWS), (ROWS, HALVED)):
        with _Edge(make, source, target, options) as edge:
            edge.publish(source, 3)
            for found, expected in zip(edge.receive(3), _parts(target, 3), strict=True):
                _equal(found, expected, "after resharding")


CHECKS: tuple[Callable[..., None], ...] = (check_versions, check_a_missing_version, check_layouts)


def check_a_flipped_byte(make: MakeLink, flip: Callable[[Any], None], **options: Any) -> None:
    """What is not as it was published is refused, and the next version is taken.

    Args:
        flip: given the driver's link when version 1 of a whole tensor is out, changes a byte of it on the way.
    """
    with _Edge(make, WHOLE, WHOLE, options) as edge:
        edge.publish(WHOLE, 1)
        flip(edge.link)
        name, text = edge.refused(1, START_S)
        assert name == WeightMismatchError.__name__, f"a flipped byte was answered with {name}: {text}"
        edge.publish(WHOLE, 2)
        _equal(edge.receive(2)[0], _whole(2), "the version after a flipped byte")


class _Edge:
    """A link with its senders here and its receivers in a process of their own."""

    def __init__(self, make: MakeLink, source: Layout, target: Layout, options: Mapping[str, Any]) -> None:
        reshard = plan(source, target)
        self.link = make("edge", reshard, **options)
        path = f"{make.__module__}:{make.__qualname__}"
        self.senders = [
            WEIGHT_LINKS.get(path).open_sender(_crossed(self._port("send", rank, reshard, path)))
            for rank in range(source.num_ranks)
        ]
        context = multiprocessing.get_context("spawn")
        self._server, theirs = context.Pipe()
        ports = [codec.pack(self._port("receive", rank, reshard, path)) for rank in range(target.num_ranks)]
        self._process = context.Process(target=_serve, args=(theirs, ports, target), daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> _Edge:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()

    def _port(self, side: Any, rank: int, reshard: ReshardPlan, path: str) -> WeightPort:
        return WeightPort(edge="edge", side=side, rank=rank, reshard=reshard, link=path, address=self.link.address)

    def publish(self, layout: Layout, version: int) -> None:
        for sender, tensors in zip(self.senders, _parts(layout, version), strict=True):
            sender.publish(tensors, version)

    def receive(self, version: int) -> list[dict[str, Tensor]]:
        """What each serving rank holds then."""
        found = self._ask(version, START_S)
        assert isinstance(found, list), f"version {version} was not taken: {found}"
        return found

    def refused(self, version: int, timeout_s: float) -> tuple[str, str]:
        """The error of the first serving rank."""
        found = self._ask(version, timeout_s)
        assert isinstance(found, tuple), f"version {version} was taken"
        return found

    def _ask(self, version: int, timeout_s: float) -> Any:
        self._server.send((version, timeout_s))
        return codec.unpack(self._server.recv())


def _serve(driver: Connection, ports: Sequence[bytes], layout: Layout) -> None:
    """The serving process: answers (version, timeout) with the tensors of all its ranks, or with an error."""
    opened = [codec.unpack(port) for port in ports]
    receivers = [WEIGHT_LINKS.get(port.link).open_receiver(port) for port in opened]
    held = [{name: torch.zeros_like(part) for name, part in parts.items()} for parts in _parts(layout, 0)]
    while True:
        version, timeout_s = driver.recv()
        try:
            for receiver, tensors in zip(receivers, held, strict=True):
                receiver.receive(tensors, version, timeout_s)
        except Exception as error:  # noqa: BLE001 - told to the check
            driver.send(codec.pack((type(error).__name__, str(error))))
        else:
            driver.send(codec.pack(held))


def _crossed(port: WeightPort) -> WeightPort:
    return codec.unpack(codec.pack(port))


def _whole(version: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {"a": torch.randn(5, 4, generator=generator), "b": torch.arange(6) + 100 * version}


def _parts(layout: Layout, version: int) -> list[dict[str, Tensor]]:
    """What each rank holds of a version."""
    whole, parts = _whole(version), []
    for rank in layout.ranks:
        mine: dict[str, Tensor] = {}
        for block in rank.blocks:
            ends = zip(block.box.start, block.box.shape, strict=True)
            part = whole[block.name][tuple(slice(start, start + length) for start, length in ends)]
            mine[block.name] = part.to(getattr(torch, rank.buffers[block.buffer].dtype)).clone()
        parts.append(mine)
    return parts


def _equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], what: str) -> None:
    assert found.keys() == expected.keys(), f"{what}: {sorted(found)}, not {sorted(expected)}"
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), f"{what}: {name} is {found[name]}, not {tensor}"
