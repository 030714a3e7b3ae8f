"""A trainer's own tensors, read by receivers where they are, over host memory that stands for a device's."""

import multiprocessing
import os
import signal
import threading
import time
from typing import Any

import pytest
import torch
from comm_host_device import HostDevice

from rlinf_comm import IpcError, PeerLost, WeightMismatchError, WeightTimeout
from rlinf_comm.copies import addresses_of
from rlinf_comm.testing import assert_bitwise_equal
from rlinf_comm.weights import Layout, WeightStore, reshard_plan, specs_of
from rlinf_comm.weights.device import (
    DeviceWeightReceiver,
    DeviceWeightSender,
    create_device_store,
    sender as sender_module,
)
from rlinf_comm.weights.store.memory import Where

HANG_S = 60.0


def values(version):
    generator = torch.Generator().manual_seed(version)
    return {
        "embed": torch.randn(40, 16, generator=generator).to(torch.bfloat16),
        "empty": torch.empty(0, 4),
        "w": torch.randn(9, 8, 3, generator=generator),
    }


SPECS = specs_of(values(0))
WHOLE = Layout.replicated(SPECS, 1)
ROWS = Layout.sharded(SPECS, 2)


def blank(specs=SPECS):
    return {name: torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype)) for name, spec in specs.items()}


def update(tensors, version):
    for name, tensor in values(version).items():
        tensors[name].copy_(tensor)


class Trainer:
    """The only sender of a store, with tensors that last on its device."""

    SOURCE = WHOLE

    def __init__(self, target=WHOLE, num_slots=2):
        self.device = HostDevice(lends=True)
        self.plan = reshard_plan(self.SOURCE, target)
        self.store = create_device_store(self.plan, name="weights", num_slots=num_slots)
        self.sender = DeviceWeightSender(self.store, self.plan, 0, self.device)
        self.tensors = self.device.lasting(values(0))

    def receiver(self, rank=0, device_type="cpu", identity=1):
        device = HostDevice(device_type, lends=True, identity=identity)
        return DeviceWeightReceiver(WeightStore.open(self.store.address), self.plan, rank, device)

    def publish(self, version):
        """Returns where the version is."""
        self.sender.finish_reads()
        update(self.tensors, version)
        self.sender.publish_by_reference(self.tensors, version)
        slot = (self.store.words.load(self.sender._control.num_published(0)) - 1) % self.sender._num_slots
        return Where(self.store.words.load(self.sender._control.slot_where(0, slot)))


def check_arrives(receiver, tensors, version):
    report = receiver.take(tensors, version)()
    assert_bitwise_equal(tensors, values(version))
    return report


@pytest.mark.parametrize("device_type", ["cpu", "cuda"], ids=["on the device", "on the host"])
def test_tensors_that_last_are_copied_by_the_receiver_alone(device_type):
    trainer = Trainer()
    receiver, tensors = trainer.receiver(device_type=device_type), blank()
    where = []
    for version in range(6):
        where.append(trainer.publish(version))
        check_arrives(receiver, tensors, version)
    assert where == [Where.STORED] + 5 * [Where.REFERENCED]
    assert trainer.sender.num_held_bytes() == 0, "the memory of versions is given back"


def test_a_receiver_of_two_shards_finds_the_lent_and_the_packed():
    plan = reshard_plan(ROWS, WHOLE)
    store = create_device_store(plan, name="weights")
    senders = [DeviceWeightSender(store, plan, rank, HostDevice(lends=True)) for rank in range(2)]
    receiver, tensors = DeviceWeightReceiver(store, plan, 0, HostDevice(lends=True)), blank()
    device: Any = senders[0]._device
    halves = [
        {name: tensor.chunk(2)[min(rank, len(tensor.chunk(2)) - 1)] for name, tensor in values(0).items()}
        for rank in range(2)
    ]
    halves = [
        {name: halves[rank][name].reshape(spec.shape) for name, spec in ROWS.ranks[rank].buffers.items()}
        for rank in range(2)
    ]
    lasting = device.lasting(halves[0])
    for version in range(3):
        senders[0].publish_by_reference(lasting, version)
        senders[1].publish(halves[1], version)
        receiver.take(tensors, version)()
        assert_bitwise_equal(tensors, values(0))
        senders[0].finish_reads()
    assert store.words.load(senders[0]._control.slot_where(0, 0)) == Where.GONE


def test_a_receiver_that_comes_after_the_tensors_changed_finds_the_version_packed():
    trainer = Trainer(num_slots=3)
    receiver, tensors = trainer.receiver(), blank()
    for version in range(6):
        trainer.publish(version)
        trainer.sender.finish_reads()
        update(trainer.tensors, 77)  # it trains on
        check_arrives(receiver, tensors, version)
        update(trainer.tensors, version)
    assert trainer.sender.num_held_bytes() > 0, "what each version needs stays"


def test_a_bit_that_differs_from_what_the_trainer_has_is_named():
    trainer = Trainer()
    receiver, tensors = trainer.receiver(), blank()
    for version in range(2):
        trainer.publish(version)
        check_arrives(receiver, tensors, version)
    trainer.publish(2)
    check = receiver.take(tensors, 2)
    trainer.tensors["w"][3, 2, 1] += 1  # without finish_reads
    with pytest.raises(WeightMismatchError, match="w differs from what its sender published"):
        check()


class TrainerOfMasters(Trainer):
    """One whose tensors are float32, and cast on their way."""

    SOURCE = Layout.replicated(SPECS, 1, dtype="float32")

    def __init__(self, target=WHOLE):
        super().__init__(target)
        self.tensors = self.device.lasting({name: tensor.float() for name, tensor in values(0).items()})


@pytest.mark.parametrize("scratch_bytes", [64, 1000, 1 << 20], ids=lambda number: f"{number} bytes of scratch")
def test_what_is_cast_is_lent_on_one_device_and_attested_as_it_is_served(monkeypatch, scratch_bytes):
    monkeypatch.setattr(sender_module, "SCRATCH_BYTES", scratch_bytes)
    trainer = TrainerOfMasters()
    receiver, tensors, where = trainer.receiver(), blank(), []
    for version in range(6):
        where.append(trainer.publish(version))
        check_arrives(receiver, tensors, version)
    assert where == [Where.STORED] + 5 * [Where.REFERENCED]
    assert trainer.sender.num_held_bytes() < scratch_bytes + 4096, "no version is kept"
    trainer.publish(6)
    check = receiver.take(tensors, 6)
    trainer.tensors["embed"][39, 15] += 1  # without finish_reads
    with pytest.raises(WeightMismatchError, match="embed differs from what its sender published"):
        check()


def test_digests_of_parts_that_are_cast_are_those_of_the_cpus_program(monkeypatch):
    monkeypatch.setattr(sender_module, "SCRATCH_BYTES", 24)  # less than a row of any part
    trainer = TrainerOfMasters(Layout.sharded(SPECS, 3, dim=1))
    trainer.publish(0)
    sender, tensors = trainer.sender, trainer.sender._checked(trainer.tensors)
    expected = sender._transfer(tensors).attest.run(addresses_of(tensors.values()))
    assert len(expected) > 3 and sender._digests_of(tensors) == expected


def test_what_is_cast_is_packed_for_another_device():
    trainer = TrainerOfMasters()
    receiver, tensors = trainer.receiver(identity=2), blank()
    for version in range(3):
        assert trainer.publish(version) == Where.STORED
        check_arrives(receiver, tensors, version)


def test_memory_that_the_driver_does_not_export_is_packed_and_says_so():
    trainer = Trainer()
    trainer.tensors = {name: tensor.clone() for name, tensor in trainer.tensors.items()}
    assert trainer.publish(0) == Where.STORED
    with pytest.warns(UserWarning, match="weights are copied before they are sent.*cuMemGetAddressRange"):
        assert trainer.publish(1) == Where.STORED


def test_tensors_at_other_addresses_are_packed_once_and_then_lent_anew():
    trainer = Trainer()
    receiver, tensors = trainer.receiver(), blank()
    where = []
    for version in range(7):
        if version == 4:
            trainer.sender.withdraw()  # as before an offload
            trainer.tensors = trainer.device.lasting(trainer.tensors)
        where.append(trainer.publish(version))
        check_arrives(receiver, tensors, version)
    assert where == [Where.STORED, *3 * [Where.REFERENCED], Where.STORED, *2 * [Where.REFERENCED]]


def test_a_version_that_is_packed_while_a_receiver_begins_to_copy_it_arrives(monkeypatch):
    trainer = Trainer()
    receiver, tensors = trainer.receiver(), blank()
    for version in range(2):
        trainer.publish(version)
        check_arrives(receiver, tensors, version)
    assert trainer.publish(2) == Where.REFERENCED
    word = trainer.sender._control.slot_where(0, 0)
    training = threading.Thread(target=trainer.sender.finish_reads, daemon=True)
    read = receiver._read_referenced

    def read_later(*arguments):
        training.start()
        while trainer.store.words.load(word) == Where.REFERENCED:
            time.sleep(0.001)
        read(*arguments)

    monkeypatch.setattr(receiver, "_read_referenced", read_later)
    check_arrives(receiver, tensors, 2)
    training.join(HANG_S)
    assert not training.is_alive()


def test_a_version_for_which_there_was_no_memory_is_packed_when_it_is_tried_again():
    trainer = Trainer()
    receiver, tensors = trainer.receiver(), blank()
    for version in range(4):
        trainer.publish(version)
        check_arrives(receiver, tensors, version)
    assert trainer.publish(4) == Where.REFERENCED and trainer.sender.num_held_bytes() == 0
    driver: Any = trainer.device.driver
    driver.refuses |= {"allocate", "create_mapping"}
    try:
        with pytest.raises(IpcError, match="no arena of"):
            trainer.sender.finish_reads()
    finally:
        driver.refuses -= {"allocate", "create_mapping"}
    trainer.sender.finish_reads()
    update(trainer.tensors, 77)
    check_arrives(receiver, tensors, 4)


def lent_and_taken():
    trainer = Trainer()
    receiver, tensors = trainer.receiver(), blank()
    for version in range(2):
        trainer.publish(version)
        check_arrives(receiver, tensors, version)
    return trainer, receiver


def test_memory_that_receivers_did_not_unmap_in_time_is_waited_for_again():
    trainer, receiver = lent_and_taken()
    with receiver._kept.open():
        for _ in range(2):
            with pytest.raises(WeightTimeout, match="a receiver still has tensors of sender 0 mapped"):
                trainer.sender.withdraw(0.05)
    trainer.sender.withdraw()


def test_tensors_that_are_not_lent_any_more_are_waited_for_until_they_are_unmapped():
    trainer, receiver = lent_and_taken()
    with receiver._kept.open():
        trainer.tensors = trainer.device.lasting(trainer.tensors)
        assert trainer.publish(2) == Where.STORED
        with pytest.raises(WeightTimeout):
            trainer.sender.withdraw(0.05)
    trainer.sender.withdraw()


# -- two processes -----------------------------------------------------------------------------------------------------


def work_as_server(pipe, address):
    """Receives the versions that it is sent."""
    plan = reshard_plan(WHOLE, WHOLE)
    device: Any = HostDevice(lends=True)
    receiver, tensors = DeviceWeightReceiver(WeightStore.open(address), plan, 0, device), blank()
    pipe.send("open")
    while (version := pipe.recv()) is not None:
        try:
            report = check_arrives(receiver, tensors, version)
        except (PeerLost, IpcError) as error:
            pipe.send(type(error).__name__)
            continue
        calls = [call[0] for call in device.driver.calls]
        pipe.send((report.num_maps, calls.count("open_legacy"), device.arenas.num_open()))


class Server:
    """The only receiver of a trainer's store, in a process of its own."""

    def __init__(self, trainer):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["comm_host_device", "rlinf_comm.weights.device"])
        self._pipe, there = context.Pipe()
        self.process = context.Process(target=work_as_server, args=(there, trainer.store.address), daemon=True)
        self.process.start()
        assert self._answer() == "open"

    def _answer(self):
        assert self._pipe.poll(HANG_S), "the server does not answer"
        return self._pipe.recv()

    def take(self, version):
        self._pipe.send(version)
        return self._answer()


@pytest.fixture
def trainer_and_server():
    trainer = Trainer()
    server = Server(trainer)
    yield trainer, server
    server.process.kill()
    server.process.join(HANG_S)


def test_tensors_are_mapped_once(trainer_and_server):
    trainer, server = trainer_and_server
    maps = []
    for version in range(7):
        trainer.publish(version)
        maps.append(server.take(version)[:2])
    assert [num_maps for num_maps, _ in maps][2:] == 5 * [0]
    assert len({num_calls for _, num_calls in maps[1:]}) == 1, "its driver was called again"
    exported = [call for call in trainer.device.driver.calls if call[0] == "export_legacy"]
    del trainer.device.driver.calls[:]
    trainer.publish(7)
    server.take(7)
    assert exported and trainer.device.driver.calls == []


def test_memory_is_withdrawn_when_the_server_has_unmapped_it_and_mapped_anew_later(trainer_and_server):
    trainer, server = trainer_and_server
    for version in range(4):
        trainer.publish(version)
        server.take(version)
    trainer.publish(4)
    trainer.sender.withdraw()
    words, place = trainer.store.words, trainer.sender._own_place
    indices = trainer.sender._exports._indices
    assert words.load(indices.mapped(0, 0, place)) == 0
    update(trainer.tensors, 77)  # the memory is another's now
    assert server.take(4)[0] == 1, "packed for who came late"
    trainer.tensors = trainer.device.lasting(trainer.tensors)
    for version in range(5, 8):
        trainer.publish(version)
        server.take(version)
    assert words.load(indices.mapped(0, 0, place)) > 0


def test_a_server_that_is_killed_does_not_keep_the_trainer_waiting(trainer_and_server):
    trainer, server = trainer_and_server
    for version in range(3):
        trainer.publish(version)
        server.take(version)
    os.kill(server.process.pid, signal.SIGKILL)
    server.process.join(HANG_S)
    start_s = time.monotonic()
    trainer.sender.withdraw()
    assert time.monotonic() - start_s < HANG_S / 2
