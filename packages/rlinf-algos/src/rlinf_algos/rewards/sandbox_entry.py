"""The program that locks itself in and then runs one command for a `Sandbox`. Runs as a script: `python -I`.

Reads its order (JSON) from standard input. Where the kernel allows it, the command gets namespaces of its own:
- network: not even a loopback that is up;
- processes: it sees and can signal only its own, and all of them end with it;
- files: a root of its own with read-only views of the system's programs and of the interpreter, and an empty working
  folder in memory, of limited size;
- as root it runs under a user number that owns nothing.
Where it does not, a filter of system calls keeps it from opening sockets, and what is left unprotected is reported.
Writes one JSON line to the status pipe when the command has ended.
"""

import contextlib
import ctypes
import errno
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
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
FOLDER_INSIDE = "/sandbox"
FIRST_USER = 0x4000_0000
"""User numbers from here on belong to nobody."""
WATCH_S = 0.02
"""Between two looks at the memory of all processes together."""


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
    mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, "mode=755,size=1m")
    for path in (*SYSTEM_PATHS, *DEVICES, *order["readable"]):
        show(path, root + path)
    for path in ("/proc", FOLDER_INSIDE):
        os.makedirs(root + path, exist_ok=True)
    size = order["folder_limit_bytes"]
    mount("tmpfs", root + FOLDER_INSIDE, "tmpfs", MS_NOSUID | MS_NODEV, f"mode=777,size={size}")
    if not os.path.lexists(root + "/tmp"):  # unless something under it was to be shown
        os.symlink(FOLDER_INSIDE, root + "/tmp")
    mount("proc", root + "/proc", "proc", MS_NOSUID | MS_NODEV)


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


def forbid_sockets():
    """A filter under which `socket` fails with "permission denied" for every family but AF_UNIX."""
    architecture, number = {"x86_64": (0xC000003E, 41), "aarch64": (0xC00000B7, 198)}[platform.machine()]
    program = [
        (0x20, 0, 0, 4),  # load the architecture
        (0x15, 1, 0, architecture),  # ours: skip one
        (0x06, 0, 0, 0x80000000),  # another: end the process
        (0x20, 0, 0, 0),  # load the call's number
        (0x35, 4, 0, 0x40000000),  # x32 numbers: refuse
        (0x15, 4, 0, 425),  # io_uring_setup, which opens sockets too: refuse
        (0x15, 0, 2, number),  # not socket: allow
        (0x20, 0, 0, 16),  # load its first argument
        (0x15, 0, 1, 1),  # AF_UNIX: allow, others: refuse
        (0x06, 0, 0, 0x7FFF0000),
        (0x06, 0, 0, 0x00050000 | errno.EACCES),
    ]
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
        cpu_s = order["cpu_limit_s"]
        for limit, value in (
            (resource.RLIMIT_CPU, cpu_s),
            (resource.RLIMIT_AS, order["memory_limit_bytes"]),
            (resource.RLIMIT_FSIZE, order["folder_limit_bytes"]),
            (resource.RLIMIT_NPROC, order["num_processes"]),
            (resource.RLIMIT_NOFILE, 64),
            (resource.RLIMIT_CORE, 0),
        ):
            most = resource.getrlimit(limit)[1]
            if value is not None and (most == resource.RLIM_INFINITY or value < most):
                resource.setrlimit(limit, (value, value + 1 if limit == resource.RLIMIT_CPU else value))
        with contextlib.suppress(KeyError, OSError):
            forbid_sockets()
        environment = {"PATH": "/usr/bin:/bin", "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8"}
        os.execve(order["command"][0], order["command"], environment)
    except BaseException as e:  # noqa: BLE001 - this process has no caller; what it met goes to standard error
        os.write(2, f"sandbox: {e!r}".encode())
    finally:
        os._exit(127)


def supervise(order, folder, user, num_visible):
    """Starts the command, ends it at its limits, and returns what became of it."""
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
        elif ended_by is None and num_visible and resident_bytes() > order["memory_limit_bytes"]:
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


def resident_bytes():
    """Of all processes in the namespace but this one."""
    total = 0
    for name in os.listdir("/proc"):
        if name.isdigit() and name != "1":
            with contextlib.suppress(OSError, IndexError), open(f"/proc/{name}/statm") as file:
                fields = file.read().split()
                total += (int(fields[1]) - int(fields[2])) * resource.getpagesize()
    return total


def end_descendants():
    """Without a namespace: kills what the command has left behind; orphans have become children of this process."""
    while True:
        try:
            with open(f"/proc/self/task/{os.getpid()}/children") as file:
                children = [int(word) for word in file.read().split()]
        except OSError:
            return
        if not children:
            return
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
    report = supervise(order, FOLDER_INSIDE, user, num_visible=True)
    os.write(status_fd, json.dumps({**report, "weaknesses": []}).encode())


def outside(order, folder, status_fd, why):
    """Without namespaces."""
    LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, lambda *_: (end_descendants(), os._exit(1)))
    user = os.getuid() if os.getuid() else None
    order = {**order, "num_processes": None} if user is None else order
    report = supervise(order, folder, None, num_visible=False)
    end_descendants()
    weaknesses = [
        f"no namespaces ({why})",
        "files that this user may read can be read" + (", and written" if user is None else ", and its own written"),
        "processes of this user can be seen and signalled",
        "the number of processes is "
        + ("not limited (root)" if user is None else "counted together with this user's others"),
        "memory is limited for each process, not for all together",
    ]
    if platform.machine() not in ("x86_64", "aarch64"):
        weaknesses.append("the network is open")
    os.write(status_fd, json.dumps({**report, "weaknesses": weaknesses}).encode())


def main():
    order = json.loads(sys.stdin.buffer.read())
    status_fd, folder = order["status_fd"], order["folder"]
    os.set_inheritable(status_fd, False)
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
