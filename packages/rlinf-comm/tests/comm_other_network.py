"""Two hosts, as far as the network goes: network namespaces joined by a pair of virtual devices, gone with the process.

`python comm_other_network.py`, as root and with iproute2. Prints what it found, line by line.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable

from rlinf_comm import CommError
from rlinf_comm.peers import Peer
from rlinf_comm.wire.secret import SECRET_VARIABLE

HERE, THERE = "10.99.0.1", "10.99.0.2"
PORT = 29400
HANG_S = 30.0
_CLONE_NEWNET = 0x40000000
_NO_NAMESPACES = 77
"""Exit code."""


def enter_new_namespace() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET) != 0:
        print(f"no network namespaces: {os.strerror(ctypes.get_errno())}", file=sys.stderr)
        sys.exit(_NO_NAMESPACES)


def ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode != 0:
        print(f"ip {' '.join(arguments)}: {done.stderr.strip()}", file=sys.stderr)
        sys.exit(_NO_NAMESPACES)


def on_the_other_host(run: Callable[[], None]) -> None:
    """In a process with a network of its own, which is reached over the pair of devices."""
    entered, enter = os.pipe()
    moved, move = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            signal.alarm(int(2 * HANG_S))
            enter_new_namespace()
            os.write(enter, b"e")
            os.read(moved, 1)
            ip("addr", "add", f"{THERE}/24", "dev", "there")
            ip("link", "set", "there", "up")
            run()
            sys.stdout.flush()
            ip("link", "del", "there")  # both of the pair, and not some time after this process
        except BaseException:  # noqa: BLE001 - the end of a process
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    os.read(entered, 1)
    ip("link", "add", "here", "type", "veth", "peer", "name", "there")
    ip("link", "set", "there", "netns", str(pid))
    ip("addr", "add", f"{HERE}/24", "dev", "here")
    ip("link", "set", "here", "up")
    os.write(move, b"m")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def attempt(what: str, call: Callable[[], object]) -> None:
    try:
        print(what, call(), flush=True)
    except CommError as error:
        print(what, type(error).__name__, flush=True)


def join(address: str, name: str) -> str:
    with Peer.join(f"{address}:{PORT}", name, serve=False, timeout_s=2.0) as me:
        trainer = me.receive("trainer/0", timeout_s=HANG_S)
        return f"{trainer} over {me.address.endpoint[0]}"


def stranger() -> None:
    os.environ[SECRET_VARIABLE] = secrets.token_hex(32)
    attempt("stranger as trainer/0:", lambda: join(HERE, "trainer/0"))
    attempt("stranger as engine/0:", lambda: join(HERE, "engine/0"))


def member() -> None:
    attempt("member:", lambda: join(HERE, "engine/0"))


def main() -> None:
    os.environ[SECRET_VARIABLE] = secrets.token_hex(32)
    enter_new_namespace()
    ip("link", "set", "lo", "up")
    ip("addr", "add", f"{HERE}/32", "dev", "lo")  # so that it is there before the other host is
    with Peer.join(f"{HERE}:{PORT}", "trainer/0", transports=("tcp",)) as trainer:
        on_the_other_host(stranger)
        sending = threading.Thread(target=lambda: trainer.send("engine/0", "weights", timeout_s=HANG_S))
        sending.start()
        on_the_other_host(member)
        sending.join()
    with Peer.join(f"127.0.0.1:{PORT}", "trainer/0"):  # for this host alone
        on_the_other_host(member)


if __name__ == "__main__":
    main()
