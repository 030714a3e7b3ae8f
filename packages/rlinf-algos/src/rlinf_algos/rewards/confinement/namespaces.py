"""Separate namespaces for the program, and the root folder that it sees in them."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Sequence

from .system import call

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
NAMESPACES = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 32, 4096, 1 << 14, 1 << 18
MS_NOEXEC, MS_NOATIME, MS_NODIRATIME = 8, 1024, 2048
SYSTEM_PATHS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives")
DEVICES = ("/dev/null", "/dev/full", "/dev/random", "/dev/urandom")
FOLDER_INSIDE = "/sandbox"
USER_INSIDE = 65534
"""The program's user and group in a user namespace: nobody."""
MAX_FILES = 4096
"""Maximum number of files in the working folder; each takes about 1 KiB of kernel memory."""


def enter(users: tuple[int, int] | None) -> int | None:
    """Enters new namespaces; returns the program's user number in them, None for this process's own.

    Args:
        users: two unused user numbers, the first for the program; None if this process may not change users.

    Raises:
        OSError: the kernel does not allow it.
    """
    if users is None:
        user, group = os.getuid(), os.getgid()
        call("unshare", NAMESPACES | CLONE_NEWUSER)
        _write_maps("self", f"{USER_INSIDE} {user} 1", f"{USER_INSIDE} {group} 1", may_set_groups=False)
        return None
    with contextlib.suppress(OSError):
        call("unshare", NAMESPACES)
        return users[0]
    _enter_with_users(users[0])
    return USER_INSIDE


def _enter_with_users(user: int) -> None:
    """Enters namespaces in which root stays root, so that the interpreter's folder can be read, and the program is that
    user. A program that is root outside could write to /proc/sys and start any number of processes."""
    entered, proceed = os.pipe()
    target = os.getpid()
    helper = os.fork()  # a process outside must write the map of a user namespace
    if helper == 0:
        try:
            os.close(proceed)
            text = f"0 0 1\n{USER_INSIDE} {user} 1"
            if os.read(entered, 1):
                _write_maps(str(target), text, text, may_set_groups=True)
                os._exit(0)
        finally:
            os._exit(1)
    os.close(entered)
    try:
        call("unshare", NAMESPACES | CLONE_NEWUSER)
        os.write(proceed, b"x")
    finally:
        os.close(proceed)
        status = os.waitpid(helper, 0)[1]
    if status != 0:
        raise PermissionError(errno.EPERM, "the users of a user namespace cannot be set")


def _write_maps(process: str, users: str, groups: str, *, may_set_groups: bool) -> None:
    if not may_set_groups:
        with open(f"/proc/{process}/setgroups", "w") as file:
            file.write("deny")
    for name, text in (("uid_map", users), ("gid_map", groups)):
        with open(f"/proc/{process}/{name}", "w") as file:
            file.write(text)


def build_root(root: str, readable: Sequence[str], folder_bytes: int) -> None:
    """Mounts a root folder in memory at `root`, in which everything but the working folder is read-only."""
    _mount(None, "/", None, MS_REC | MS_PRIVATE)
    _mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, "mode=755,size=1m,nr_inodes=4096")
    for path in (*SYSTEM_PATHS, *DEVICES, *readable):
        _show(path, root + path)
    for path in ("/proc", FOLDER_INSIDE):
        os.makedirs(root + path, exist_ok=True)
    limits = f"mode=777,size={folder_bytes},nr_inodes={MAX_FILES}"
    _mount("tmpfs", root + FOLDER_INSIDE, "tmpfs", MS_NOSUID | MS_NODEV, limits)
    if not os.path.lexists(root + "/tmp"):  # unless a folder below it is shown
        os.symlink(FOLDER_INSIDE, root + "/tmp")
    _mount("proc", root + "/proc", "proc", MS_RDONLY | MS_NOSUID | MS_NODEV)
    _mount(None, root, None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str = "") -> None:
    call("mount", *(text.encode() if text else None for text in (source, target, kind)), flags, options.encode())


def _show(path: str, target: str) -> None:
    """Mounts a file or folder read-only; a link stays a link."""
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
    _mount(path, target, None, MS_BIND | MS_REC)
    if path not in DEVICES:  # a user namespace may not drop the flags of the mount below
        present = os.statvfs(target).f_flag & (MS_NOSUID | MS_NODEV | MS_NOEXEC | MS_NOATIME | MS_NODIRATIME)
        _mount(None, target, None, MS_REMOUNT | MS_BIND | MS_RDONLY | present)
