"""The filter of system calls (seccomp) that a program runs under, on x86-64 and ARM.

Refused calls fail with "permission denied". `REFUSED` always applies: other processes' memory, namespaces and mounts,
sockets, flushing all users' files to the disk (sync), and whatever holds memory that no process is charged for (memfd,
System V, rings of io_uring and aio, pages that were spliced into pipes, records of watches and rules, descriptors in
flight).

`REFUSED_WEAK` and `PRETENDED_WEAK` also apply if there are no namespaces: the watch over the working folder must see
every file that was created, what Landlock does not cover (modes, owners, times, attributes) must not change, and file
locks cannot be counted there. So calls that delete files do nothing but succeed, for `tempfile` and similar code: a
deleted file that is still open would be invisible. If other processes have the same user as the program
(`signals_itself_only`), it cannot signal them.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

from .system import PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, call, prctl

Instruction = tuple[int, int, int, int]
"""Operation, jump offset if true, jump offset if false, value."""

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
ABSENT = -1
"""Placeholder for a call that a machine does not have."""

NUMBERS = {
    "add_key": (248, 217), "bpf": (321, 280), "chmod": (90, ABSENT), "chown": (92, ABSENT), "chroot": (161, 51),
    "clone": (56, 220), "clone3": (435, 435), "fanotify_init": (300, 262), "fchmod": (91, 52),
    "fchmodat": (268, 53), "fchmodat2": (452, 452), "fchown": (93, 55), "fchownat": (260, 54), "fcntl": (72, 25),
    "fgetxattr": (193, 10), "file_setattr": (469, 469), "flistxattr": (196, 13), "fremovexattr": (199, 16),
    "fsconfig": (431, 431), "fsetxattr": (190, 7), "fsmount": (432, 432), "fsopen": (430, 430), "fspick": (433, 433),
    "futimesat": (261, ABSENT), "getxattr": (191, 8), "getxattrat": (464, 464), "inotify_add_watch": (254, 27),
    "io_setup": (206, 0), "io_uring_setup": (425, 425), "ioctl": (16, 29), "ioprio_set": (251, 30),
    "kcmp": (312, 272), "keyctl": (250, 219), "kill": (62, 129), "landlock_add_rule": (445, 445),
    "landlock_create_ruleset": (444, 444), "lchown": (94, ABSENT), "lgetxattr": (192, 9), "link": (86, ABSENT),
    "linkat": (265, 37), "listxattr": (194, 11), "listxattrat": (465, 465), "llistxattr": (195, 12),
    "lremovexattr": (198, 15), "lsetxattr": (189, 6), "memfd_create": (319, 279), "memfd_secret": (447, 447),
    "migrate_pages": (256, 238), "mmap": (9, 222), "mount": (165, 40), "mount_setattr": (442, 442),
    "move_mount": (429, 429), "move_pages": (279, 239), "mq_open": (240, 180), "msgget": (68, 186),
    "name_to_handle_at": (303, 264), "open": (2, ABSENT), "open_by_handle_at": (304, 265), "open_tree": (428, 428),
    "open_tree_attr": (467, 467), "openat": (257, 56), "openat2": (437, 437), "perf_event_open": (298, 241),
    "pidfd_getfd": (438, 438), "pidfd_send_signal": (424, 424), "pivot_root": (155, 41), "prlimit64": (302, 261),
    "process_madvise": (440, 440), "process_mrelease": (448, 448), "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271), "ptrace": (101, 117), "removexattr": (197, 14), "removexattrat": (466, 466),
    "rename": (82, ABSENT), "renameat": (264, 38), "renameat2": (316, 276), "request_key": (249, 218),
    "rmdir": (84, ABSENT), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
    "sched_setaffinity": (203, 122), "sched_setattr": (314, 274), "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119), "semget": (64, 190), "sendmmsg": (307, 269), "sendmsg": (46, 211),
    "setns": (308, 268), "setpriority": (141, 140), "setxattr": (188, 5), "setxattrat": (463, 463),
    "shmat": (30, 196), "shmctl": (31, 195), "shmget": (29, 194), "socket": (41, 198), "socketpair": (53, 199),
    "splice": (275, 76), "sync": (162, 81), "syncfs": (306, 267), "syslog": (103, 116),
    "tee": (276, 77), "tgkill": (234, 131), "tkill": (200, 130),
    "truncate": (76, 45), "umount2": (166, 39), "unlink": (87, ABSENT), "unlinkat": (263, 35), "unshare": (272, 97),
    "userfaultfd": (323, 282), "utime": (132, ABSENT), "utimensat": (280, 88), "utimes": (235, ABSENT),
    "vmsplice": (278, 75),
}  # fmt: skip
"""Name -> number on x86-64 and on ARM."""
NEWEST = 470
"""Calls from this number on did not exist when this was written; they fail as if the kernel did not have them."""

REFUSED = (
    "add_key", "bpf", "chroot", "fanotify_init", "fsconfig", "fsmount", "fsopen", "fspick", "inotify_add_watch",
    "io_setup", "io_uring_setup", "ioprio_set", "kcmp", "keyctl", "landlock_add_rule", "landlock_create_ruleset",
    "memfd_create", "memfd_secret", "migrate_pages", "mount", "mount_setattr", "move_mount", "move_pages", "mq_open",
    "msgget", "name_to_handle_at", "open_by_handle_at", "open_tree", "open_tree_attr", "perf_event_open",
    "pidfd_getfd", "pivot_root", "process_madvise", "process_mrelease", "process_vm_readv", "process_vm_writev",
    "ptrace", "request_key", "semget", "sendmmsg", "sendmsg", "setns", "shmat", "shmctl", "shmget", "socket",
    "splice", "sync", "syncfs", "syslog", "tee", "umount2", "unshare", "userfaultfd", "vmsplice",
)  # fmt: skip
REFUSED_WEAK = (
    "chmod", "chown", "fchmod", "fchmodat", "fchmodat2", "fchown", "fchownat", "fgetxattr", "file_setattr",
    "flistxattr", "fremovexattr", "fsetxattr", "futimesat", "getxattr", "getxattrat", "lchown", "lgetxattr", "link",
    "linkat", "listxattr", "listxattrat", "llistxattr", "lremovexattr", "lsetxattr", "removexattr", "removexattrat",
    "rename", "renameat", "renameat2", "setxattr", "setxattrat", "truncate", "utime", "utimensat", "utimes",
)  # fmt: skip
PRETENDED_WEAK = ("rmdir", "unlink", "unlinkat")
REFUSED_SIGNALS = ("pidfd_send_signal", "rt_sigqueueinfo", "rt_tgsigqueueinfo", "tkill")

CLONE_NEW = 0x7E020000
"""Every flag of clone that creates a namespace."""
MAP_SHARED = 1
"""Shared pages stay allocated even if no process has them resident."""
O_TMPFILE = 0o20000000
AF_UNIX = 1
SOCK_DGRAM = 2
"""A bit of SOCK_DGRAM and SOCK_RAW, but not of SOCK_STREAM and SOCK_SEQPACKET: with it a socket can send to any
address."""
F_LOCKS = (6, 7, 37, 38)
"""F_SETLK, F_SETLKW and their F_OFD forms: the kernel keeps a record of each lock, without a limit."""
F_OWNERS = (8, 15)
"""F_SETOWN, F_SETOWN_EX: the kernel sends signals to the process that they name."""
F_OTHERS = (1026, 1031)
"""F_NOTIFY, F_SETPIPE_SZ."""
IOCTL_OWNERS = (0x8901, 0x8902)
"""FIOSETOWN, SIOCSPGRP."""
LOAD, EQUAL, AT_LEAST, ANY_BIT, END = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER_OFFSET, ARCHITECTURE_OFFSET, ARGUMENTS_OFFSET = 0, 4, 16
ALLOW: Instruction = (END, 0, 0, 0x7FFF0000)
KILL: Instruction = (END, 0, 0, 0x80000000)


def fail(number: int) -> Instruction:
    """The call fails with this error."""
    return (END, 0, 0, 0x00050000 | number)


REFUSE, PRETEND_ABSENT, PRETEND_DONE = fail(errno.EACCES), fail(errno.ENOSYS), fail(0)


def is_supported() -> bool:
    """Whether the table above has the calls of this machine."""
    return os.uname().machine in ARCHITECTURES


def filter_program(machine: str, *, is_weak: bool = False, signals_itself_only: int | None = None) -> list[Instruction]:
    """The filter that the kernel evaluates for each system call.

    Args:
        signals_itself_only: a process number; signals to any other process are refused.

    Raises:
        KeyError: the filter does not support this machine.
    """
    column = tuple(ARCHITECTURES).index(machine)
    refused = REFUSED + (REFUSED_WEAK if is_weak else ()) + (REFUSED_SIGNALS if signals_itself_only else ())
    program = [
        (LOAD, 0, 0, ARCHITECTURE_OFFSET),
        (EQUAL, 1, 0, ARCHITECTURES[machine]),
        KILL,  # the calls of another architecture have other numbers
        (LOAD, 0, 0, NUMBER_OFFSET),
        (AT_LEAST, 0, 1, NEWEST),  # also refuses x32
        PRETEND_ABSENT,
    ]
    conditions = {
        **{name: [REFUSE] for name in refused},
        **_conditions(is_weak=is_weak, own_number=signals_itself_only),
    }
    for name, body in conditions.items():
        if (number := NUMBERS[name][column]) != ABSENT:
            program += [(EQUAL, 0, len(body), number), *body]
    return [*program, ALLOW]


def _conditions(*, is_weak: bool, own_number: int | None) -> dict[str, list[Instruction]]:
    """Rules for calls whose decision depends on their arguments or on the mode; each list ends in a decision."""
    commands = (*F_OTHERS, *(F_LOCKS if is_weak else ()), *(F_OWNERS if own_number else ()))
    rules = {
        "clone3": [PRETEND_ABSENT],  # a filter cannot read its flags; the C library falls back to clone
        "clone": [*_refuse_bits(0, CLONE_NEW), ALLOW],
        "mmap": [*_refuse_bits(3, MAP_SHARED), ALLOW],
        "fcntl": [*_refuse_values(1, commands), ALLOW],
        "socketpair": [*_only_values(0, (AF_UNIX,)), *_refuse_bits(1, SOCK_DGRAM), ALLOW],
        # limits, priorities and cores of the calling process or thread only
        "prlimit64": [*_only_values(0, (0,)), ALLOW],
        "setpriority": [*_only_values(0, (0,)), *_only_values(1, (0,)), ALLOW],
        "sched_setaffinity": [*_only_values(0, (0,)), ALLOW],
        "sched_setattr": [*_only_values(0, (0,)), ALLOW],
        "sched_setparam": [*_only_values(0, (0,)), ALLOW],
        "sched_setscheduler": [*_only_values(0, (0,)), ALLOW],
    }
    if is_weak:  # the watch over the working folder cannot see a file without a name
        rules |= {
            **{name: [PRETEND_DONE] for name in PRETENDED_WEAK},
            "open": [*_refuse_bits(1, O_TMPFILE), ALLOW],
            "openat": [*_refuse_bits(2, O_TMPFILE), ALLOW],
            "openat2": [PRETEND_ABSENT],
        }
    if own_number:
        rules |= {
            "kill": [*_only_values(0, (0, own_number)), ALLOW],
            "tgkill": [*_only_values(0, (own_number,)), ALLOW],
            "ioctl": [*_refuse_values(1, IOCTL_OWNERS), ALLOW],
        }
    return rules


def _argument(index: int) -> Instruction:
    """Loads the low half of an argument, which contains a whole `int`."""
    return (LOAD, 0, 0, ARGUMENTS_OFFSET + 8 * index)


def _refuse_bits(index: int, bits: int) -> list[Instruction]:
    return [_argument(index), (ANY_BIT, 0, 1, bits), REFUSE]


def _refuse_values(index: int, values: tuple[int, ...]) -> list[Instruction]:
    return [_argument(index), *(line for value in values for line in ((EQUAL, 0, 1, value), REFUSE))]


def _only_values(index: int, values: tuple[int, ...]) -> list[Instruction]:
    jumps = [(EQUAL, len(values) - i, 0, value) for i, value in enumerate(values)]
    return [_argument(index), *jumps, REFUSE]


def install(*, is_weak: bool, signals_itself_only: int | None) -> None:
    """Applies the filter to this process and all processes that it starts.

    Raises:
        OSError: the kernel has no seccomp.
    """
    program = filter_program(os.uname().machine, is_weak=is_weak, signals_itself_only=signals_itself_only)
    code = b"".join(struct.pack("HBBI", *line) for line in program)
    buffer = ctypes.create_string_buffer(code, len(code))

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_void_p))

    prctl(PR_SET_NO_NEW_PRIVS, 1)
    call("prctl", PR_SET_SECCOMP, 2, ctypes.byref(Program(len(program), ctypes.addressof(buffer))), 0, 0)
