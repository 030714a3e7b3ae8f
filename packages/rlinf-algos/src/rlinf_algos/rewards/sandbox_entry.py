"""The program that locks itself in and then runs one command for a `Sandbox`. Runs as a script: `python -I`.

Reads its order (JSON) from standard input. Where the kernel allows it, the command gets namespaces of its own:
- network: not even a loopback that is up;
- processes: it sees and can signal only its own, and all of them end with it;
- files: a root of its own with read-only views of the system's programs and of the interpreter, and an empty working
  folder in memory, of limited size;
- as root it runs under a user number that owns nothing.
In both cases a filter of system calls refuses sockets, and memory that nobody counts: memfd, shared mappings (the pages
of /dev/zero, too), System V segments and queues, further namespaces and mounts. Where there are no namespaces, what is
left unprotected is reported. Writes one JSON line to the status pipe when the command has ended.
"""

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import platform
import resource
import signal
import struct
import sys
import time

LIBC = ctypes.CDLL(None, use_errno=True)
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
NAMESPACES = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 32, 4096, 1 << 14, 1 << 18
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 36, 38
SYSTEM_PATHS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives")
DEVICES = ("/dev/null", "/dev/full", "/dev/random", "/dev/urandom")
FOLDER_INSIDE = "/sandbox"
FIRST_USER = 0x4000_0000
"""User numbers from here on belong to nobody."""
WATCH_S = 0.02
"""Seconds between two looks at the memory of all processes together."""
MAX_INODES = 4096
"""Files in the working folder; each costs the kernel about 1 KiB."""
CHANNEL = (3, 4)
"""File descriptors at which the command finds the channel that it was given: to read, to write."""
FILTERED = {
    "x86_64": {
        "architecture": 0xC000003E, "socket": 41, "mmap": 9, "clone": 56, "clone3": 435,
        # memfd_create, memfd_secret, shmget, shmat, shmctl, msgget, semget, mq_open, io_uring_setup, userfaultfd, bpf,
        # keyctl, add_key, perf_event_open, ptrace, process_vm_readv, process_vm_writev, pidfd_getfd, unshare, setns,
        # mount, fsopen, fsmount, move_mount, open_tree, pivot_root, chroot
        "refused": (319, 447, 29, 30, 31, 68, 64, 240, 425, 323, 321, 250, 248, 298, 101, 310, 311, 438, 272, 308,
                    165, 430, 432, 429, 428, 155, 161),
    },
    "aarch64": {
        "architecture": 0xC00000B7, "socket": 198, "mmap": 222, "clone": 220, "clone3": 435,
        "refused": (279, 447, 194, 196, 195, 186, 190, 180, 425, 282, 280, 219, 217, 241, 117, 270, 271, 438, 97, 268,
                    40, 430, 432, 429, 428, 41, 51),
    },
}  # fmt: skip
"""Numbers of system calls; the refused ones in the same order for both machines."""
CLONE_NEW = 0x7E020000
"""Every flag of clone that asks for a namespace."""


def call(name, *arguments):
    if getattr(LIBC, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def mount(source, target, kind, flags, options=""):
    call("mount", *(text.encode() if text else None for text in (source, target, kind)), flags, options.encode())


def enter_namespaces():
    """True as root, False with a user namespace. Raises OSError where the kernel allows neither."""
    if os.geteuid() == 0:
        with contextlib.suppress(OSError):
            call("unshare", NAMESPACES)
            return True
    user, group = os.getuid(), os.getgid()
    call("unshare", NAMESPACES | CLONE_NEWUSER)
    for name, text in (("setgroups", "deny"), ("uid_map", f"65534 {user} 1"), ("gid_map", f"65534 {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    return False


def build_root(order, root):
    """A root folder in memory at the mount point `root`, and everything read-only but the working folder."""
    mount(None, "/", None, MS_REC | MS_PRIVATE)
    mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, "mode=755,size=1m,nr_inodes=4096")
    for path in (*SYSTEM_PATHS, *DEVICES, *order["readable"]):
        show(path, root + path)
    for path in ("/proc", FOLDER_INSIDE):
        os.makedirs(root + path, exist_ok=True)
    size = order["folder_limit_bytes"]
    limits = f"mode=777,size={size},nr_inodes={MAX_INODES}"
    mount("tmpfs", root + FOLDER_INSIDE, "tmpfs", MS_NOSUID | MS_NODEV, limits)
    if not os.path.lexists(root + "/tmp"):  # unless something under it was to be shown
        os.symlink(FOLDER_INSIDE, root + "/tmp")
    mount("proc", root + "/proc", "proc", MS_NOSUID | MS_NODEV)
    mount(None, root, None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)


def show(path, target):
    """Binds a file or folder read-only; a link stays a link."""
    if os.path.lexists(target) or not os.path.exists(path):
        return
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), target)
        return
    if os.path.isdir(path):
        os.makedirs(target)
    else:
        os.close(os.open(target, os.O_CREAT))
    mount(path, target, None, MS_BIND | MS_REC)
    if path not in DEVICES:
        kept = os.statvfs(target).f_flag & (
            MS_NOSUID | MS_NODEV | 8 | 1024 | 2048
        )  # a user namespace may not drop them
        mount(None, target, None, MS_REMOUNT | MS_BIND | MS_RDONLY | kept)


def filter_program(machine):
    """What the kernel asks about each system call: (operation, jump if true, jump if false, value)."""
    numbers = FILTERED[machine]
    load, equal, at_least, any_bit, end = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, refuse = (end, 0, 0, 0x7FFF0000), (end, 0, 0, 0x00050000 | errno.EACCES)
    first_argument, fourth_argument = 16, 40
    return [
        (load, 0, 0, 4),
        (equal, 1, 0, numbers["architecture"]),
        (end, 0, 0, 0x80000000),  # the calls of another architecture have other numbers: end the process
        (load, 0, 0, 0),
        (at_least, 0, 1, 0x40000000),  # x32
        refuse,
        *(line for number in numbers["refused"] for line in ((equal, 0, 1, number), refuse)),
        (equal, 0, 1, numbers["clone3"]),
        (end, 0, 0, 0x00050000 | errno.ENOSYS),  # its flags cannot be seen; the C library takes clone instead
        (equal, 0, 4, numbers["clone"]),
        (load, 0, 0, first_argument),
        (any_bit, 0, 1, CLONE_NEW),
        refuse,
        allow,
        (equal, 0, 4, numbers["mmap"]),
        (load, 0, 0, fourth_argument),
        (any_bit, 0, 1, 1),  # MAP_SHARED: its pages stay when they are no longer resident in any process
        refuse,
        allow,
        (equal, 0, 3, numbers["socket"]),
        (load, 0, 0, first_argument),
        (equal, 1, 0, 1),  # AF_UNIX
        refuse,
        allow,
    ]


def filter_calls():
    """Makes refused calls fail with "permission denied". Raises KeyError on another kind of machine."""
    program = filter_program(platform.machine())
    code = b"".join(struct.pack("HBBI", *line) for line in program)
    buffer = ctypes.create_string_buffer(code, len(code))

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_void_p))

    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    call("prctl", PR_SET_SECCOMP, 2, ctypes.byref(Program(len(program), ctypes.addressof(buffer))), 0, 0)


def run_command(order, folder, user):
    """Body of the command's process; never returns."""
    try:
        if user is not None:
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.chdir(folder)
        given = os.memfd_create("stdin")
        with open(given, "wb", closefd=False) as file:
            file.write(order["stdin"].encode("utf-8", "surrogatepass"))
        os.lseek(given, 0, os.SEEK_SET)
        os.dup2(given, 0)
        if order["channel"]:
            ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 16) for end in order["channel"]]
            for end, number in zip(ends, CHANNEL, strict=True):
                os.dup2(end, number)
        cpu_s = order["cpu_limit_s"]
        for limit, value in (
            (resource.RLIMIT_CPU, cpu_s),
            (resource.RLIMIT_AS, order["memory_limit_bytes"]),
            (resource.RLIMIT_FSIZE, order["folder_limit_bytes"]),
            (resource.RLIMIT_NPROC, order["num_processes"]),
            (resource.RLIMIT_NOFILE, 64),
            (resource.RLIMIT_CORE, 0),
            (12, 0),  # RLIMIT_MSGQUEUE, which the module does not name
        ):
            most = resource.getrlimit(limit)[1]
            if value is not None and (most == resource.RLIM_INFINITY or value < most):
                resource.setrlimit(limit, (value, value + 1 if limit == resource.RLIMIT_CPU else value))
        with contextlib.suppress(KeyError, OSError):  # it was tried before, and told what is open without it
            filter_calls()
        environment = {"PATH": "/usr/bin:/bin", "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8"}
        os.execve(order["command"][0], order["command"], environment)
    except BaseException as e:  # noqa: BLE001 - this process has no caller; what it met goes to standard error
        os.write(2, f"sandbox: {e!r}".encode())
    finally:
        os._exit(127)


def supervise(order, folder, user, pids):
    """Starts the command, ends it at its limits, and returns what became of it; `pids` says whose memory counts."""
    LIBC.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # what runs under the same user cannot reach the status pipe through /proc
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    for name, text in order["files"].items():
        with open(os.path.join(folder, name), "w", encoding="utf-8", errors="surrogatepass") as file:
            file.write(text)
    deadline = time.monotonic() + order["wall_limit_s"]
    child = os.fork()
    if child == 0:
        run_command(order, folder, user)
    ended_by = None
    while True:
        pid, status, usage = os.wait4(child, os.WNOHANG)
        if pid:
            break
        if ended_by is None and time.monotonic() > deadline:
            ended_by = "timeout"
        elif ended_by is None and resident_bytes(pids()) > order["memory_limit_bytes"]:
            ended_by = "memory"
        if ended_by:
            os.kill(child, signal.SIGKILL)
        signal.sigtimedwait([signal.SIGCHLD], WATCH_S)
    return {
        "ended_by": ended_by,
        "signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else None,
        "exit_code": os.WEXITSTATUS(status) if os.WIFEXITED(status) else None,
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "max_resident_bytes": usage.ru_maxrss * 1024,
    }


def resident_bytes(pids):
    """Memory of their own and shared memory, of all these processes."""
    total_kib = 0
    for pid in pids:
        with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/status") as file:
            for line in file:
                if line.startswith(("RssAnon:", "RssShmem:")):
                    total_kib += int(line.split()[1])
    return total_kib * 1024


def pids_in_namespace():
    """All processes of the namespace but this one."""
    return [name for name in os.listdir("/proc") if name.isdigit() and name != "1"]


def descendants():
    """All processes below this one."""
    found, parents = [], [os.getpid()]
    while parents:
        parents = [child for parent in parents for child in children_of(parent)]
        found += parents
    return found


def children_of(pid):
    found = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children") as file:
                found += [int(word) for word in file.read().split()]
    return found


def end_descendants():
    """Kills what the command left behind where there is no namespace: orphans have become children of this process."""
    while children := children_of(os.getpid()):
        for child in children:
            with contextlib.suppress(OSError):
                os.kill(child, signal.SIGKILL)
        for child in children:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, 0)


def inside(order, root, is_root, status_fd):
    """Body of the namespace's first process."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    build_root(order, root)
    os.chroot(root)
    os.chdir("/")
    user = FIRST_USER + order["owner_pid"] if is_root else None
    report = supervise(order, FOLDER_INSIDE, user, pids_in_namespace)
    os.write(status_fd, json.dumps({**report, "weaknesses": []}).encode())


def outside(order, folder, status_fd, why):
    """Supervises the command where there are no namespaces."""
    LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, lambda *_: (end_descendants(), os._exit(1)))
    user = os.getuid() if os.getuid() else None
    order = {**order, "num_processes": None} if user is None else order
    report = supervise(order, folder, None, descendants)
    end_descendants()
    weaknesses = [
        f"no namespaces ({why})",
        "files that this user may read can be read" + (", and written" if user is None else ", and its own written"),
        "processes of this user can be seen, signalled and, where the kernel lets them trace each other, read",
        "the number of processes is "
        + ("not limited (root)" if user is None else "counted together with this user's others"),
        "files are limited in size each, not in number",
    ]
    if platform.machine() not in ("x86_64", "aarch64"):
        weaknesses.append("the network is open, and memory that no process has mapped is not counted")
    os.write(status_fd, json.dumps({**report, "weaknesses": weaknesses}).encode())


def main():
    order = json.loads(sys.stdin.buffer.read())
    status_fd, folder = order["status_fd"], order["folder"]
    for fd in (status_fd, *order["channel"]):
        os.set_inheritable(fd, False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    order["owner_pid"] = os.getpid()
    try:
        if not order["namespaces"]:
            raise OSError(0, "switched off")
        is_root = enter_namespaces()
    except OSError as e:
        outside(order, folder, status_fd, e.strerror)
        return
    child = os.fork()
    if child == 0:
        try:
            inside(order, folder, is_root, status_fd)
            os._exit(0)
        except BaseException as e:  # noqa: BLE001 - told to the caller, which raises it
            os.write(status_fd, json.dumps({"failed": f"{type(e).__name__}: {e}"}).encode())
        finally:
            os._exit(1)
    os.waitpid(child, 0)


if __name__ == "__main__":
    main()
