"""The sandbox in each of its modes: what a program that is made to attack cannot read, change, signal or hold.

The same holds for the cells of a session, in the modes whose names begin with `session`.
"""

import contextlib
import os
import pickle
import resource
import signal
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

import pytest

from rlinf_algos import AlgosError, RewardError
from rlinf_algos.rewards import program
from rlinf_algos.rewards.confinement import call_filter, namespaces as calls
from rlinf_algos.rewards.confinement.processes import children_of, descendants
from rlinf_algos.rewards.confinement.system import PR_CAPBSET_DROP, PR_SET_DUMPABLE, call, prctl
from rlinf_algos.rewards.confinement.users import become
from rlinf_algos.rewards.python_session import PythonSession
from rlinf_algos.rewards.sandbox import SandboxLimits, SandboxRun, run_python

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is for Linux")

T = TypeVar("T")
NOBODY = 65534
LIMITS = SandboxLimits(wall_s=20, cpu_s=2, memory_bytes=256 << 20, num_processes=16, output_bytes=1 << 16)


@dataclass(frozen=True)
class Mode:
    """How a program is run."""

    as_root: bool
    """Whether the process that runs it is root's."""
    namespaces: bool
    may_mount: bool = True
    """Whether root has the capability to mount, which containers and services may lack."""
    lasting: bool = False
    """Whether the program is a cell of a session."""

    def run(self, text: str, **options: Any) -> SandboxRun:
        return self.call(lambda: self.run_here(text, **options))

    def run_here(self, text: str, **options: Any) -> SandboxRun:
        """Runs it as the user of this process."""
        options = {"limits": LIMITS, "namespaces": self.namespaces, **options}
        if self.lasting:
            return in_session(text, **options)
        return run_python({"program.py": text}, ["program.py"], **options)

    def call(self, function: Callable[[], T]) -> T:
        """The function's result, in a process of the mode's user."""
        if os.geteuid() != 0 or (self.as_root and self.may_mount):
            return function()
        return in_child(no_mounts if self.as_root else become_nobody, function)


MODES = {
    "root with namespaces": Mode(as_root=True, namespaces=True),
    "root without namespaces": Mode(as_root=True, namespaces=False),
    "user namespace": Mode(as_root=False, namespaces=True),
    "one user without namespaces": Mode(as_root=False, namespaces=False),
}
every_mode = pytest.mark.parametrize("mode", list(MODES), indirect=True)
MODES["root without mounts"] = Mode(as_root=True, namespaces=True, may_mount=False)
WEAK = {name: mode for name, mode in MODES.items() if not mode.namespaces}
MODES["session"] = Mode(as_root=True, namespaces=True, lasting=True)
MODES["session without namespaces"] = Mode(as_root=False, namespaces=False, lasting=True)
and_sessions = pytest.mark.parametrize("mode", [name for name in MODES if name != "root without mounts"], indirect=True)
in_all_modes = pytest.mark.parametrize("mode", list(MODES), indirect=True)
weak_modes = pytest.mark.parametrize("mode", WEAK, indirect=True)


def in_session(text: str, *, limits: SandboxLimits, **options: Any) -> SandboxRun:
    """The run of a program as the only cell of a session, which is closed then."""
    with PythonSession(limits=limits, **options) as session:
        run = session.run(text, time_limit_s=limits.wall_s)
    ending = "memory" if run.error == "MemoryError" else "exited" if run.is_alive else run.ending
    exit_code = int(run.ending == "raised") if ending == "exited" else None
    return SandboxRun(
        ending=ending,  # type: ignore[arg-type]
        exit_code=exit_code,
        stdout=run.output,
        stderr=run.output,
        cpu_s=0.0,
        weaknesses=(),
    )


@pytest.fixture
def mode(request) -> Mode:
    chosen = MODES[request.param]
    if (why := missing(request.param)) is not None:
        pytest.skip(why)
    return chosen


@lru_cache
def missing(name: str) -> str | None:
    """Why this machine has no such mode."""
    mode = replace(MODES[name], lasting=False)
    if mode.as_root and os.geteuid() != 0:
        return "needs root"
    run = mode.run("pass")
    return "; ".join(run.weaknesses) if mode.namespaces and run.weaknesses else None


def in_child(prepare: Callable[[], None], function: Callable[[], T]) -> T:
    """The function's result, in a process that has been prepared."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            prepare()
            with open(writer, "wb") as file:
                pickle.dump(function(), file)
            os._exit(0)
        except BaseException as error:  # noqa: BLE001 - carried to the parent
            with contextlib.suppress(OSError), open(writer, "wb") as file:
                pickle.dump(error, file)
        finally:
            os._exit(1)
    os.close(writer)
    with open(reader, "rb") as file:
        result = file.read()
    status = os.waitpid(child, 0)[1]
    assert result, f"the process ended with status {status}"
    value = pickle.loads(result)  # noqa: S301 - this process's own
    if isinstance(value, BaseException):
        raise value
    return value


def become_nobody() -> None:
    """An unprivileged user, who can reach this interpreter."""
    _open_the_way(Path(os.path.realpath(sys.base_prefix)))
    become(NOBODY, None)
    prctl(PR_SET_DUMPABLE, 1)


def no_mounts() -> None:
    """Root, but without CAP_SYS_ADMIN, from the next program on."""
    prctl(PR_CAPBSET_DROP, 21)


def _open_the_way(folder: Path) -> None:
    """In a mount namespace of its own, the closed folders above this one are open."""
    closed = [place for place in folder.parents if not place.stat().st_mode & 1]
    if not closed:
        return
    call("unshare", calls.CLONE_NEWNS)
    calls._mount(None, "/", None, calls.MS_REC | calls.MS_PRIVATE)
    aside = tempfile.mkdtemp()
    calls._mount(str(folder), aside, None, calls.MS_BIND | calls.MS_REC)
    calls._mount("tmpfs", str(closed[-1]), "tmpfs", 0, "mode=755")
    folder.mkdir(parents=True)
    calls._mount(aside, str(folder), None, calls.MS_BIND | calls.MS_REC)
    call("umount2", aside.encode(), 2)
    os.rmdir(aside)


# -- other people's files and processes ------------------------------------------------------------------------------

PROBES = """
import ctypes, fcntl, os, resource, signal, socket, sys

libc = ctypes.CDLL(None, use_errno=True)
parent = os.getppid()
signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def calls_back(number, *arguments):
    return libc.syscall(ctypes.c_long(number), *arguments) >= 0


def vm_read(pid):
    buffer = ctypes.create_string_buffer(8)
    vector = (ctypes.c_size_t * 2)(ctypes.addressof(buffer), 8)
    return libc.process_vm_readv(pid, vector, 1, vector, 1, 0) >= 0


def owner_signal(pid):
    reader, writer = os.pipe()
    fcntl.fcntl(reader, fcntl.F_SETOWN, pid)
    fcntl.fcntl(reader, 10, signal.SIGKILL)  # F_SETSIG
    fcntl.fcntl(reader, fcntl.F_SETFL, os.O_ASYNC)
    os.write(writer, b"x")


def datagram():
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    one.sendto(b"x", "/dev/log")


reads = {
    "environment": lambda: open(f"/proc/{WORKER}/environ").read(),
    "environment of all": lambda: any(
        "s3cret" in open(f"/proc/{pid}/environ").read() for pid in os.listdir("/proc") if pid.isdigit()
    ),
    "memory": lambda: open(f"/proc/{WORKER}/mem", "rb"),
    "memory of the parent": lambda: open(f"/proc/{parent}/mem", "r+b"),
    "descriptors": lambda: os.listdir(f"/proc/{WORKER}/fd"),
    "descriptors of the parent": lambda: [os.readlink(f"/proc/{parent}/fd/{fd}") for fd in range(3, 64)],
    "tests": lambda: open(SECRET).read(),
    "folder of the tests": lambda: os.listdir(os.path.dirname(SECRET)),
    "home": lambda: os.listdir(HOME) and open(os.path.join(HOME, ".bashrc")),
    "passwd": lambda: open("/etc/passwd"),
    "trace": lambda: libc.ptrace(16, WORKER, 0, 0) == 0,
    "trace the parent": lambda: libc.ptrace(16, parent, 0, 0) == 0,
    "read memory": lambda: vm_read(WORKER) or vm_read(parent),
    "loopback": lambda: socket.socket(socket.AF_INET),
    "outside": lambda: socket.create_connection(("1.1.1.1", 53), timeout=1),
    "netlink": lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW),
    "local socket": lambda: socket.socket(socket.AF_UNIX),
    "datagram": datagram,
    "connections": lambda: len(open("/proc/self/net/unix").readlines()) > 1,
    "settings of the kernel": lambda: open("/proc/sys/kernel/core_pattern", "w"),
    "kernel log": lambda: libc.klogctl(3, ctypes.create_string_buffer(64), 64) >= 0,
    "write the tests": lambda: open(SECRET, "a"),
    "write the interpreter": lambda: open(os.__file__, "a"),
    "mode": lambda: os.chmod(SECRET, 0),
    "mode of the interpreter": lambda: os.chmod(os.__file__, 0),
    "times": lambda: os.utime(SECRET),
    "remove": lambda: os.unlink(SECRET) or not os.path.exists(SECRET),
    "link": lambda: os.link(SECRET, "linked"),
    "leave a file": lambda: open(os.path.join(os.path.dirname(SECRET), "left"), "w"),
    "processor of the worker": lambda: os.sched_setaffinity(WORKER, {0}),
    "processor of the parent": lambda: os.sched_setaffinity(parent, {0}),
    "limits of the worker": lambda: resource.prlimit(WORKER, resource.RLIMIT_CPU, (0, 0)),
    "limits of the parent": lambda: resource.prlimit(parent, resource.RLIMIT_CPU, (0, 0)),
    "priority of all": lambda: os.setpriority(os.PRIO_USER, 0, 19),
    "priority of the parent": lambda: os.setpriority(os.PRIO_PROCESS, parent, 19),
}
for name, probe in reads.items():
    try:
        if probe() is not False:
            print(name)
    except OSError:
        pass
for place in ("/tmp", "/var/tmp", "/dev/shm", "/run/lock"):
    try:
        open(f"{place}/left-{MARK}", "w")
    except OSError:
        pass
for number in (signal.SIGUSR1, signal.SIGSTOP, signal.SIGKILL):
    for send in (
        lambda: os.kill(WORKER, number),
        lambda: os.kill(parent, number),
        lambda: os.kill(-1, number),
        lambda: os.killpg(os.getpgid(parent) or WORKER, number),  # 0 would be its own group
        lambda: os.killpg(os.getpgid(WORKER) or WORKER, number),
        lambda: signal.pidfd_send_signal(os.pidfd_open(WORKER), number),
        lambda: signal.pidfd_send_signal(os.pidfd_open(parent), number),
        lambda: libc.sigqueue(WORKER, number, None),
        lambda: libc.sigqueue(parent, number, None),
        lambda: calls_back(234, WORKER, WORKER, number),
    ):
        try:
            send()
        except OSError:
            pass
for pid in (WORKER, parent):
    try:
        owner_signal(pid)
    except OSError:
        pass
os.kill(0, signal.SIGUSR1)
print("end")
"""


def probed(mode: Mode, secret: Path, mark: str) -> tuple[SandboxRun, tuple]:
    """The run of all probes by a worker, and what the worker is like afterwards."""
    os.environ["RLINF_SECRET"] = "s3cret"
    header = f"WORKER, SECRET, HOME, MARK = {os.getpid()}, {str(secret)!r}, {str(Path.home())!r}, {mark!r}\n"
    run = mode.run_here(header + PROBES)
    state = (os.getpriority(os.PRIO_PROCESS, 0), os.sched_getaffinity(0), resource.getrlimit(resource.RLIMIT_CPU))
    return run, state


@in_all_modes
def test_nothing_of_others_is_read_changed_or_signalled(mode):
    mark = os.urandom(8).hex()
    before = (os.getpriority(os.PRIO_PROCESS, 0), os.sched_getaffinity(0), resource.getrlimit(resource.RLIMIT_CPU))
    with tempfile.TemporaryDirectory() as folder:
        secret = Path(folder, "tests.jsonl")
        secret.write_text("s3cret")
        for path in (Path(folder), secret):
            path.chmod(0o777)
        run, after = mode.call(lambda: probed(mode, secret, mark))
        assert (run.stdout, run.ending) == ("end\n", "exited"), run
        assert (secret.read_text(), secret.stat().st_mode & 0o777, os.listdir(folder)) == (
            "s3cret",
            0o777,
            [secret.name],
        )
    assert after == before
    left = [place for place in ("/tmp", "/var/tmp", "/dev/shm", "/run/lock") if Path(place, f"left-{mark}").exists()]
    assert left == []


KILLS = """
import os
for pid in (WORKER, os.getppid(), -1):
    try: os.kill(pid, 9)
    except OSError as error: print(error.errno)
"""


def test_one_user_without_landlock_cannot_signal_and_the_rest_is_said():
    if not missing("one user without namespaces"):
        run = MODES["one user without namespaces"].run(f"WORKER = {os.getpid()}\n{KILLS}", landlock=False)
        assert run.stdout == "13\n13\n13\n"
        assert any("forge its verdict" in weakness for weakness in run.weaknesses)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_root_without_landlock_gives_programs_another_user():
    program = (
        f"WORKER = {os.getpid()}\n{KILLS}\nprint(os.getuid() > 0, open('/proc/self/status').read().count('000000004'))"
    )

    def run() -> SandboxRun:
        return MODES["root without namespaces"].run(program, landlock=False)

    sandbox_run = in_child(lambda: _open_the_way(Path(os.path.realpath(sys.base_prefix))), run)
    assert sandbox_run.stdout == "1\n1\nTrue 0\n"  # -1 reaches no process, which is no error
    assert any("files that everyone may read" in weakness for weakness in sandbox_run.weaknesses)
    if any(not folder.stat().st_mode & 1 for folder in Path(os.path.realpath(sys.base_prefix)).parents):
        with pytest.raises(RewardError, match=r"other users cannot read /.*chmod o\+x"):
            run()


def decision(program: list[call_filter.Instruction], architecture: int, number: int, *arguments: int) -> int:
    """What a filter of system calls returns, by the rules of the kernel."""
    data = {0: number, 4: architecture, **{16 + 8 * i: value for i, value in enumerate(arguments)}}
    value = at = 0
    while True:
        operation, if_true, if_false, operand = program[at]
        at += 1
        if operation == call_filter.END:
            return operand
        if operation == call_filter.LOAD:
            value = data[operand]
            continue
        is_true = {
            call_filter.EQUAL: value == operand,
            call_filter.AT_LEAST: value >= operand,
            call_filter.ANY_BIT: bool(value & operand),
        }[operation]
        at += if_true if is_true else if_false


@pytest.mark.parametrize("machine", call_filter.ARCHITECTURES)
def test_the_filter_of_both_machines(machine):
    column = list(call_filter.ARCHITECTURES).index(machine)
    allow, refuse, absent = (line[3] for line in (call_filter.ALLOW, call_filter.REFUSE, call_filter.PRETEND_ABSENT))

    def decide(name: str | int, *arguments: int, **options) -> int:
        number = call_filter.NUMBERS[name][column] if isinstance(name, str) else name
        program = call_filter.filter_program(machine, **options)
        return decision(program, call_filter.ARCHITECTURES[machine], number, *arguments)

    assert {decide(name, 0, 0, 0, 0) for name in call_filter.REFUSED} == {refuse}
    assert (decide("mmap", 0, 0, 0, 0x22), decide("mmap", 0, 0, 0, 0x21)) == (allow, refuse)
    assert (decide("clone", 0x3D0F00), decide("clone", 0x10000011), decide("clone3", 0)) == (allow, refuse, absent)
    assert (decide("socketpair", 1, 0x80001), decide("socketpair", 1, 2), decide("socketpair", 2, 1)) == (
        allow,
        refuse,
        refuse,
    )
    assert (decide("fcntl", 0, 3), decide("fcntl", 0, 1031), decide("fcntl", 0, 6, is_weak=True)) == (
        allow,
        refuse,
        refuse,
    )
    assert (decide("prlimit64", 0), decide("prlimit64", 1)) == (allow, refuse)
    assert (decide("setpriority", 0, 0), decide("setpriority", 0, 7), decide("setpriority", 2, 0)) == (
        allow,
        refuse,
        refuse,
    )
    assert (decide("unlinkat", 0), decide("unlinkat", 0, is_weak=True)) == (allow, call_filter.PRETEND_DONE[3])
    assert decide("renameat", 0, is_weak=True) == refuse
    assert (decide("openat", 0, 0, 0x441, is_weak=True), decide("openat", 0, 0, 0x410002, is_weak=True)) == (
        allow,
        refuse,
    )
    signals = [decide("kill", pid, signals_itself_only=77) for pid in (0, 77, 78, 0xFFFFFFFF)]
    assert signals == [allow, allow, refuse, refuse]
    assert (decide("kill", 78), decide("fcntl", 0, 8, signals_itself_only=77)) == (allow, refuse)
    assert (decide(63), decide(470), decide(0x40000001)) == (allow, absent, absent)
    other = call_filter.filter_program(machine)
    assert decision(other, 0x40000003, call_filter.NUMBERS["mmap"][column], 0, 0, 0, 0) == call_filter.KILL[3]


# -- what a program leaves behind, and how long it lasts ---------------------------------------------------------------

DAEMON = """
import os, signal, sys, time
for number in range(1, 32):
    try: signal.signal(number, signal.SIG_IGN)
    except OSError: pass
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(600)", MARK])
    os._exit(0)
"""


@and_sessions
@pytest.mark.parametrize("end", ["print('ok')", "time.sleep(600)", "while True: print('x' * 4096, flush=True)"])
def test_daemons_end_with_the_run(mode, end):
    mark = f"left-{os.urandom(8).hex()}"
    limits = SandboxLimits(wall_s=1.5 if "sleep" in end else 60, output_bytes=1 << 16)
    start = time.monotonic()
    run = mode.run(f"MARK = {mark!r}\n{DAEMON}{end}", limits=limits)
    assert run.ending == {"p": "exited", "t": "timeout", "w": "output"}[end[0]]
    assert time.monotonic() - start < 300  # it does not last as long as the daemon
    assert not any(mark in line for line in command_lines())


def command_lines() -> list[str]:
    lines = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                lines.append((entry / "cmdline").read_text(errors="replace"))
    return lines


@and_sessions
def test_a_fork_bomb_ends(mode):
    program = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    run = mode.run(program, limits=SandboxLimits(wall_s=1.0, num_processes=8))
    assert run.ending in ("timeout", "killed", "exited")
    assert mode.run("print(1)").stdout == "1\n"


@in_all_modes
def test_processes_are_limited_in_number(mode):
    program = """
import os, time
for i in range(50):
    try:
        if os.fork() == 0: time.sleep(60)
    except OSError: break
time.sleep(0.2)
print(i)
"""
    run = mode.run(program, limits=SandboxLimits(num_processes=8))
    assert run.ending == "killed" or int(run.stdout) < 8


FILLING = {
    "many large files": "for i in range(1000): open(str(i), 'wb').write(bytes(15 << 20))",
    "one large file": "open('big', 'wb').write(bytes(64 << 20))",
    "many empty files": "for i in range(10**6): open(str(i), 'w').close()",
    "deep folders": "import os\nwhile True:\n    os.mkdir('x')\n    os.chdir('x')",
    "closed folders": "import os\nwhile True:\n    os.mkdir('x', 0o300)\n    os.chdir('x')",
    "files without a name": "import os\nheld = []\nwhile True:\n    held.append(open(str(len(held)), 'wb'))\n"
    "    os.unlink(str(len(held) - 1))\n    held[-1].write(bytes(15 << 20))",
    "temporary files": "import os\nheld = []\nwhile True:\n    held.append(os.open('.', os.O_TMPFILE | os.O_RDWR))\n"
    "    os.write(held[-1], bytes(15 << 20))",
    "reserved space": "import os\nfor i in range(1000): os.posix_fallocate(os.open(str(i), 66), 0, 15 << 20)",
}


SLOW_WAYS = ("many empty files", "reserved space", "temporary files")


@pytest.mark.parametrize(
    "mode", ["root with namespaces", *WEAK, "session", "session without namespaces"], indirect=True
)
@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=pytest.mark.slow) if way in SLOW_WAYS else way for way in FILLING]
)
def test_the_disk_is_not_filled(mode, way, monkeypatch):
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        run = mode.run(FILLING[way], limits=SandboxLimits(cpu_s=1))  # a disk may be too slow to come to the limit
        assert os.listdir(folder) == []
    assert run.ending in ("files", "timeout") or (run.ending, run.exit_code) == ("exited", 1), run
    assert run.ending != "exited" or "OSError" in run.stderr or "PermissionError" in run.stderr, run


# -- memory ----------------------------------------------------------------------------------------------------------

PRELUDE = """
import ctypes, fcntl, mmap, os, resource, socket, struct
libc = ctypes.CDLL(None, use_errno=True)


def call(name, *arguments):
    result = getattr(libc, name)(*arguments)
    if result < 0: raise OSError(ctypes.get_errno(), name)
    return result


"""
HOARDERS = {
    "memfd": "os.memfd_create('x')",
    "memfd_secret": "call('syscall', 447, 0)",
    "standard input": "os.write(0, bytes(1 << 20))",
    "shared and anonymous": "mmap.mmap(-1, 1 << 20)",
    "shared file": "f = open('x', 'w+b'); f.truncate(1 << 20); mmap.mmap(f.fileno(), 1 << 20)",
    "System V": "call('shmget', 0, 64 << 20, 0o1600)",
    "message queues": "call('msgget', 0, 0o1600)",
    "a file system of its own": "call('unshare', 0x10020000)",
    "a namespace by clone": "call('syscall', ctypes.c_long(56), ctypes.c_long(0x10000011), 0, 0, 0, 0)",
    "pages in pipes": "r, w = os.pipe(); b = bytes(4096)\n"
    "call('vmsplice', w, ctypes.byref((ctypes.c_size_t * 2)(id(b), 4096)), 1, 0)",
    "file pages in pipes": "r, w = os.pipe(); f = os.open('x', 66); os.write(f, bytes(4096))\n"
    "call('splice', f, ctypes.byref(ctypes.c_long(0)), w, None, 4096, 0)",
    "large pipes": "r, w = os.pipe(); fcntl.fcntl(w, 1031, 1 << 20)",
    "descriptors in flight": "a, b = socket.socketpair(); socket.send_fds(a, [b'x'], [0])",
    "watches": "call('inotify_add_watch', call('inotify_init'), b'/usr', 2)",
    "rules": "a = struct.pack('Q', 1); call('syscall', ctypes.c_long(444), a, ctypes.c_long(8), ctypes.c_long(0))",
    "rings": "call('syscall', ctypes.c_long(425), 8, ctypes.create_string_buffer(256))",
    "asynchronous rings": "call('syscall', ctypes.c_long(206), 64, ctypes.byref(ctypes.c_long(0)))",
    "user faults": "call('syscall', ctypes.c_long(323), 0)",
    "keys": "call('syscall', ctypes.c_long(248), b'user', b'x', b'y', ctypes.c_long(1), ctypes.c_long(-2))",
    "pages that stay": "resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 20, 1 << 20))",
    "its address space": "resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
}


@and_sessions
def test_memory_that_no_process_is_charged_for_is_refused(mode):
    attempts = "".join(
        f"try:\n{textwrap.indent(way, '    ')}\n    print({name!r})\nexcept (OSError, ValueError): pass\n"
        for name, way in HOARDERS.items()
    )
    run = mode.run(PRELUDE + attempts + "print('end')")
    assert (run.stdout, run.exit_code) == ("end\n", 0), run


GREEDY = {
    "one process": "held = []\nwhile True: held.append(bytearray(50 << 20))",
    "many processes": "import os, time\nfor _ in range(4):\n    if os.fork() == 0: break\n"
    "held = bytearray(100 << 20)\nfor i in range(0, len(held), 4096): held[i] = 1\ntime.sleep(60)",
    "processes with sessions of their own": "import os, time\nfor _ in range(4):\n    if os.fork() == 0:\n"
    "        os.setsid()\n        if os.fork(): os._exit(0)\n"
    "        held = bytearray(100 << 20)\n        for i in range(0, len(held), 4096): held[i] = 1\n"
    "        time.sleep(60)\ntime.sleep(60)",
    "page tables": "import ctypes, mmap, os, time\nlibc = ctypes.CDLL(None)\nlibc.mmap.restype = ctypes.c_void_p\n"
    "for _ in range(4):\n    if os.fork() == 0: break\n"
    "for i in range(1, 20_000):\n"
    "    place = libc.mmap(ctypes.c_void_p(i << 30), 4096, 1, 0x100022, -1, ctypes.c_long(0))\n"
    "    ctypes.c_char.from_address(place).value\ntime.sleep(60)",
}


@every_mode
def test_file_locks_are_few(mode):
    many = "import fcntl\nf = open('x', 'w')\nfor i in range(10**9, 0, -2): fcntl.lockf(f, fcntl.LOCK_EX, 1, i)"
    assert mode.run(many).ending == "memory" if mode.namespaces else "PermissionError" in mode.run(many).stderr
    if mode.namespaces:
        database = "import sqlite3; c = sqlite3.connect('x'); c.execute('create table t (a)'); c.commit(); print('ok')"
        assert mode.run(database).stdout == "ok\n"


@and_sessions
@pytest.mark.parametrize("way", GREEDY)
def test_memory_of_all_processes_counts(mode, way):
    assert mode.run(GREEDY[way]).ending == "memory"


SPINNING = """
import os, time
while True:
    for _ in range(4):
        if os.fork() == 0:
            while True: pass
    for _ in range(4): os.wait()
"""


UNWAITED = """
import os, signal, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
while True:
    if os.fork() == 0:
        while time.process_time() < 0.5: pass
        os._exit(0)
    try: os.wait()
    except ChildProcessError: pass
"""


@pytest.mark.parametrize("text", ["while True: pass", SPINNING, UNWAITED])
def test_processor_time_of_all_processes_counts(text):
    start = time.monotonic()
    run = run_python({}, ["-c", text], limits=SandboxLimits(wall_s=600, cpu_s=1))
    assert run.ending == "timeout"
    assert time.monotonic() - start < 600


# -- verdicts --------------------------------------------------------------------------------------------------------

SEARCH = """
import os, re, signal
found = None
for pid in os.listdir("/proc"):
    for name in ("environ", "cmdline", "fd/0"):
        try:
            match = re.search(rb"f\\(3\\) == (\\d{5})", open(f"/proc/{pid}/{name}", "rb").read(1 << 20))
            found = int(match[1]) if match else found
        except (OSError, OverflowError): pass
    for fd in range(64):
        try: os.write(os.open(f"/proc/{pid}/fd/{fd}", os.O_WRONLY), b'{"passed": true}')
        except OSError: pass
for fd in range(64):
    try: os.write(fd, b'{"passed": true}\\n')
    except OSError: pass
"""
FORGERIES = {
    "returns what it finds": SEARCH + "def f(x): return found",
    "kills all": SEARCH + "def f(x):\n    for pid in (-1, os.getppid()):\n        try: os.kill(pid, 9)\n"
    "        except OSError: pass\n    return 0",
    "kills all, then leaves": SEARCH + "def f(x):\n    try: os.kill(-1, 9)\n    finally: os._exit(0)",
}


@weak_modes
@pytest.mark.parametrize("way", FORGERIES)
def test_verdicts_are_not_forged_without_namespaces(mode, way, monkeypatch):
    monkeypatch.setattr(program, "run_python", partial(run_python, namespaces=False))
    reward = program.CodeReward(limits=LIMITS, allow_weak_isolation=True)
    results = mode.call(
        lambda: [
            reward(f"```python\n{text}\n```", "assert f(3) == 66665").outcome
            for text in (FORGERIES[way], "def f(x): return 66665")
        ]
    )
    assert results[0] in ("wrong", "crashed", "timeout")
    assert results[1] == "right"


def test_a_strong_sandbox_never_becomes_weak_by_itself():
    run = run_python({}, ["-c", "print(1)"], limits=LIMITS, namespaces=False, allow_weak=False)
    assert (run.ending, run.stdout, run.stderr) == (
        "killed",
        "",
        "the sandbox has no namespaces this time: switched off",
    )


@every_mode
def test_a_killed_supervisor_is_an_outcome(mode):
    def run():
        before = set(children_of(os.getpid()))
        threading.Thread(target=kill_new_child, args=(before,)).start()
        return mode_run("import time; time.sleep(10)")

    def kill_new_child(before):
        while not (new := {*descendants(), *children_of(os.getpid())} - before):
            time.sleep(0.01)
        time.sleep(0.3)  # until the program runs
        new = {*descendants(), *children_of(os.getpid())} - before
        for process in new:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def mode_run(text):
        return run_python({}, ["-c", text], limits=LIMITS, namespaces=mode.namespaces)

    assert mode.call(run).ending == "killed"


# -- the rest of the contract ------------------------------------------------------------------------------------------


@every_mode
@pytest.mark.parametrize(
    ("text", "ending"),
    [
        ("while True: print('x' * 1000)", "output"),
        ("import sys\nwhile True: sys.stderr.write('x' * 1000)", "output"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "killed"),
        ("raise SystemExit(3)", "exited"),
    ],
)
def test_endings(mode, text, ending):
    assert mode.run(text, limits=SandboxLimits(output_bytes=1 << 16)).ending == ending


@every_mode
def test_nothing_is_inherited(mode, monkeypatch):
    monkeypatch.setenv("RLINF_SECRET", "s3cret")
    secret = os.open("/proc/self/environ", os.O_RDONLY)
    os.set_inheritable(secret, True)
    try:
        run = mode.run("import os; print(sorted(os.environ), sorted(map(int, os.listdir('/proc/self/fd'))))")
    finally:
        os.close(secret)
    assert run.stdout == "['HOME', 'LANG', 'PATH', 'TMPDIR'] [0, 1, 2, 3]\n"  # 3 is the listing itself


@every_mode
def test_files_of_the_program(mode):
    text = "import os\nos.makedirs('a/b')\nopen('a/b/c', 'w').write('text')\nprint(open('a/b/c').read(), os.listdir())"
    assert (
        mode.run(text).stdout == "text ['program.py', 'a']\n" or mode.run(text).stdout == "text ['a', 'program.py']\n"
    )
    text = """
import os, tempfile
with tempfile.TemporaryDirectory() as folder, tempfile.NamedTemporaryFile("w+", dir=folder) as named:
    with tempfile.TemporaryFile("w+") as nameless:
        for file in (named, nameless):
            file.write("text")
            file.seek(0)
            print(file.read())
os.remove("program.py")
print(os.path.exists("program.py"))
"""
    assert mode.run(text).stdout == f"text\ntext\n{not mode.namespaces}\n"
    assert mode.run("import numpy; print(numpy.arange(3).sum())").stdout == "3\n"


def test_a_temporary_folder_that_is_closed_to_others(tmp_path, monkeypatch):
    if not missing("root without namespaces"):
        tmp_path.chmod(0o700)
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        text = "import os, sys\nsys.path.insert(0, os.getcwd())\nopen('m.py', 'w').write('x = 5')\nimport m\nprint(m.x)"
        run = MODES["root without namespaces"].run(text)
        assert (run.stdout, run.stderr, list(tmp_path.iterdir())) == ("5\n", "", [])


@every_mode
def test_folders_that_are_shown_can_be_read(mode):
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        Path(folder, "shown.txt").write_text("shown")
        text = f"print(open({folder + '/shown.txt'!r}).read())\nopen({folder + '/other'!r}, 'w')"
        run = mode.run(text, readable=[folder])
        assert run.stdout == "shown\n"
        assert "Error" in run.stderr
        assert os.listdir(folder) == ["shown.txt"]


@every_mode
def test_texts_of_any_kind_come_through(mode):
    text = "\u222b \U0001f600 \\ \" ' \0"
    assert mode.run("import sys; sys.stdout.buffer.write(sys.stdin.buffer.read())", stdin=text).stdout == text
    assert mode.run("x = '\u222b\U0001f600'; print(len(x))").stdout == "2\n"


def test_a_program_larger_than_its_folder_is_an_outcome():
    run = MODES["root with namespaces"].run("#" * 9000, limits=SandboxLimits(folder_bytes=4096))
    assert run.ending in ("files", "killed")


def test_limits_are_checked():
    with pytest.raises(AlgosError, match="cpu_s=0 must be at least 1"):
        SandboxLimits(cpu_s=0)
    with pytest.raises(AlgosError, match="memory_bytes=5 must be at least"):
        SandboxLimits(memory_bytes=5)
