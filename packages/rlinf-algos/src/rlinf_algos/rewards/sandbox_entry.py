"""Confines itself and runs one program for `sandbox.run_python`. Runs as a script: `python -I -S`.

Reads its order from standard input. If the kernel allows it, the program runs in new namespaces:
- network: without any interface, even the loopback is down;
- processes: the program sees and can signal only its own processes, and all of them end with it;
- files: a separate root with read-only views of the system's programs and of the interpreter, and an empty working
  folder in memory, of limited size.
Otherwise Landlock hides the same files if the kernel supports it. If this process runs as root, the program runs under
a user number that owns nothing, with or without namespaces. A filter of system calls applies in all cases.
When the program has ended or could not be started, a report is written to the status pipe.
"""

from __future__ import annotations

import contextlib
import marshal
import os
import signal
import sys

sys.path.append(os.path.dirname(os.path.abspath(__file__)))

from confinement import call_filter, landlock, namespaces, processes, users
from confinement.order import Confinement, Order
from confinement.supervisor import supervise
from confinement.system import PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG, prctl

READY = b"ready"


def main() -> None:
    order = Order(**marshal.loads(sys.stdin.buffer.read()))
    for fd in (order.status_fd, *order.channel, order.control_fd):
        if fd is not None:
            os.set_inheritable(fd, False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # if memory runs out, the kernel kills a program before any other process
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    own_users = users.unused_users(os.getpid())
    why = run_in_namespaces(order, own_users) if order.namespaces else "switched off"
    if why is None:
        return
    if order.allow_weak:
        run_without(order, own_users, why)
    else:
        os.write(2, f"the sandbox has no namespaces this time: {why}".encode())


def report(order: Order, **fields: object) -> None:
    os.write(order.status_fd, repr(fields).encode())


def run_in_namespaces(order: Order, own_users: tuple[int, int] | None) -> str | None:
    """Runs the program, or returns why it cannot have namespaces."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        try:
            become_supervisor(order, own_users, writer)
        finally:
            os._exit(1)
    signal.signal(signal.SIGTERM, lambda number, frame: end_namespaces(child))
    os.close(writer)
    with open(reader, "rb") as file:
        answer = file.read()
    os.waitpid(child, 0)
    return None if answer == READY else answer.decode() or "the process that asked for them was killed"


def end_namespaces(child: int) -> None:
    """Ends this process once the namespaces are empty. Their first process dies with its parent, `child`, and can be
    waited for once all other processes in them have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()
    os._exit(0)


def become_supervisor(order: Order, own_users: tuple[int, int] | None, ready: int) -> None:
    """Enters the namespaces; their first process then supervises the program."""
    try:
        user = namespaces.enter(own_users)
        child = os.fork()
        if child != 0:
            os.close(ready)
            os.waitpid(child, 0)
            return
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        namespaces.build_root(order.folder, order.readable, order.folder_limit_bytes)
        os.chroot(order.folder)
        os.chdir("/")
    except OSError as error:
        os.write(ready, str(error.strerror).encode())
        return
    os.write(ready, READY)
    os.close(ready)
    try:
        confinement = Confinement(is_weak=False, user=user)
        outcome = supervise(order, namespaces.FOLDER_INSIDE, confinement, processes.in_namespace)
        report(order, **outcome, weaknesses=[])
    except Exception as error:  # noqa: BLE001 - reported to the caller, which raises it
        report(order, failed=f"{type(error).__name__}: {error}")


def run_without(order: Order, own_users: tuple[int, int] | None, why: str) -> None:
    """Runs the program without namespaces."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGTERM, lambda number, frame: (processes.end_descendants(own_users), os._exit(0)))
    has_landlock = order.landlock and landlock.version() > 0
    needed = (*order.readable, os.path.dirname(order.folder))
    capability = users.capability_to_read(needed, own_users[0]) if own_users else None
    is_hidden = has_landlock and landlock.version() >= landlock.TRUNCATION_FROM
    if own_users and capability is not None and (capability < 0 or not is_hidden):
        report(order, failed=f"other users cannot read {users.closed(needed, own_users[0])[0]}; {CLOSED_HINT}")
        return
    user = own_users[0] if own_users else None
    confinement = Confinement(is_weak=True, user=user, capability=capability, landlock=has_landlock)
    outcome = supervise(order, order.folder, confinement, processes.descendants)
    processes.end_descendants(own_users)
    report(order, **outcome, weaknesses=[f"no namespaces ({why})", *weaknesses(confinement)])


CLOSED_HINT = (
    "without namespaces a program runs as another user, which must be able to reach the interpreter and the temporary "
    "folder: move them (TMPDIR), or chmod o+x the folders above"
)


def weaknesses(confinement: Confinement) -> list[str]:
    """What is not protected, and what replaces it."""
    has_filter = call_filter.is_supported()
    texts = []
    if confinement.user is None:
        texts.append("program and judge run as this user, and its processes count towards the program's")
        if not (confinement.landlock and has_filter):
            texts.append("a program can read and write what this user may, so learn its tests and forge its verdict")
        elif landlock.version() < landlock.TRUNCATION_FROM:
            texts.append("a program can empty files of this user's that it knows by name")
    elif not confinement.landlock:
        texts.append("files that everyone may read can be read, a data set with its tests among them")
        texts.append("folders that everyone may write can be filled, and files left there")
    elif confinement.capability is not None:
        texts.append(
            "interpreter or temporary folder are closed to other users, so programs run with the right to read files"
        )
    if not has_filter:
        texts.append("the network is open, and memory that no process has mapped is not counted")
    return [*texts, "the size of the working folder is limited by a look every 20 ms"]


if __name__ == "__main__":
    main()
