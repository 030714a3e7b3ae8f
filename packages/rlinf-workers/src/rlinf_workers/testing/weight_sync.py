"""The conformance suite of weight syncs: functions that raise AssertionError. Each takes the class and its options:

    @pytest.mark.parametrize("check", CHECKS)
    def test_my_sync_conforms(check):
        check(MySync)

    def test_it_refuses_a_flipped_byte():
        check_a_flipped_byte(MySync, flip)

The class must be at the top of a module: senders are in this process, receivers in a worker's, and both get their ports
through the codec.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from torch import Tensor

from rlinf_algos import path_of
from rlinf_comm import WeightMismatchError, WeightTimeout, pack, unpack
from rlinf_comm.weights import Layout, TensorSpec, execute, reshard_plan, specs_of
from rlinf_workers.errors import RemoteError
from rlinf_workers.group import WorkerGroup
from rlinf_workers.launchers.local.launcher import LocalLauncher
from rlinf_workers.plugins import WEIGHT_SYNCS
from rlinf_workers.testing.launchers import launched, start
from rlinf_workers.weight_sync.base import FinishReads, WeightPort, WeightSender, WeightSync
from rlinf_workers.worker import Worker

MakeWeightSync = Callable[..., WeightSync]

SPECS = {"a": TensorSpec((5, 4), "float32"), "b": TensorSpec((6,), "int64")}
WHOLE, EACH = Layout.replicated(SPECS, 1), Layout.replicated(SPECS, 2)
ROWS, COLUMNS = Layout.sharded(SPECS, 2), Layout.sharded(SPECS, 2, dim=1)
HALVED = Layout.replicated(SPECS, 2, dtype="bfloat16")
"""The server's dtype differs, so values are rounded."""
START_S = 300.0
SHORT_S = 0.3


def check_versions(make: MakeWeightSync, **options: Any) -> None:
    """Each version arrives as published, in the server's own tensors: shards become whole tensors, whole tensors
    shards, and shards other shards, in the server's dtype. A publication waits for nobody who has received the earlier
    versions."""
    for source, target in ((WHOLE, EACH), (ROWS, EACH), (EACH, COLUMNS), (COLUMNS, ROWS), (ROWS, HALVED)):
        with _edge(make, source, target, options) as edge:
            for version in (0, 1, 5):
                edge.publish(version)
                edge.check_arrives(version)


def check_a_missing_version(make: MakeWeightSync, **options: Any) -> None:
    """A receiver waits for its timeout, names what it waited for, and can be called again."""
    with _edge(make, ROWS, WHOLE, options) as edge:
        edge.publish(1)
        edge.check_arrives(1)
        edge.publish(7, ranks=[0])
        start_s = time.monotonic()
        text = edge.refusal(7, WeightTimeout, SHORT_S)
        assert time.monotonic() - start_s >= SHORT_S, "receive() did not wait"
        assert "edge" in text and "version 7" in text, f"the message does not name edge and version: {text}"
        edge.publish(7, ranks=[1])
        edge.check_arrives(7)


def check_lasting_tensors(make: MakeWeightSync, **options: Any) -> None:
    """A trainer that reuses its tensors: each version arrives as published, whether the server receives it before they
    change or after."""
    with _edge(make, ROWS, COLUMNS, options) as edge:
        for version in range(4):
            edge.publish_lasting(version)
            edge.check_arrives(version)
        for version in range(4, 7):
            edge.publish_lasting(version)
            edge.before_change()
            for tensors in edge.lasting:
                for tensor in tensors.values():
                    tensor.zero_()
            edge.check_arrives(version)


CHECKS: tuple[Callable[..., None], ...] = (check_versions, check_lasting_tensors, check_a_missing_version)


def check_a_flipped_byte(make: MakeWeightSync, flip: Callable[[Any], None], **options: Any) -> None:
    """Bytes that differ from what was published are refused, and the next version is received.

    Args:
        flip: called with the driver's sync when version 1 of a whole tensor is published; changes one of its bytes in
            transit.
    """
    with _edge(make, WHOLE, WHOLE, options) as edge:
        edge.publish(1)
        flip(edge.sync)
        edge.refusal(1, WeightMismatchError, START_S)
        edge.publish(2)
        edge.check_arrives(2)


def parts_of(whole: Mapping[str, Tensor], layout: Layout) -> list[dict[str, Tensor]]:
    """The buffers of each rank of a layout, filled from whole tensors."""
    parts = [
        {name: torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype)) for name, spec in rank.buffers.items()}
        for rank in layout.ranks
    ]
    execute(reshard_plan(Layout.replicated(specs_of(whole), 1), layout), [whole], parts)
    return parts


class Server(Worker):
    """All serving ranks of an edge."""

    def open(self, ports: list[WeightPort], layout: Layout) -> None:
        self._receivers = [WEIGHT_SYNCS.get(port.weight_sync).open_receiver(port) for port in ports]
        self._held = parts_of(_whole(0), layout)

    def receive(self, version: int, timeout_s: float) -> list[dict[str, Tensor]]:
        """The tensors that each rank then holds."""
        for receiver, tensors in zip(self._receivers, self._held, strict=True):
            check = receiver.receive(tensors, version, timeout_s)
            if check is not None:
                check()
        return self._held


@dataclass
class _Edge:
    """A sync with its senders in this process and its receivers in another."""

    sync: WeightSync
    source: Layout
    target: Layout
    senders: list[WeightSender]
    server: WorkerGroup
    lasting: list[dict[str, Tensor]] = field(default_factory=list)
    """The senders' own tensors, for versions published by reference."""
    unfinished_reads: list[FinishReads] = field(default_factory=list)

    def publish(self, version: int, ranks: Sequence[int] = (0, 1)) -> None:
        for rank, tensors in enumerate(parts_of(_whole(version), self.source)):
            finish_reads = self.senders[rank].publish(tensors, version) if rank in ranks else None
            if finish_reads is not None:
                finish_reads()
            for tensor in tensors.values():
                tensor.zero_()  # the trainer continues

    def publish_lasting(self, version: int) -> None:
        """The same tensors every time, with another version's values."""
        self.before_change()
        parts = parts_of(_whole(version), self.source)
        if not self.lasting:
            self.lasting = [{name: torch.empty_like(tensor) for name, tensor in part.items()} for part in parts]
        for sender, tensors, part in zip(self.senders, self.lasting, parts, strict=True):
            for name, tensor in part.items():
                tensors[name].copy_(tensor)
            finish_reads = sender.publish(tensors, version)
            if finish_reads is not None:
                self.unfinished_reads.append(finish_reads)

    def before_change(self) -> None:
        for finish_reads in self.unfinished_reads:
            finish_reads()
        self.unfinished_reads.clear()

    def check_arrives(self, version: int) -> None:
        (parts,) = self.server.call("receive", version, START_S)
        for tensors, expected in zip(parts, parts_of(_whole(version), self.target), strict=True):
            for name, tensor in expected.items():
                assert torch.equal(tensors[name], tensor), f"version {version}: {name} is {tensors[name]}, not {tensor}"

    def refusal(self, version: int, expected: type[Exception], timeout_s: float) -> str:
        """The message of the error that the first serving rank must raise."""
        error = self.server.start_call("receive", version, timeout_s)[0].exception(2 * START_S)
        assert isinstance(error, RemoteError), f"version {version} was taken"
        assert error.error_type == expected.__name__, f"receive() raised {error}, not {expected.__name__}"
        return str(error)


@contextmanager
def _edge(make: MakeWeightSync, source: Layout, target: Layout, options: Mapping[str, Any]) -> Iterator[_Edge]:
    reshard = reshard_plan(source, target)
    sync, path = make("edge", reshard, **options), path_of(make)

    def ports(side: Literal["send", "receive"], num_ranks: int) -> list[WeightPort]:
        return [
            WeightPort(edge="edge", side=side, rank=rank, reshard=reshard, weight_sync=path, address=sync.address)
            for rank in range(num_ranks)
        ]

    with TemporaryDirectory() as folder, launched(LocalLauncher) as launcher:
        server = start(launcher, Path(folder), Server)
        server.call("open", ports("receive", target.num_ranks), target)
        crossed = unpack(pack(ports("send", source.num_ranks)))
        senders = [WEIGHT_SYNCS.get(path).open_sender(port) for port in crossed]
        yield _Edge(sync, source, target, senders, server)


def _whole(version: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {"a": torch.randn(5, 4, generator=generator), "b": torch.arange(6) + 100 * version}
