"""Cell: runs the commands of one job where they can do little harm. A program of its own.

`sandbox` starts it with the path of a job (JSON); it imports the standard library only. It gives up
what it can before the first command starts: root, the network, other processes, all files but its
own directory and those of the system, memory, time. What the kernel does not grant is told in the
report, never passed over. Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

NEWNS, NEWUSER, NEWPID, NEWNET, NEWIPC = 0x20000, 0x10000000, 0x20000000, 0x40000000, 0x08000000
PDEATHSIG, DUMPABLE, NO_NEW_PRIVS, SUBREAPER = 1, 4, 38, 36
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
NOBODY = 65534
READ, WRITE = 0b1101, 0b111_1111_1111_0010
"""Rights of Landlock on files: to execute, read and list; to write, remove, make, move and cut."""
SYSTEM = ("bin", "sbin", "lib", "lib32", "lib64", "libx32", "usr", "etc", "opt", "nix", "dev")
"""Directories of the system, which may be read."""
libc = ctypes.CDLL(None, use_errno=True)


def check(result: int) -> int:
    """A system call's result, or its error."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


class Cell:
    """A job and what was not granted."""

    def __init__(self, job: dict[str, Any], report: int) -> None:
        self.job, self.report, self.lacks = job, report, list[str]()
        self.alone = False
        """Whether other processes than those of the job are out of reach."""
        self.others = 0
        """Processes of the same user that count as if they were the job's."""

    def tried(self, lack: str, step: Callable[[], Any]) -> bool:
        """Give something up; `lack` says what it means if that is not granted."""
        try:
            step()
        except (OSError, ValueError) as error:
            self.lacks.append(f"{lack} ({error.strerror if isinstance(error, OSError) else error})")
            return False
        return True

    def tell(self, **facts: Any) -> None:
        """Add a line to the report."""
        os.write(self.report, json.dumps(facts).encode() + b"\n")

    def run(self) -> None:
        """Enter the cell, then do the commands in its first process."""
        os.set_inheritable(self.report, False)
        check(libc.prctl(PDEATHSIG, signal.SIGKILL))
        check(libc.prctl(SUBREAPER, 1))
        if os.getuid() == 0:
            self.tried("programs run as root", self.drop_root)
        own = self.tried("processes and network are shared", self.unshare)
        self.alone = own
        first = os.fork() if own else 0
        if first:
            os.waitpid(first, 0)
            return
        check(libc.prctl(PDEATHSIG, signal.SIGKILL))
        if own:
            self.tried("other processes can be seen", lambda: self.mount("proc", "/proc", "proc"))
            size = f"size={self.job['disk_bytes']},nr_inodes=4096,mode=700"
            self.tried(
                "the disk is not bounded", lambda: self.mount("tmpfs", self.work, "tmpfs", size)
            )
        os.chdir(self.work)
        for name, text in self.job["files"].items():
            with open(name, "w", encoding="utf-8") as file:
                file.write(text)
        check(libc.prctl(NO_NEW_PRIVS, 1, 0, 0, 0))
        check(libc.prctl(DUMPABLE, 0))  # no command can look into this process
        self.tried("files can be written and read elsewhere", self.probe)
        self.others = 0 if own else self.mine()
        self.tell(lacks=self.lacks)
        for stage, command in self.job["commands"]:
            if not self.do(stage, command):
                break
        self.sweep()
        if own:
            os._exit(0)

    @property
    def work(self) -> str:
        """The directory of the job."""
        return str(self.job["work"])

    def drop_root(self) -> None:
        """Become nobody, if nobody can reach the programs."""
        os.chown(self.work, NOBODY, NOBODY)
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, 0)
        program = self.job["commands"][0][1][0]
        there = next((p for p in (program, *self.job["same"]) if os.access(p, os.X_OK)), None)
        if there is None:
            os.setresuid(0, 0, 0)
            raise ValueError(f"nobody else can reach {program}")
        for _, command in self.job["commands"]:
            command[0] = there if command[0] == program else command[0]
        os.setresuid(NOBODY, NOBODY, NOBODY)
        check(libc.prctl(DUMPABLE, 1))
        check(libc.prctl(PDEATHSIG, signal.SIGKILL))  # a change of user clears it

    def unshare(self) -> None:
        """Namespaces of its own: users, mounts, processes, network, messages."""
        user, group = os.getuid(), os.getgid()
        check(libc.unshare(NEWUSER | NEWNS | NEWPID | NEWNET | NEWIPC))
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{user} {user} 1"),
            ("gid_map", f"{group} {group} 1"),
        ):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
        private = (1 << 18) | (1 << 14)  # MS_PRIVATE, MS_REC: nothing is seen outside
        check(libc.mount(None, b"/", None, private, None))

    def mount(self, source: str, target: str, kind: str, options: str = "") -> None:
        """A file system of its own."""
        flags = 2 | 4  # MS_NOSUID, MS_NODEV
        words = (source.encode(), target.encode(), kind.encode())
        check(libc.mount(*words, flags, options.encode() or None))

    def probe(self) -> None:
        """See whether commands can be confined: they are, this process is not."""
        child = os.fork()
        if child == 0:
            try:
                self.confine()
            except OSError as error:
                os._exit(error.errno or 1)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code:
            raise OSError(code, os.strerror(code))

    def confine(self) -> None:
        """Landlock: write in the directory of the job only, read there and from the system."""
        abi = check(libc.syscall(CREATE_RULESET, None, 0, 1))
        write = WRITE & ~((1 << 13) * (abi < 2)) & ~((1 << 14) * (abi < 3))
        handled = (ctypes.c_uint64 * 3)(READ | write, 3 * (abi >= 4), 3 * (abi >= 6))
        size = 24 if abi >= 6 else 16 if abi >= 4 else 8
        rules = check(libc.syscall(CREATE_RULESET, handled, size, 0))
        for path in [*(f"/{name}" for name in SYSTEM), *self.job["readable"]]:
            self.allow(rules, path, READ)
        self.allow(rules, self.work, READ | write)
        for name in ("null", "zero", "full"):
            self.allow(rules, f"/dev/{name}", (READ & 0b101) | (write & (0b10 | 1 << 14)))
        check(libc.syscall(RESTRICT_SELF, rules, 0))
        os.close(rules)

    def allow(self, rules: int, path: str, rights: int) -> None:
        """Let a path be used."""
        if not os.path.exists(path):
            return
        if not os.path.isdir(path):
            rights &= 0b101 | 0b10 | 1 << 14  # of a file: execute, read, write, cut
        handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = rights.to_bytes(8, sys.byteorder) + handle.to_bytes(4, sys.byteorder)
        try:
            check(libc.syscall(ADD_RULE, rules, 1, ctypes.c_char_p(rule), 0))
        finally:
            os.close(handle)

    def do(self, stage: str, command: list[str]) -> bool:
        """Run a command within its limits; whether it ended well."""
        start = time.perf_counter()
        child = os.fork()
        if child == 0:
            self.become(command)
        handle = os.pidfd_open(child)
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        late = not poll.poll(1000 * self.job["seconds"])
        seconds = time.perf_counter() - start
        if late:
            os.kill(child, signal.SIGKILL)
        _, status, used = os.wait4(child, 0)
        os.close(handle)
        self.sweep()
        code = os.waitstatus_to_exitcode(status)
        memory = used.ru_maxrss * 1024
        self.tell(stage=stage, code=code, seconds=seconds, late=late, memory=memory)
        return code == 0 and not late

    def become(self, command: list[str]) -> None:
        """Turn into a command: limits, a session of its own, no environment."""
        try:
            os.setsid()
            check(libc.prctl(PDEATHSIG, signal.SIGKILL))
            with contextlib.suppress(OSError):  # told before
                self.confine()
            for name, limit in self.job["limits"].items():
                kind = getattr(resource, f"RLIMIT_{name}")
                limit += self.others if name == "NPROC" else 0
                hard = resource.getrlimit(kind)[1]
                limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
                resource.setrlimit(kind, (limit, limit))
            names = {"PATH": "/usr/bin:/bin", "HOME": self.work, "TMPDIR": self.work}
            os.execve(command[0], command, names)
        except BaseException as error:
            os.write(2, f"{command[0]} cannot be run: {error}\n".encode())
        os._exit(127)

    def mine(self) -> int:
        """Threads that my user has already: they count, where users are not of the cell alone."""
        count = 0
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                if os.stat(f"/proc/{name}").st_uid == os.getuid():
                    count += len(os.listdir(f"/proc/{name}/task"))
            except OSError:
                continue
        return count

    def sweep(self) -> None:
        """End all that commands have left behind: it becomes a child of this process."""
        while True:
            if self.alone:
                try:
                    os.kill(-1, signal.SIGKILL)
                except ProcessLookupError:
                    return
            else:
                for child in children(os.getpid()):
                    os.kill(child, signal.SIGKILL)
            try:
                os.waitpid(-1, 0)
            except ChildProcessError:
                return


def children(process: int) -> list[int]:
    """The processes whose parent is this one."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat") as file:
                parent = int(file.read().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue
        found += [int(name)] if parent == process else []
    return found


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as text:
        Cell(json.load(text), int(sys.argv[2])).run()
