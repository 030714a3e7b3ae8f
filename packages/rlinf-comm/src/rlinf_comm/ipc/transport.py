"""Which way two processes share device memory: a pure function of what each knows, and of an echo that is tried."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from dataclasses import dataclass

from rlinf_comm import _C
from rlinf_comm.ipc import driver as drivers
from rlinf_comm.ipc.driver import Driver, uuid_text
from rlinf_comm.records import record

LEGACY, DESCRIPTOR, FABRIC = "legacy", "descriptor", "fabric"
KINDS = (LEGACY, DESCRIPTOR, FABRIC)
"""Handle kinds, best first: cudaIpc needs nothing else, a descriptor needs the sender's socket, fabric needs IMEX."""

SAME_PROCESS, SAME_DEVICE, PEER_DEVICE = "same process", "same device", "peer device"
HOST_MEMORY, NETWORK = "host shared memory", "network"


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What a process knows of itself and its device. Packable; both sides exchange theirs."""

    process: tuple[int, int, int]
    """(pid, start time in clock ticks, inode of the pid namespace)"""
    host: str
    """The kernel's boot id: the same in all containers of a machine."""
    uuid: bytes
    """16 bytes, of the device or MIG instance."""
    visible: tuple[bytes, ...]
    """UUIDs of all devices that this process sees."""
    reachable: tuple[bytes, ...]
    """UUIDs of the devices whose memory the own one can address."""
    kinds: tuple[str, ...]
    """Handle kinds that the device can export, in the order of KINDS."""
    has_events: bool
    """Whether events can be shared."""


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class IpcChoice:
    """The transport of a pair, and why."""

    transport: str
    kind: str | None
    """Handle kind; None where no handle is used."""
    reason: str


def facts_of(driver: Driver, device: int) -> Facts:
    """The facts about the calling process and its device."""
    devices = range(driver.num_devices())
    has_mapping = bool(driver.attribute(device, drivers.VIRTUAL_MEMORY_SUPPORTED))
    kinds = [LEGACY]
    if has_mapping and driver.attribute(device, drivers.DESCRIPTORS_SUPPORTED):
        kinds.append(DESCRIPTOR)
    if has_mapping and driver.attribute(device, drivers.FABRIC_SUPPORTED):
        kinds.append(FABRIC)
    return Facts(
        process=_C.own_process(),
        host=pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        uuid=driver.uuid(device),
        visible=tuple(driver.uuid(other) for other in devices),
        reachable=tuple(
            driver.uuid(other) for other in devices if other != device and driver.can_access_peer(device, other)
        ),
        kinds=tuple(kinds),
        has_events=bool(driver.attribute(device, drivers.IPC_EVENTS_SUPPORTED)),
    )


Echo = Callable[[str], "str | None"]
"""Tries a handle kind between the two processes: None when bytes came back, else why not."""


def choose(sender: Facts, receiver: Facts, echo: Echo) -> IpcChoice:
    """The first way that works. `echo` is asked at most once for each kind, and only where the facts allow it."""
    if sender.host != receiver.host:
        if FABRIC not in sender.kinds or FABRIC not in receiver.kinds:
            return _without(NETWORK, "the processes are on different hosts, and no fabric connects their devices")
        refusal = echo(FABRIC)
        if refusal is None:
            return IpcChoice(transport=PEER_DEVICE, kind=FABRIC, reason="different hosts of one fabric; 4 KB came back")
        return _without(NETWORK, f"the processes are on different hosts; fabric: {refusal}")
    if sender.process == receiver.process:
        return IpcChoice(
            transport=SAME_PROCESS, kind=None, reason="both ends are one process, which uses the pointer itself"
        )
    refused = _refusal_of_devices(sender, receiver)
    if refused:
        return _without(HOST_MEMORY, refused)
    refusals = []
    for kind in sender.kinds:
        refusal = echo(kind)
        if refusal is None:
            is_same = sender.uuid == receiver.uuid
            where = f"both on {uuid_text(sender.uuid)}" if is_same else "peer access between the two devices"
            reason = "; ".join([f"{where}, 4 KB came back through a {kind} handle", *refusals])
            return IpcChoice(transport=SAME_DEVICE if is_same else PEER_DEVICE, kind=kind, reason=reason)
        refusals.append(f"{kind} handle: {refusal}")
    return _without(HOST_MEMORY, "; ".join(refusals))


def _without(transport: str, reason: str) -> IpcChoice:
    return IpcChoice(transport=transport, kind=None, reason=reason)


def _refusal_of_devices(sender: Facts, receiver: Facts) -> str | None:
    if not (sender.has_events and receiver.has_events):
        return "the devices cannot share events, without which nothing orders the two processes' work"
    if sender.uuid == receiver.uuid:
        return None
    if sender.uuid not in receiver.visible:
        return (
            f"the receiver does not see the sender's {uuid_text(sender.uuid)}: CUDA_VISIBLE_DEVICES hides it, or the "
            "two are different MIG instances"
        )
    if sender.uuid not in receiver.reachable:
        return f"no peer access from {uuid_text(receiver.uuid)} to {uuid_text(sender.uuid)}"
    return None
