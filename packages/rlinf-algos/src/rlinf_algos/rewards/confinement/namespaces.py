"""Namespaces of the program's own, and the root folder that it sees in them."""

from __future__ import annotations

import contextlib
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
MAX_FILES = 4096
"""Files in the working folder; each costs the kernel about 1 KiB."""


def enter(can_change_user: bool) -> bool:
    """True as root of the machine, who can change users; False in a user namespace.

    Raises:
        OSError: the kernel allows neither.
    """
    if can_change_user:
        with contextlib.suppress(OSError):
            call("unshare", NAMESPACES)
            return True
    user, group = os.getuid(), os.getgid()
    call("unshare", NAMESPACES | CLONE_NEWUSER)
    for name, text in (("setgroups", "deny"), ("uid_map", f"65534 {user} 1"), ("gid_map", f"65534 {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    return False


def build_root(root: str, readable: Sequence[str], folder_bytes: int) -> None:
    """A root folder in memory at the mount point `root`, and everything read-only but the working folder."""
    _mount(None, "/", None, MS_REC | MS_PRIVATE)
    _mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, "mode=755,size=1m,nr_inodes=4096")
    for path in (*SYSTEM_PATHS, *DEVICES, *readable):
        _show(path, root + path)
    for path in ("/proc", FOLDER_INSIDE):
        os.makedirs(root + path, exist_ok=True)
    limits = f"mode=777,size={folder_bytes},nr_inodes={MAX_FILES}"
    _mount("tmpfs", root + FOLDER_INSIDE, "tmpfs", MS_NOSUID | MS_NODEV, limits)
    if not os.path.lexists(root + "/tmp"):  # unless something under it was to be shown
        os.symlink(FOLDER_INSIDE, root + "/tmp")
    _mount("proc", root + "/proc", "proc", MS_NOSUID | MS_NODEV)
    _mount(None, root, None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str = "") -> None:
    call("mount", *(text.encode() if text else None for text in (source, target, kind)), flags, options.encode())


def _show(path: str, target: str) -> None:
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
    _mount(path, target, None, MS_BIND | MS_REC)
    if path not in DEVICES:  # a user namespace may not drop the flags of the mount below
        present = os.statvfs(target).f_flag & (MS_NOSUID | MS_NODEV | MS_NOEXEC | MS_NOATIME | MS_NODIRATIME)
        _mount(None, target, None, MS_REMOUNT | MS_BIND | MS_RDONLY | present)
