"""Cell: runs the commands of one job where they can do little harm. A program of its own.

`sandbox` starts it with the path of a job (JSON); it imports the standard library only. It gives up
what it can before the first command starts: root, the network, other processes, all files but its
own directory and those of the system, most system calls that a program has no use for, memory,
time. Where bubblewrap is installed it starts itself once more inside of that, and makes namespaces
of its own elsewhere. What the kernel does not grant is told in the report, never passed over. Linux
only.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import resource
import select
import signal
import struct
import sys
import time
from collections.abc import Callable
from typing import Any

NEWNS = 0x20000
NEWUSER = 0x10000000
NEWPID = 0x20000000
NEWNET = 0x40000000
NEWIPC = 0x08000000
PDEATHSIG = 1
DUMPABLE = 4
NO_NEW_PRIVS = 38
SUBREAPER = 36
SECCOMP = 22
AMBIENT = 47
CREATE_RULESET = 444
ADD_RULE = 445
RESTRICT_SELF = 446
NOBODY_UID = 65534
READ_RIGHTS = 0b1101
WRITE_RIGHTS = 0b111_1111_1111_0010
"""Rights of Landlock on files: to execute, read and list; to write, remove, make, move and cut."""
SYSTEM_DIRS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32", "usr", "etc", "opt", "nix")
"""Directories of the system, which may be read."""
DEVICES = {"null": True, "zero": True, "full": True, "random": False, "urandom": False}
"""Devices that may be read, and whether they may be written: no terminals, no shared memory."""
ENTERED_MESSAGE = b"entered\n"
"""What the cell inside of bubblewrap says first."""
WATCH_SECONDS = 0.05
"""Seconds between two looks at the memory of all processes."""
PAGE_BYTES = resource.getpagesize()
libc = ctypes.CDLL(None, use_errno=True)


def check_syscall(result: int) -> int:
    """A system call's result, or its error."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


class SandboxWorker:
    """A job, what keeps it in, and what was not granted."""

    def __init__(self, job: dict[str, Any], report: int, *, inside: bool = False) -> None:
        self.job = job
        self.report_fd = report
        self.in_bubblewrap = inside
        """Whether bubblewrap is around this process."""
        self.missing_guards: list[str] = job.get("lacks", [])
        self.own_source = ""
        """This program, for the cell inside of bubblewrap."""
        self.guards = list[str]()
        """Mechanisms that are in force."""
        self.is_isolated = False
        """Whether other processes than those of the job are out of reach."""
        self.has_syscall_filter = False
        """Whether the filter of system calls works here."""
        self.has_private_proc = False
        """Whether /proc shows the processes of the job and no others."""
        self.other_threads = 0
        """Processes of the same user that count as if they were the job's."""

    def try_guard(self, lack: str, step: Callable[[], Any], guard: str = "") -> bool:
        """Put a guard in force; `lack` says what it means if that is not granted."""
        try:
            step()
        except (OSError, ValueError) as error:
            self.missing_guards.append(
                f"{lack} ({error.strerror if isinstance(error, OSError) else error})"
            )
            return False
        self.guards += [guard] if guard else []
        return True

    def report_facts(self, **facts: Any) -> None:
        """Add a line to the report."""
        os.write(self.report_fd, json.dumps(facts).encode() + b"\n")

    def run(self) -> None:
        """Enter the cell, then do the commands in its first process."""
        os.set_inheritable(self.report_fd, False)
        check_syscall(libc.prctl(PDEATHSIG, signal.SIGKILL))
        if self.in_bubblewrap:
            if os.getpid() != 1:  # then it must not end all processes that it can see
                sys.exit("it gave the cell no process namespace")
            os.write(2, ENTERED_MESSAGE)
            os.dup2(1, 2)
            self.is_isolated = True
            self.guards += ["bubblewrap", "namespaces"]
            self.confine_and_run_job()
            return
        check_syscall(libc.prctl(SUBREAPER, 1))
        with open(__file__, encoding="utf-8") as file:  # nobody may not be able to read it
            self.own_source = file.read()
        if os.getuid() == 0:
            self.try_guard("programs run as root", self.drop_root)
        if self.job["bubblewrap"] and self.try_guard(
            "bubblewrap is installed and cannot be used, so that the files of this machine are "
            "kept from programs by Landlock alone",
            self.enter_bubblewrap,
        ):
            return
        self.is_isolated = self.try_guard(
            "there are no namespaces: processes and network are shared with this machine, and "
            "the files that a program writes are bounded one by one, not together",
            lambda: self.probe_in_child(self.unshare_namespaces),
            "namespaces",
        )
        if self.is_isolated:
            self.unshare_namespaces()
            first = os.fork()
            if first:
                os.waitpid(first, 0)
                return
            check_syscall(libc.prctl(PDEATHSIG, signal.SIGKILL))
        self.confine_and_run_job()
        if self.is_isolated:
            os._exit(0)

    def confine_and_run_job(self) -> None:
        """Lay out the directory of the job, give up the rest, do the commands."""
        if self.is_isolated:
            self.mount_private_filesystems()
        os.chdir(self.work_dir)
        for name, text in self.job["files"].items():
            with open(name, "w", encoding="utf-8") as file:
                file.write(text)
        check_syscall(libc.prctl(NO_NEW_PRIVS, 1, 0, 0, 0))
        check_syscall(libc.prctl(DUMPABLE, 0))  # no command can look into this process
        self.try_guard(
            "the kernel has no Landlock: files are kept from programs by bubblewrap alone"
            if self.in_bubblewrap
            else "the kernel has no Landlock: files can be written and read elsewhere",
            lambda: self.probe_in_child(self.apply_landlock),
            "Landlock",
        )
        self.has_syscall_filter = self.try_guard(
            "there is no filter of system calls: programs can use sockets that are files, shared "
            "memory beyond their limit, io_uring and user namespaces",
            lambda: self.probe_in_child(self.apply_seccomp),
            "seccomp",
        )
        if self.is_isolated:
            self.other_threads = 0
        else:
            self.other_threads = self.count_user_threads()
        self.report_facts(lacks=self.missing_guards, guards=self.guards)
        for stage, command in self.job["commands"]:
            if not self.run_command(stage, command):
                break
        self.kill_leftovers()

    def mount_private_filesystems(self) -> None:
        """File systems of the job's own, then no more power to mount any."""
        if not self.in_bubblewrap:
            self.has_private_proc = self.try_guard(
                "other processes can be seen",
                lambda: self.mount_filesystem("proc", "/proc", "proc"),
            )
            self.try_guard("programs can make user namespaces", self.forbid_namespaces)
        self.has_private_proc |= self.in_bubblewrap
        size = f"size={self.job['disk_bytes']},nr_inodes=4096,mode=700"
        self.try_guard(
            "the disk is not bounded: files are bounded one by one, not together",
            lambda: self.mount_filesystem("tmpfs", self.work_dir, "tmpfs", size),
        )
        if self.in_bubblewrap:
            check_syscall(libc.prctl(AMBIENT, 4, 0, 0, 0))  # PR_CAP_AMBIENT_CLEAR_ALL
            header = (ctypes.c_uint32 * 2)(0x20080522, 0)
            none = (ctypes.c_uint32 * 6)()
            check_syscall(libc.capset(header, none))  # neither this process nor commands have any

    def forbid_namespaces(self) -> None:
        """No user namespace can be made in that of the cell."""
        with open("/proc/sys/user/max_user_namespaces", "w") as file:
            file.write("0")

    def enter_bubblewrap(self) -> None:
        """Do the job inside of bubblewrap; an error says why that could not be."""
        told, errors = os.pipe()
        job = os.memfd_create("job")
        os.write(job, json.dumps({**self.job, "lacks": self.missing_guards}).encode())
        os.lseek(job, 0, os.SEEK_SET)
        words = ["-I", "-S", "-c", self.own_source, str(job), str(self.report_fd), "inside"]
        inner = [self.job["python"], *words]
        command = bubblewrap_command(
            self.job["bubblewrap"], self.work_dir, self.job["readable"], inner
        )
        child = os.fork()
        if child == 0:
            for handle in (job, self.report_fd):
                os.set_inheritable(handle, True)
            os.dup2(errors, 2)
            try:
                os.execve(command[0], command, {})
            except OSError as error:
                os.write(2, str(error).encode())
            os._exit(127)
        for handle in (job, errors):
            os.close(handle)
        said = b""
        while piece := os.read(told, 1 << 12):
            said = (said + piece)[: 1 << 12]
        os.close(told)
        os.waitpid(child, 0)
        if ENTERED_MESSAGE not in said:
            reason = said.decode(errors="replace").strip().replace("\n", "; ")
            raise ValueError(reason or "it ended without a word")

    @property
    def work_dir(self) -> str:
        """The directory of the job."""
        return str(self.job["work"])

    def drop_root(self) -> None:
        """Become nobody, if nobody can reach the programs."""
        os.chown(self.work_dir, NOBODY_UID, NOBODY_UID)
        os.setgroups([])
        os.setresgid(NOBODY_UID, NOBODY_UID, NOBODY_UID)
        os.setresuid(NOBODY_UID, NOBODY_UID, 0)
        python = self.job["python"]
        there = next((p for p in (python, *self.job["same"]) if os.access(p, os.X_OK)), python)
        for _, command in self.job["commands"]:
            if command[0] == python:
                command[0] = there
        self.job["python"] = there
        tools = {command[0] for _, command in self.job["commands"]}
        for path in sorted({there, *tools} - {f"{self.work_dir}/main"}):  # main is yet to be built
            if not os.access(path, os.X_OK):
                os.setresuid(0, 0, 0)
                raise ValueError(f"nobody else can reach {path}")
        os.setresuid(NOBODY_UID, NOBODY_UID, NOBODY_UID)
        check_syscall(libc.prctl(DUMPABLE, 1))
        check_syscall(libc.prctl(PDEATHSIG, signal.SIGKILL))  # a change of user clears it

    def unshare_namespaces(self) -> None:
        """Namespaces of its own: users, mounts, processes, network, messages."""
        user = os.getuid()
        group = os.getgid()
        check_syscall(libc.unshare(NEWUSER | NEWNS | NEWPID | NEWNET | NEWIPC))
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{user} {user} 1"),
            ("gid_map", f"{group} {group} 1"),
        ):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
        private = (1 << 18) | (1 << 14)  # MS_PRIVATE, MS_REC: nothing is seen outside
        check_syscall(libc.mount(None, b"/", None, private, None))

    def mount_filesystem(self, source: str, target: str, kind: str, options: str = "") -> None:
        """A file system of its own."""
        flags = 2 | 4  # MS_NOSUID, MS_NODEV
        words = (source.encode(), target.encode(), kind.encode())
        check_syscall(libc.mount(*words, flags, options.encode() or None))

    def probe_in_child(self, step: Callable[[], None]) -> None:
        """See whether a step is granted, in a process that ends right after it."""
        child = os.fork()
        if child == 0:
            try:
                step()
            except OSError as error:
                os._exit(error.errno or 1)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code:
            raise OSError(code, os.strerror(code) if code > 0 else f"signal {-code}")

    def apply_landlock(self) -> None:
        """Landlock: write in the directory of the job only, read there and from the system."""
        abi = check_syscall(libc.syscall(CREATE_RULESET, None, 0, 1))
        write = WRITE_RIGHTS & ~((1 << 13) * (abi < 2)) & ~((1 << 14) * (abi < 3))
        handled = (ctypes.c_uint64 * 3)(READ_RIGHTS | write, 3 * (abi >= 4), 3 * (abi >= 6))
        if abi >= 6:
            size = 24
        elif abi >= 4:
            size = 16
        else:
            size = 8
        rules = check_syscall(libc.syscall(CREATE_RULESET, handled, size, 0))
        for path in [*(f"/{name}" for name in SYSTEM_DIRS), *self.job["readable"]]:
            self.allow_path(rules, path, READ_RIGHTS)
        self.allow_path(rules, self.work_dir, READ_RIGHTS | write)
        for name, writable in DEVICES.items():
            rights = (READ_RIGHTS & 0b101) | (write & (0b10 | 1 << 14)) * writable
            self.allow_path(rules, f"/dev/{name}", rights)
        check_syscall(libc.syscall(RESTRICT_SELF, rules, 0))
        os.close(rules)

    def apply_seccomp(self) -> None:
        """The filter of system calls that the job brings (see `seccomp`), from here on."""
        lines = bytes.fromhex(self.job["filter"])
        if not lines:
            raise OSError(errno.ENOSYS, "no filter is known for this kind of processor")
        text = ctypes.create_string_buffer(lines, len(lines))
        # struct sock_fprog: the number of instructions, then a pointer to them
        program = struct.pack("@HP", len(lines) // 8, ctypes.addressof(text))
        check_syscall(libc.prctl(SECCOMP, 2, ctypes.c_char_p(program), 0, 0))

    def allow_path(self, rules: int, path: str, rights: int) -> None:
        """Let a path be used."""
        if not os.path.exists(path):
            return
        if not os.path.isdir(path):
            rights &= 0b101 | 0b10 | 1 << 14  # of a file: execute, read, write, cut
        handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = rights.to_bytes(8, sys.byteorder) + handle.to_bytes(4, sys.byteorder)
        try:
            check_syscall(libc.syscall(ADD_RULE, rules, 1, ctypes.c_char_p(rule), 0))
        finally:
            os.close(handle)

    def run_command(self, stage: str, command: list[str]) -> bool:
        """Run a command within its limits; whether it ended well."""
        start = time.perf_counter()
        child = os.fork()
        if child == 0:
            self.exec_command(command)
        handle = os.pidfd_open(child)
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        late = False
        large = False
        looks = 0
        while not poll.poll(1000 * WATCH_SECONDS):
            late = time.perf_counter() - start > self.job["seconds"]
            over = self.has_private_proc and self.memory_bytes() > self.job["total_memory"]
            looks = looks + 1 if over else 0
            large = looks > 1  # one look may see pages twice, where processes come and go
            if late or large:
                os.kill(child, signal.SIGKILL)
                break
        seconds = time.perf_counter() - start
        _, status, used = os.wait4(child, 0)
        os.close(handle)
        self.kill_leftovers()
        code = os.waitstatus_to_exitcode(status)
        memory = used.ru_maxrss * 1024
        self.report_facts(
            stage=stage, code=code, seconds=seconds, late=late, large=large, memory=memory
        )
        return code == 0 and not late and not large

    def memory_bytes(self) -> int:
        """Bytes that all processes of the job have in memory; what they share counts once."""
        processes = [name for name in os.listdir("/proc") if name.isdigit() and name != "1"]
        resident = (
            sum(read_proc_number(f"/proc/{name}/statm", 1) for name in processes) * PAGE_BYTES
        )
        if resident <= self.job["total_memory"]:
            return resident
        # dearer to find out, and seldom needed: a share of each page for all that have it; a
        # process can forbid to look, and then counts in full
        return sum(
            read_proc_number(f"/proc/{name}/smaps_rollup", "Pss:") * 1024
            or read_proc_number(f"/proc/{name}/statm", 1) * PAGE_BYTES
            for name in processes
        )

    def exec_command(self, command: list[str]) -> None:
        """Turn into a command: limits, a session of its own, no environment."""
        try:
            os.setsid()
            check_syscall(libc.prctl(PDEATHSIG, signal.SIGKILL))
            with contextlib.suppress(OSError):  # told before
                self.apply_landlock()
            for name, limit in self.job["limits"].items():
                kind = getattr(resource, f"RLIMIT_{name}")
                limit += self.other_threads if name == "NPROC" else 0
                hard = resource.getrlimit(kind)[1]
                if hard != resource.RLIM_INFINITY:
                    limit = min(limit, hard)
                resource.setrlimit(kind, (limit, limit))
            names = {"PATH": "/usr/bin:/bin", "HOME": self.work_dir, "TMPDIR": self.work_dir}
            if self.has_syscall_filter:
                self.apply_seccomp()
            os.execve(command[0], command, names)
        except BaseException as error:
            os.write(2, f"{command[0]} cannot be run: {error}\n".encode())
        os._exit(127)

    def count_user_threads(self) -> int:
        """Threads that my user has already: they count, where users are not of the cell alone."""
        count = 0
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                if os.stat(f"/proc/{name}").st_uid == os.getuid():
                    count += len(os.listdir(f"/proc/{name}/task"))
            except OSError:
                continue
        return count

    def kill_leftovers(self) -> None:
        """End all that commands have left behind: it becomes a child of this process."""
        while True:
            if self.is_isolated:
                try:
                    os.kill(-1, signal.SIGKILL)
                except ProcessLookupError:
                    return
            else:
                for child in child_processes(os.getpid()):
                    os.kill(child, signal.SIGKILL)
            try:
                os.waitpid(-1, 0)
            except ChildProcessError:
                return


def child_processes(process: int) -> list[int]:
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


def read_proc_number(path: str, place: int | str) -> int:
    """A number of a file of /proc: by its place, or by the word before it; 0 if it is gone."""
    try:
        with open(path) as file:
            words = file.read().split()
        return int(words[words.index(place) + 1 if isinstance(place, str) else place])
    except (OSError, ValueError, IndexError):
        return 0


def bubblewrap_command(
    bubblewrap: str, work: str, readable: list[str], command: list[str]
) -> list[str]:
    """The command line that runs a command inside of bubblewrap.

    It sees a new root with the directories of the system, read only, and an empty directory `work`;
    the one power that it is left is to mount a bounded file system there. `--dev` is of no use: it
    takes that power away.
    """
    words = [bubblewrap, "--die-with-parent", "--as-pid-1", "--unshare-user", "--unshare-pid"]
    words += ["--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    words += ["--cap-drop", "ALL", "--cap-add", "CAP_SYS_ADMIN"]
    for path in [*(f"/{name}" for name in SYSTEM_DIRS), *readable]:
        if os.path.isdir(path) and os.access(path, os.R_OK | os.X_OK):
            words += ["--ro-bind", path, path]
    for name in DEVICES:
        words += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    words += ["--proc", "/proc", "--dir", work]
    words += ["--remount-ro", "/"]  # it lies in memory that nothing bounds
    return [*words, "--chdir", "/", "--", *command]


if __name__ == "__main__":
    where, handle, *words = sys.argv[1:]
    with open(int(where) if words else where, encoding="utf-8") as text:
        given = json.load(text)
    SandboxWorker(given, int(handle), inside=bool(words)).run()
