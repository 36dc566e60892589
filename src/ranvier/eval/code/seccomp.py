"""Seccomp: the filter of system calls under which programs of `ranvier eval --code` run.

The kernel runs a filter (classic BPF) before each system call of a process and of all that it
starts; it can be tightened and never be taken off. Refused are the calls by which a program could
reach beyond its cell or use what no other limit counts: sockets, System V and POSIX messages,
semaphores and shared memory, memory files, io_uring, namespaces, mounts, keys, other processes'
memory, and what administers the machine. A refused call returns an error and does nothing.

A call of another ABI (32 bits, by `int 0x80`) ends the program, because its number means something
else. A call newer than this table returns ENOSYS, as on a kernel that does not have it. The filter
sees numbers, never what a pointer points to: paths and names are the business of Landlock and of
the namespaces, and `clone3`, whose flags lie in memory, returns ENOSYS; C libraries then use
`clone`.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Sequence
from dataclasses import dataclass

ALLOW, KILL_PROCESS, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
LOAD, AND, EQUAL, GREATER, RETURN = 0x20, 0x54, 0x15, 0x25, 0x06
"""Instructions of classic BPF: A = a word of the call; A &= k; two jumps; the verdict."""
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16
"""Offsets in what the kernel shows of a call; an argument has 8 bytes, its low word first."""
NEWEST = 466
"""The newest call that this table knows: removexattrat, of Linux 6.13."""
NAMESPACES = 0x7E020000
"""Flags of clone that make namespaces: mounts, cgroups, names, messages, users, processes, net."""
WORD = 0xFFFFFFFF

Test = tuple[int, int, int]
"""Argument, mask and value: whether argument & mask = value."""


@dataclass(frozen=True)
class Refusal:
    """A system call by its numbers on x86-64 and in the table that newer architectures share."""

    name: str
    x86_64: int | None
    generic: int | None
    error: int = errno.EPERM
    unless: tuple[tuple[Test, ...], ...] = ()
    """It is let through if all tests of one of these hold."""
    only: tuple[tuple[Test, ...], ...] = ()
    """It is refused only if all tests of one of these hold."""


def _everywhere(names: str, first: int) -> list[Refusal]:
    """Calls that have the same number on all architectures: those from 424 on."""
    return [Refusal(name, first + i, first + i) for i, name in enumerate(names.split())]


REFUSED = (
    # Sockets: a pair of streams cannot be connected to anything else; one of datagrams can.
    Refusal("socket", 41, 198, errno.EACCES),
    Refusal(
        "socketpair",
        53,
        199,
        errno.EACCES,
        unless=(((0, WORD, 1), (1, 0xF, 1)), ((0, WORD, 1), (1, 0xF, 5))),
    ),
    Refusal("connect", 42, 203, errno.EACCES),
    Refusal("accept", 43, 202, errno.EACCES),
    Refusal("accept4", 288, 242, errno.EACCES),
    Refusal("bind", 49, 200, errno.EACCES),
    Refusal("listen", 50, 201, errno.EACCES),
    # Asynchronous input and output: does the work of other calls unseen, or counts for all users.
    *_everywhere("io_uring_setup io_uring_enter io_uring_register", 425),
    Refusal("io_setup", 206, 0),
    Refusal("io_destroy", 207, 1),
    Refusal("io_submit", 209, 2),
    Refusal("io_cancel", 210, 3),
    Refusal("io_getevents", 208, 4),
    Refusal("io_pgetevents", 333, 292),
    # Memory and messages that outlive a process and that its limit of addresses does not count.
    Refusal("shmget", 29, 194),
    Refusal("shmat", 30, 196),
    Refusal("shmctl", 31, 195),
    Refusal("msgget", 68, 186),
    Refusal("msgsnd", 69, 189),
    Refusal("msgrcv", 70, 188),
    Refusal("msgctl", 71, 187),
    Refusal("semget", 64, 190),
    Refusal("semop", 65, 193),
    Refusal("semctl", 66, 191),
    Refusal("semtimedop", 220, 192),
    Refusal("mq_open", 240, 180),
    Refusal("mq_unlink", 241, 181),
    Refusal("mq_timedsend", 242, 182),
    Refusal("mq_timedreceive", 243, 183),
    Refusal("mq_notify", 244, 184),
    Refusal("mq_getsetattr", 245, 185),
    Refusal("memfd_create", 319, 279),
    Refusal("memfd_secret", 447, 447),
    # Namespaces, roots and mounts.
    Refusal("unshare", 272, 97),
    Refusal("setns", 308, 268),
    Refusal("clone", 56, 220, unless=(((0, NAMESPACES, 0),),)),
    Refusal("clone3", 435, 435, errno.ENOSYS),
    Refusal("chroot", 161, 51),
    Refusal("pivot_root", 155, 41),
    Refusal("mount", 165, 40),
    Refusal("umount2", 166, 39),
    *_everywhere("open_tree move_mount fsopen fsconfig fsmount fspick", 428),
    Refusal("mount_setattr", 442, 442),
    Refusal("name_to_handle_at", 303, 264),
    Refusal("open_by_handle_at", 304, 265),
    # Other processes, and what a kernel does for debuggers.
    Refusal("ptrace", 101, 117),
    Refusal("process_vm_readv", 310, 270),
    Refusal("process_vm_writev", 311, 271),
    Refusal("process_madvise", 440, 440),
    Refusal("process_mrelease", 448, 448),
    Refusal("pidfd_getfd", 438, 438),
    Refusal("kcmp", 312, 272),
    Refusal("move_pages", 279, 239),
    Refusal("migrate_pages", 256, 238),
    Refusal("kill", 62, 129, only=(((0, WORD, WORD),),)),  # -1: everybody
    Refusal("prlimit64", 302, 261, unless=(((0, WORD, 0),),)),
    Refusal("setpriority", 141, 140, unless=(((0, WORD, 0), (1, WORD, 0)),)),
    Refusal("ioprio_set", 251, 30),
    Refusal("sched_setparam", 142, 118, unless=(((0, WORD, 0),),)),
    Refusal("sched_setscheduler", 144, 119, unless=(((0, WORD, 0),),)),
    Refusal("sched_setattr", 314, 274, unless=(((0, WORD, 0),),)),
    Refusal("userfaultfd", 323, 282),
    Refusal("perf_event_open", 298, 241),
    Refusal("bpf", 321, 280),
    Refusal("personality", 135, 92, unless=(((0, WORD, 0),), ((0, WORD, WORD),))),
    Refusal("modify_ldt", 154, None),
    # Keys outlive a program; a terminal's input can be written for whoever reads it.
    Refusal("add_key", 248, 217),
    Refusal("request_key", 249, 218),
    Refusal("keyctl", 250, 219),
    Refusal("ioctl", 16, 29, only=(((1, WORD, 0x5412),), ((1, WORD, 0x541C),))),
    # The machine itself: root of a user namespace might be asked less than root.
    Refusal("init_module", 175, 105),
    Refusal("finit_module", 313, 273),
    Refusal("delete_module", 176, 106),
    Refusal("kexec_load", 246, 104),
    Refusal("kexec_file_load", 320, 294),
    Refusal("reboot", 169, 142),
    Refusal("swapon", 167, 224),
    Refusal("swapoff", 168, 225),
    Refusal("acct", 163, 89),
    Refusal("quotactl", 179, 60),
    Refusal("quotactl_fd", 443, 443),
    Refusal("fanotify_init", 300, 262),
    Refusal("fanotify_mark", 301, 263),
    Refusal("settimeofday", 164, 170),
    Refusal("clock_settime", 227, 112),
    Refusal("adjtimex", 159, 171),
    Refusal("clock_adjtime", 305, 266),
    Refusal("sethostname", 170, 161),
    Refusal("setdomainname", 171, 162),
    Refusal("syslog", 103, 116),
    Refusal("vhangup", 153, 58),
    Refusal("lookup_dcookie", 212, 18),
    Refusal("nfsservctl", 180, 42),
    Refusal("iopl", 172, None),
    Refusal("ioperm", 173, None),
    Refusal("uselib", 134, None),
    Refusal("sysfs", 139, None),
    Refusal("_sysctl", 156, None),
)

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7, "riscv64": 0xC00000F3}
"""The audit number of each machine (as `platform.machine` says it) that there is a filter for."""


def filter_program(machine: str) -> bytes | None:
    """The filter of a machine, 8 bytes an instruction; None for one whose numbers are not known."""
    if machine not in ARCHITECTURES:
        return None
    lines = [
        (LOAD, 0, 0, ARCHITECTURE),
        (EQUAL, 1, 0, ARCHITECTURES[machine]),
        (RETURN, 0, 0, KILL_PROCESS),
        (LOAD, 0, 0, NUMBER),
        # x86-64 with short pointers (x32) has numbers of its own, from 2^30 on: refused as well
        (GREATER, 0, 1, NEWEST),
        (RETURN, 0, 0, ERRNO | errno.ENOSYS),
    ]
    for refusal in REFUSED:
        number = refusal.x86_64 if machine == "x86_64" else refusal.generic
        if number is not None:
            body = _verdict(refusal)
            lines += [(EQUAL, 0, len(body), number), *body]
    lines.append((RETURN, 0, 0, ALLOW))
    return b"".join(struct.pack("=HBBI", *line) for line in lines)


def _verdict(refusal: Refusal) -> list[tuple[int, int, int, int]]:
    """What is done with a call, once its number is found."""
    refused = ERRNO | refusal.error
    if refusal.unless:
        return [*_compile_tests(refusal.unless, ALLOW), (RETURN, 0, 0, refused)]
    if refusal.only:
        return [*_compile_tests(refusal.only, refused), (RETURN, 0, 0, ALLOW)]
    return [(RETURN, 0, 0, refused)]


def _compile_tests(ways: Sequence[Sequence[Test]], verdict: int) -> list[tuple[int, int, int, int]]:
    """A verdict for a call that passes all tests of one of several ways."""
    lines = list[tuple[int, int, int, int]]()
    for tests in ways:
        for place, (argument, mask, value) in enumerate(tests):
            rest = 3 * (len(tests) - place - 1) + 1  # the other tests of this way, its verdict
            lines += [
                (LOAD, 0, 0, ARGUMENTS + 8 * argument),
                (AND, 0, 0, mask),
                (EQUAL, 0, rest, value),
            ]
        lines.append((RETURN, 0, 0, verdict))
    return lines
