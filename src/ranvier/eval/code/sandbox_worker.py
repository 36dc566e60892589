"""Sandbox worker: runs the commands of one job in isolation, as a separate program.

`sandbox` starts it with the path of a job (JSON); it imports only the standard library. Before the
first command it gives up access to root, the network, other processes, all files except its own
directory and system files, and most system calls that a program does not need, and limits memory
and time. If bubblewrap is installed, it runs itself again inside bubblewrap; otherwise it creates
its own namespaces. Guards that the kernel does not allow are listed in the report, never ignored.
Linux only.
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

# Kernel constants that Python does not have: flags of clone(2), options of prctl(2), numbers of the
# Landlock system calls.
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
"""Landlock rights on files: execute, read and list; write, remove, create, move and truncate."""
SYSTEM_DIRS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32", "usr", "etc", "opt", "nix")
"""System directories, which are readable."""
DEVICES = {"null": True, "zero": True, "full": True, "random": False, "urandom": False}
"""Readable devices, and whether they are writable. Terminals and shared memory are excluded."""
ENTERED_MESSAGE = b"entered\n"
"""First output of the worker inside bubblewrap."""
WATCH_SECONDS = 0.05
"""Interval at which the memory of all processes is checked."""
PAGE_BYTES = resource.getpagesize()
libc = ctypes.CDLL(None, use_errno=True)


def check_syscall(result: int) -> int:
    """Returns the result of a system call; raises its error."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


class SandboxWorker:
    """A job, the guards around it, and the guards that are missing."""

    def __init__(self, job: dict[str, Any], report: int, *, inside: bool = False) -> None:
        self.job = job
        self.report_fd = report
        self.in_bubblewrap = inside
        """Whether this process runs inside bubblewrap."""
        self.missing_guards: list[str] = job.get("lacks", [])
        self.own_source = ""
        """Source of this program, for the worker inside bubblewrap."""
        self.guards = list[str]()
        """Mechanisms that are active."""
        self.is_isolated = False
        """Whether processes outside the job are unreachable."""
        self.has_syscall_filter = False
        """Whether the seccomp filter works here."""
        self.has_private_proc = False
        """Whether /proc shows only the processes of the job."""
        self.other_threads = 0
        """Threads of the same user that count towards the job's process limit."""

    def try_guard(self, lack: str, step: Callable[[], Any], guard: str = "") -> bool:
        """Activates a guard; `lack` describes the consequence if it is not available."""
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
        """Append a line of JSON to the report."""
        os.write(self.report_fd, json.dumps(facts).encode() + b"\n")

    def run(self) -> None:
        """Enters the sandbox, then runs the commands in its first process."""
        # A program must not be able to write its own report.
        os.set_inheritable(self.report_fd, False)
        # The worker dies with `sandbox`, and everything in its process namespace with it.
        check_syscall(libc.prctl(PDEATHSIG, signal.SIGKILL))
        if self.in_bubblewrap:
            # `kill_leftovers` kills all visible processes, so it must not run in the namespace of
            # the host.
            if os.getpid() != 1:
                sys.exit("bubblewrap did not create a process namespace")
            # stderr is still the pipe of `enter_bubblewrap`, which waits for this message; from
            # here on it is the output.
            os.write(2, ENTERED_MESSAGE)
            os.dup2(1, 2)
            self.is_isolated = True
            self.guards += ["bubblewrap", "namespaces"]
            self.confine_and_run_job()
            return
        # Orphans of the job become children of this process, where `kill_leftovers` finds them.
        check_syscall(libc.prctl(SUBREAPER, 1))
        # Read before root is dropped, because an unprivileged user may not have access to it.
        with open(__file__, encoding="utf-8") as file:
            self.own_source = file.read()
        if os.getuid() == 0:
            self.try_guard("programs run as root", self.drop_root)
        if self.job["bubblewrap"] and self.try_guard(
            "bubblewrap is installed but cannot be used, so only Landlock protects the files of "
            "this machine",
            self.enter_bubblewrap,
        ):
            return
        self.is_isolated = self.try_guard(
            "namespaces are not available, so processes and network are shared with this machine, "
            "and only the size of each file is limited, not the total",
            lambda: self.probe_in_child(self.unshare_namespaces),
            "namespaces",
        )
        # A new process namespace applies only to children; the first child is its PID 1.
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
        """Writes the files of the job, drops all other access and runs the commands."""
        if self.is_isolated:
            self.mount_private_filesystems()
        os.chdir(self.work_dir)
        for name, text in self.job["files"].items():
            with open(name, "w", encoding="utf-8") as file:
                file.write(text)
        # Needed by unprivileged seccomp and Landlock; it also disables setuid programs.
        check_syscall(libc.prctl(NO_NEW_PRIVS, 1, 0, 0, 0))
        # No command can inspect this process through /proc or ptrace.
        check_syscall(libc.prctl(DUMPABLE, 0))
        self.try_guard(
            "Landlock is not available, so only bubblewrap protects files"
            if self.in_bubblewrap
            else "Landlock is not available, so programs can read and write other files",
            # Landlock and seccomp are only tested here. They cannot be undone, and this process
            # still needs its rights, so each command applies them to itself in `exec_command`.
            lambda: self.probe_in_child(self.apply_landlock),
            "Landlock",
        )
        self.has_syscall_filter = self.try_guard(
            "the system call filter is not available, so programs can use sockets that are files, "
            "shared memory beyond their limit, io_uring and user namespaces",
            lambda: self.probe_in_child(self.apply_seccomp),
            "seccomp",
        )
        if self.is_isolated:
            self.other_threads = 0
        else:
            self.other_threads = self.count_user_threads()
        # Written before any command; `sandbox` treats its absence as a failure to start.
        self.report_facts(lacks=self.missing_guards, guards=self.guards)
        for stage, command in self.job["commands"]:
            if not self.run_command(stage, command):
                break
        self.kill_leftovers()

    def mount_private_filesystems(self) -> None:
        """Mounts private file systems for the job, then drops the capability to mount."""
        if not self.in_bubblewrap:
            self.has_private_proc = self.try_guard(
                "programs can see other processes",
                lambda: self.mount_filesystem("proc", "/proc", "proc"),
            )
            self.try_guard("programs can create user namespaces", self.forbid_namespaces)
        self.has_private_proc |= self.in_bubblewrap
        size = f"size={self.job['disk_bytes']},nr_inodes=4096,mode=700"
        self.try_guard(
            "the total disk space is not limited, only the size of each file",
            lambda: self.mount_filesystem("tmpfs", self.work_dir, "tmpfs", size),
        )
        if self.in_bubblewrap:
            # 4 is PR_CAP_AMBIENT_CLEAR_ALL.
            check_syscall(libc.prctl(AMBIENT, 4, 0, 0, 0))
            # Version 3 of the capability ABI, and this process.
            header = (ctypes.c_uint32 * 2)(0x20080522, 0)
            none = (ctypes.c_uint32 * 6)()
            # Neither this process nor its commands keep any capability.
            check_syscall(libc.capset(header, none))

    def forbid_namespaces(self) -> None:
        """Forbids new user namespaces inside the sandbox."""
        with open("/proc/sys/user/max_user_namespaces", "w") as file:
            file.write("0")

    def enter_bubblewrap(self) -> None:
        """Runs the job inside bubblewrap; raises the reason if that is not possible."""
        told, errors = os.pipe()
        # In memory instead of a file, because only the empty work directory and the system are
        # visible inside.
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
                # An empty environment, so that no variable of the caller is visible.
                os.execve(command[0], command, {})
            except OSError as error:
                os.write(2, str(error).encode())
            os._exit(127)
        for handle in (job, errors):
            os.close(handle)
        # Reads until the worker inside redirects its stderr, or bubblewrap ends. At most 4 KiB are
        # stored.
        said = b""
        while piece := os.read(told, 1 << 12):
            said = (said + piece)[: 1 << 12]
        os.close(told)
        os.waitpid(child, 0)
        if ENTERED_MESSAGE not in said:
            reason = said.decode(errors="replace").strip().replace("\n", "; ")
            raise ValueError(reason or "it ended without a message")

    @property
    def work_dir(self) -> str:
        """The directory of the job."""
        return str(self.job["work"])

    def drop_root(self) -> None:
        """Becomes an unprivileged user, if that user can execute the programs."""
        os.chown(self.work_dir, NOBODY_UID, NOBODY_UID)
        os.setgroups([])
        os.setresgid(NOBODY_UID, NOBODY_UID, NOBODY_UID)
        # The saved user id stays root, to switch back if that user cannot reach the programs.
        os.setresuid(NOBODY_UID, NOBODY_UID, 0)
        python = self.job["python"]
        there = next((p for p in (python, *self.job["same"]) if os.access(p, os.X_OK)), python)
        for _, command in self.job["commands"]:
            if command[0] == python:
                command[0] = there
        self.job["python"] = there
        tools = {command[0] for _, command in self.job["commands"]}
        # The compiled program `main` does not exist yet.
        for path in sorted({there, *tools} - {f"{self.work_dir}/main"}):
            if not os.access(path, os.X_OK):
                os.setresuid(0, 0, 0)
                raise ValueError(f"other users cannot execute {path}")
        os.setresuid(NOBODY_UID, NOBODY_UID, NOBODY_UID)
        # A change of user clears both of these. Without DUMPABLE, /proc/self would belong to root,
        # and the id maps of the user namespace could not be written.
        check_syscall(libc.prctl(DUMPABLE, 1))
        check_syscall(libc.prctl(PDEATHSIG, signal.SIGKILL))

    def unshare_namespaces(self) -> None:
        """Creates new namespaces: users, mounts, processes, network, IPC."""
        user = os.getuid()
        group = os.getgid()
        check_syscall(libc.unshare(NEWUSER | NEWNS | NEWPID | NEWNET | NEWIPC))
        # The kernel requires setgroups to be denied before an unprivileged process writes gid_map.
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{user} {user} 1"),
            ("gid_map", f"{group} {group} 1"),
        ):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
        # MS_PRIVATE and MS_REC: mounts made here do not propagate to the host.
        private = (1 << 18) | (1 << 14)
        check_syscall(libc.mount(None, b"/", None, private, None))

    def mount_filesystem(self, source: str, target: str, kind: str, options: str = "") -> None:
        """Mount a file system."""
        # MS_NOSUID and MS_NODEV.
        flags = 2 | 4
        words = (source.encode(), target.encode(), kind.encode())
        check_syscall(libc.mount(*words, flags, options.encode() or None))

    def probe_in_child(self, step: Callable[[], None]) -> None:
        """Tries a step in a child that exits right after it; raises its error."""
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
        """Applies Landlock: write only to the directory of the job, read only there and from the
        system."""
        abi = check_syscall(libc.syscall(CREATE_RULESET, None, 0, 1))
        # Older kernels reject unknown rights: moving between directories came with ABI 2,
        # truncation with ABI 3, the network (bind and connect) with 4, and scopes (abstract
        # sockets, signals) with 6. The size of the struct grows with them.
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
        """Install the seccomp filter of the job (see `seccomp`)."""
        lines = bytes.fromhex(self.job["filter"])
        if not lines:
            raise OSError(errno.ENOSYS, "this processor architecture is not supported")
        text = ctypes.create_string_buffer(lines, len(lines))
        # struct sock_fprog: the number of instructions, then a pointer to them; `text` must outlive
        # the call.
        program = struct.pack("@HP", len(lines) // 8, ctypes.addressof(text))
        # 2 is SECCOMP_MODE_FILTER.
        check_syscall(libc.prctl(SECCOMP, 2, ctypes.c_char_p(program), 0, 0))

    def allow_path(self, rules: int, path: str, rights: int) -> None:
        """Add a rule that allows access to a path."""
        if not os.path.exists(path):
            return
        if not os.path.isdir(path):
            # Rights that apply to a file: execute, read, write, truncate. Others would be an error.
            rights &= 0b101 | 0b10 | 1 << 14
        handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = rights.to_bytes(8, sys.byteorder) + handle.to_bytes(4, sys.byteorder)
        try:
            check_syscall(libc.syscall(ADD_RULE, rules, 1, ctypes.c_char_p(rule), 0))
        finally:
            os.close(handle)

    def run_command(self, stage: str, command: list[str]) -> bool:
        """Runs a command within its limits; returns whether it succeeded."""
        start = time.perf_counter()
        child = os.fork()
        if child == 0:
            self.exec_command(command)
        # Polling a pidfd waits for the exit without reaping the child, so its pid cannot be reused
        # in the meantime.
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
            # One check may count pages twice while processes start and end, so two consecutive
            # checks are needed.
            large = looks > 1
            if late or large:
                os.kill(child, signal.SIGKILL)
                break
        seconds = time.perf_counter() - start
        _, status, used = os.wait4(child, 0)
        os.close(handle)
        # Background processes must not survive into the next command.
        self.kill_leftovers()
        code = os.waitstatus_to_exitcode(status)
        memory = used.ru_maxrss * 1024
        self.report_facts(
            stage=stage, code=code, seconds=seconds, late=late, large=large, memory=memory
        )
        return code == 0 and not late and not large

    def memory_bytes(self) -> int:
        """Returns the resident memory of all processes of the job; shared pages count once."""
        processes = [name for name in os.listdir("/proc") if name.isdigit() and name != "1"]
        resident = (
            sum(read_proc_number(f"/proc/{name}/statm", 1) for name in processes) * PAGE_BYTES
        )
        if resident <= self.job["total_memory"]:
            return resident
        # The proportional set size (each page divided by its users) is more expensive to read and
        # rarely needed. A process can forbid it, and then counts in full.
        return sum(
            read_proc_number(f"/proc/{name}/smaps_rollup", "Pss:") * 1024
            or read_proc_number(f"/proc/{name}/statm", 1) * PAGE_BYTES
            for name in processes
        )

    def exec_command(self, command: list[str]) -> None:
        """Replaces this process by a command with limits, its own session and a minimal
        environment."""
        try:
            os.setsid()
            check_syscall(libc.prctl(PDEATHSIG, signal.SIGKILL))
            # If it fails, the probe has already reported it.
            with contextlib.suppress(OSError):
                self.apply_landlock()
            for name, limit in self.job["limits"].items():
                kind = getattr(resource, f"RLIMIT_{name}")
                limit += self.other_threads if name == "NPROC" else 0
                hard = resource.getrlimit(kind)[1]
                if hard != resource.RLIM_INFINITY:
                    limit = min(limit, hard)
                resource.setrlimit(kind, (limit, limit))
            names = {"PATH": "/usr/bin:/bin", "HOME": self.work_dir, "TMPDIR": self.work_dir}
            # Last, because the filter refuses calls that the steps above need.
            if self.has_syscall_filter:
                self.apply_seccomp()
            os.execve(command[0], command, names)
        # This is a forked child, so no exception may return into the code of the worker.
        except BaseException as error:
            os.write(2, f"{command[0]} cannot be run: {error}\n".encode())
        os._exit(127)

    def count_user_threads(self) -> int:
        """Returns the threads of this user, which count towards NPROC without a user namespace."""
        count = 0
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                if os.stat(f"/proc/{name}").st_uid == os.getuid():
                    count += len(os.listdir(f"/proc/{name}/task"))
            except OSError:
                continue
        return count

    def kill_leftovers(self) -> None:
        """Kills all remaining processes of commands; orphans become children of this process."""
        while True:
            # In a separate namespace, PID -1 means all other processes of the job. The loop ends
            # when there is nothing left to kill or to reap.
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
    """Returns the children of a process."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat") as file:
                # The name in parentheses may contain spaces and parentheses, so split after the
                # last one.
                parent = int(file.read().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue
        found += [int(name)] if parent == process else []
    return found


def read_proc_number(path: str, place: int | str) -> int:
    """Returns a number in a /proc file, by index or by the word before it; 0 if the file is
    gone."""
    try:
        with open(path) as file:
            words = file.read().split()
        return int(words[words.index(place) + 1 if isinstance(place, str) else place])
    except (OSError, ValueError, IndexError):
        return 0


def bubblewrap_command(
    bubblewrap: str, work: str, readable: list[str], command: list[str]
) -> list[str]:
    """Returns the command line that runs a command inside bubblewrap.

    It sees a new root with the system directories, read-only, and an empty directory `work`; its
    only remaining capability allows it to mount a file system with a size limit there. `--dev`
    cannot be used, because it removes that capability.
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
    # The new root is a tmpfs without a size limit.
    words += ["--remount-ro", "/"]
    return [*words, "--chdir", "/", "--", *command]


if __name__ == "__main__":
    where, handle, *words = sys.argv[1:]
    # Inside bubblewrap (a third argument) the job is an open file descriptor, outside it is a
    # path.
    with open(int(where) if words else where, encoding="utf-8") as text:
        given = json.load(text)
    SandboxWorker(given, int(handle), inside=bool(words)).run()
