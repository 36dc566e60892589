"""Seccomp: the system call filter under which programs of `ranvier eval --code` run.

The kernel runs a filter (classic BPF) before each system call of a process and of all its children;
a filter can be tightened but never removed. It refuses calls by which a program could reach beyond
its sandbox or use resources that no other limit counts: sockets, System V and POSIX messages,
semaphores and shared memory, memory files, io_uring, namespaces, mounts, keys, other processes'
memory, and administration of the machine. A refused call returns an error and does nothing.

A call of another ABI (32 bits, by `int 0x80`) kills the program, because its number means something
else. A call newer than this table returns ENOSYS, as on a kernel that does not have it. The filter
sees numbers, never the memory behind a pointer. So paths and names are left to Landlock and the
namespaces, and `clone3`, whose flags are in memory, returns ENOSYS; C libraries then use `clone`.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Sequence
from dataclasses import dataclass

ALLOW = 0x7FFF0000
KILL_PROCESS = 0x80000000
ERRNO = 0x00050000
LOAD = 0x20
AND = 0x54
EQUAL = 0x15
GREATER = 0x25
RETURN = 0x06
"""Instructions of classic BPF: A = a word of the call; A &= k; two jumps; the verdict."""
NUMBER_OFFSET = 0
ARCHITECTURE_OFFSET = 4
ARGUMENTS_OFFSET = 16
"""Offsets in struct seccomp_data; an argument has 8 bytes, its low word first."""
NEWEST_CALL = 466
"""The newest call in this table: removexattrat, of Linux 6.13."""
NAMESPACE_FLAGS = 0x7E020000
"""Flags of clone that create namespaces: mounts, cgroups, UTS, IPC, users, processes, network."""
WORD_MASK = 0xFFFFFFFF

ArgumentTest = tuple[int, int, int]
"""Argument, mask and value: tests whether argument & mask == value."""


@dataclass(frozen=True)
class RefusedCall:
    """A system call by its numbers on x86-64 and in the generic table of newer architectures."""

    name: str
    x86_64: int | None
    generic: int | None
    error: int = errno.EPERM
    allowed_if: tuple[tuple[ArgumentTest, ...], ...] = ()
    """The call is allowed if all tests of one of these hold."""
    refused_if: tuple[tuple[ArgumentTest, ...], ...] = ()
    """The call is refused only if all tests of one of these hold."""


def _calls_numbered_from(names: str, first: int) -> list[RefusedCall]:
    """Returns calls that have the same number on all architectures: all calls from 424 on."""
    return [RefusedCall(name, first + i, first + i) for i, name in enumerate(names.split())]


REFUSED_CALLS = (
    # Sockets. A socketpair of streams (or of seqpackets) cannot be connected to anything else and
    # is allowed; one of datagrams can.
    RefusedCall("socket", 41, 198, errno.EACCES),
    RefusedCall(
        "socketpair",
        53,
        199,
        errno.EACCES,
        allowed_if=(((0, WORD_MASK, 1), (1, 0xF, 1)), ((0, WORD_MASK, 1), (1, 0xF, 5))),
    ),
    RefusedCall("connect", 42, 203, errno.EACCES),
    RefusedCall("accept", 43, 202, errno.EACCES),
    RefusedCall("accept4", 288, 242, errno.EACCES),
    RefusedCall("bind", 49, 200, errno.EACCES),
    RefusedCall("listen", 50, 201, errno.EACCES),
    # Asynchronous I/O, which does the work of other calls unseen by the filter, or counts for all
    # users.
    *_calls_numbered_from("io_uring_setup io_uring_enter io_uring_register", 425),
    RefusedCall("io_setup", 206, 0),
    RefusedCall("io_destroy", 207, 1),
    RefusedCall("io_submit", 209, 2),
    RefusedCall("io_cancel", 210, 3),
    RefusedCall("io_getevents", 208, 4),
    RefusedCall("io_pgetevents", 333, 292),
    # Memory and messages that outlive a process and do not count towards its address space limit.
    RefusedCall("shmget", 29, 194),
    RefusedCall("shmat", 30, 196),
    RefusedCall("shmctl", 31, 195),
    RefusedCall("msgget", 68, 186),
    RefusedCall("msgsnd", 69, 189),
    RefusedCall("msgrcv", 70, 188),
    RefusedCall("msgctl", 71, 187),
    RefusedCall("semget", 64, 190),
    RefusedCall("semop", 65, 193),
    RefusedCall("semctl", 66, 191),
    RefusedCall("semtimedop", 220, 192),
    RefusedCall("mq_open", 240, 180),
    RefusedCall("mq_unlink", 241, 181),
    RefusedCall("mq_timedsend", 242, 182),
    RefusedCall("mq_timedreceive", 243, 183),
    RefusedCall("mq_notify", 244, 184),
    RefusedCall("mq_getsetattr", 245, 185),
    RefusedCall("memfd_create", 319, 279),
    RefusedCall("memfd_secret", 447, 447),
    # Namespaces, roots and mounts.
    RefusedCall("unshare", 272, 97),
    RefusedCall("setns", 308, 268),
    RefusedCall("clone", 56, 220, allowed_if=(((0, NAMESPACE_FLAGS, 0),),)),
    RefusedCall("clone3", 435, 435, errno.ENOSYS),
    RefusedCall("chroot", 161, 51),
    RefusedCall("pivot_root", 155, 41),
    RefusedCall("mount", 165, 40),
    RefusedCall("umount2", 166, 39),
    *_calls_numbered_from("open_tree move_mount fsopen fsconfig fsmount fspick", 428),
    RefusedCall("mount_setattr", 442, 442),
    RefusedCall("name_to_handle_at", 303, 264),
    RefusedCall("open_by_handle_at", 304, 265),
    # Other processes, and kernel features for debuggers. Calls with a process id are allowed for 0,
    # the caller itself.
    RefusedCall("ptrace", 101, 117),
    RefusedCall("process_vm_readv", 310, 270),
    RefusedCall("process_vm_writev", 311, 271),
    RefusedCall("process_madvise", 440, 440),
    RefusedCall("process_mrelease", 448, 448),
    RefusedCall("pidfd_getfd", 438, 438),
    RefusedCall("kcmp", 312, 272),
    RefusedCall("move_pages", 279, 239),
    RefusedCall("migrate_pages", 256, 238),
    # Process id -1 means every process.
    RefusedCall("kill", 62, 129, refused_if=(((0, WORD_MASK, WORD_MASK),),)),
    RefusedCall("prlimit64", 302, 261, allowed_if=(((0, WORD_MASK, 0),),)),
    RefusedCall("setpriority", 141, 140, allowed_if=(((0, WORD_MASK, 0), (1, WORD_MASK, 0)),)),
    RefusedCall("ioprio_set", 251, 30),
    RefusedCall("sched_setparam", 142, 118, allowed_if=(((0, WORD_MASK, 0),),)),
    RefusedCall("sched_setscheduler", 144, 119, allowed_if=(((0, WORD_MASK, 0),),)),
    RefusedCall("sched_setattr", 314, 274, allowed_if=(((0, WORD_MASK, 0),),)),
    RefusedCall("userfaultfd", 323, 282),
    RefusedCall("perf_event_open", 298, 241),
    RefusedCall("bpf", 321, 280),
    RefusedCall(
        "personality", 135, 92, allowed_if=(((0, WORD_MASK, 0),), ((0, WORD_MASK, WORD_MASK),))
    ),
    RefusedCall("modify_ldt", 154, None),
    # Keys outlive a program; TIOCSTI (0x5412) and TIOCLINUX (0x541C) can inject input into a
    # terminal.
    RefusedCall("add_key", 248, 217),
    RefusedCall("request_key", 249, 218),
    RefusedCall("keyctl", 250, 219),
    RefusedCall("ioctl", 16, 29, refused_if=(((1, WORD_MASK, 0x5412),), ((1, WORD_MASK, 0x541C),))),
    # Administration of the machine: checks may be weaker for root of a user namespace than for
    # root.
    RefusedCall("init_module", 175, 105),
    RefusedCall("finit_module", 313, 273),
    RefusedCall("delete_module", 176, 106),
    RefusedCall("kexec_load", 246, 104),
    RefusedCall("kexec_file_load", 320, 294),
    RefusedCall("reboot", 169, 142),
    RefusedCall("swapon", 167, 224),
    RefusedCall("swapoff", 168, 225),
    RefusedCall("acct", 163, 89),
    RefusedCall("quotactl", 179, 60),
    RefusedCall("quotactl_fd", 443, 443),
    RefusedCall("fanotify_init", 300, 262),
    RefusedCall("fanotify_mark", 301, 263),
    RefusedCall("settimeofday", 164, 170),
    RefusedCall("clock_settime", 227, 112),
    RefusedCall("adjtimex", 159, 171),
    RefusedCall("clock_adjtime", 305, 266),
    RefusedCall("sethostname", 170, 161),
    RefusedCall("setdomainname", 171, 162),
    RefusedCall("syslog", 103, 116),
    RefusedCall("vhangup", 153, 58),
    RefusedCall("lookup_dcookie", 212, 18),
    RefusedCall("nfsservctl", 180, 42),
    RefusedCall("iopl", 172, None),
    RefusedCall("ioperm", 173, None),
    RefusedCall("uselib", 134, None),
    RefusedCall("sysfs", 139, None),
    RefusedCall("_sysctl", 156, None),
)

AUDIT_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7, "riscv64": 0xC00000F3}
"""The audit number of each architecture (as in `platform.machine`) that has a filter."""


def build_filter(machine: str) -> bytes | None:
    """Returns the filter of an architecture, 8 bytes per instruction; None if it is not
    supported."""
    if machine not in AUDIT_ARCHITECTURES:
        return None
    lines = [
        (LOAD, 0, 0, ARCHITECTURE_OFFSET),
        (EQUAL, 1, 0, AUDIT_ARCHITECTURES[machine]),
        (RETURN, 0, 0, KILL_PROCESS),
        (LOAD, 0, 0, NUMBER_OFFSET),
        # The x32 ABI of x86-64 has its own numbers, from 2^30 on, which this test also refuses.
        (GREATER, 0, 1, NEWEST_CALL),
        (RETURN, 0, 0, ERRNO | errno.ENOSYS),
    ]
    for refusal in REFUSED_CALLS:
        if machine == "x86_64":
            number = refusal.x86_64
        else:
            number = refusal.generic
        if number is not None:
            body = _compile_verdict(refusal)
            # On a match the body decides, otherwise it is jumped over.
            lines += [(EQUAL, 0, len(body), number), *body]
    lines.append((RETURN, 0, 0, ALLOW))
    return b"".join(struct.pack("=HBBI", *line) for line in lines)


def _compile_verdict(refusal: RefusedCall) -> list[tuple[int, int, int, int]]:
    """Returns the instructions for a call whose number matches."""
    refused = ERRNO | refusal.error
    if refusal.allowed_if:
        return [*_compile_tests(refusal.allowed_if, ALLOW), (RETURN, 0, 0, refused)]
    if refusal.refused_if:
        return [*_compile_tests(refusal.refused_if, refused), (RETURN, 0, 0, ALLOW)]
    return [(RETURN, 0, 0, refused)]


def _compile_tests(
    ways: Sequence[Sequence[ArgumentTest]], verdict: int
) -> list[tuple[int, int, int, int]]:
    """Returns instructions that return a verdict if all tests of one alternative hold."""
    lines = list[tuple[int, int, int, int]]()
    for tests in ways:
        for place, (argument, mask, value) in enumerate(tests):
            # On a mismatch, skip the other tests of this alternative (3 instructions each) and its
            # verdict.
            rest = 3 * (len(tests) - place - 1) + 1
            lines += [
                (LOAD, 0, 0, ARGUMENTS_OFFSET + 8 * argument),
                (AND, 0, 0, mask),
                (EQUAL, 0, rest, value),
            ]
        lines.append((RETURN, 0, 0, verdict))
    return lines
