"""Sandbox: builds and runs an untrusted program on this machine.

A program is one file of Python or C: a candidate, then its tests. It passes if the tests run to
their end; a program that exits earlier fails. The kernel isolates it (see `sandbox_worker` and
`seccomp`), together with bubblewrap if that is installed. It has no network, sockets, environment
or input, does not see other processes, and sees only its own files and system files. Its memory,
time, processes, disk and output are limited.

The sandbox is meant for mistakes and misbehavior of programs that a model has written. It does not
protect against an attacker with a kernel exploit, and does not isolate timing: other work on the
machine affects the times.
"""

from __future__ import annotations

import json
import os
import platform
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from ranvier.errors import DataError, PlanError
from ranvier.eval.code.seccomp import build_filter

Language = Literal["python", "c"]
GRACE_SECONDS = 5.0
"""Time that a worker has for its own work."""
KILL_SECONDS = 5.0
"""Time that processes have to end after they are killed."""
BUBBLEWRAP = "bwrap"
"""Name of the program that is used if it is installed."""
WORKER_PATH = Path(__file__).with_name("sandbox_worker.py")
PYTHON = os.path.realpath(sys.executable)
"""The real path of Python. Links to it, as in virtual environments, may pass through directories
that the sandbox hides."""
PYTHON_VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
SYNTAX_CHECK = (
    "import sys; compile(open(sys.argv[1], encoding='utf-8').read(), sys.argv[1], 'exec')"
)
C_TEST_MAIN = """\
#include <stdio.h>
int tests_main(int, char **);
int main(int count, char **words) {{
    int code = tests_main(count, words);
    if (code == 0) {{ fflush(stdout); puts("{word}"); }}
    return code;
}}
"""
"""The main function that calls the tests of a C program, whose own main is renamed."""


@dataclass(frozen=True, kw_only=True)
class SandboxLimits:
    """Limits of a program."""

    seconds: float = 10.0
    """Wall-clock time of each build command and of the run."""
    cpu_seconds: int = 10
    """CPU time of each process."""
    memory_bytes: int = 1 << 30
    """Address space of each process, in bytes."""
    total_memory_bytes: int = 2 << 30
    """Memory of all processes together, in bytes."""
    file_bytes: int = 16 << 20
    """Maximum size of a file, in bytes."""
    disk_bytes: int = 64 << 20
    """Size of all files together, in bytes."""
    processes: int = 32
    """Maximum number of processes and threads."""
    output_bytes: int = 1 << 16
    """Maximum size of the output, in bytes."""


@dataclass(frozen=True)
class SandboxResult:
    """Outcome of a program."""

    built: bool
    passed: bool
    seconds: float
    """Duration of the run; 0 if it did not run."""
    failure: str
    """Why it failed; empty if it passed."""
    output: str
    missing_guards: tuple[str, ...]
    """Protection that is not available on this machine, and the consequence."""
    guards: tuple[str, ...] = ()
    """Mechanisms that isolated it."""


def run_program(language: str, program: str, limits: SandboxLimits | None = None) -> SandboxResult:
    """Builds a program and runs it."""
    limits = limits or SandboxLimits()
    try:
        program.encode()
    except UnicodeEncodeError as error:
        why = f"not built: character {error.start} is a lone surrogate, which is not valid UTF-8"
        return SandboxResult(False, False, 0.0, why, "", ())
    # Printed after the tests. It is random, so that a program cannot print it by accident or by
    # guessing.
    word = f"passed-{secrets.token_hex(8)}"
    folder = Path(tempfile.mkdtemp(prefix="ranvier-cell-"))
    try:
        work = folder / "work"
        work.mkdir()
        # The worker may become an unprivileged user, who must be able to reach `work`.
        folder.chmod(0o711)
        files, commands = _build_commands(language, program, word, work)
        job = {
            "work": str(work),
            "files": files,
            "commands": commands,
            "python": PYTHON,
            "bubblewrap": shutil.which(BUBBLEWRAP) or "",
            "filter": (build_filter(platform.machine()) or b"").hex(),
            "readable": sorted({sys.prefix, sys.base_prefix}),
            "same": [f"{place}/python{PYTHON_VERSION}" for place in ("/usr/local/bin", "/usr/bin")],
            "seconds": limits.seconds,
            "disk_bytes": limits.disk_bytes,
            "total_memory": limits.total_memory_bytes,
            "limits": {
                "CPU": limits.cpu_seconds,
                "AS": limits.memory_bytes,
                "FSIZE": limits.file_bytes,
                "NPROC": limits.processes,
                "NOFILE": 64,
                "CORE": 0,
                "MSGQUEUE": 0,
                "RTPRIO": 0,
            },
        }
        (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
        output, lines, cut = _run_worker(folder / "job.json", limits)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return _judge_report(output, lines, cut, word, limits)


def _build_commands(
    language: str, program: str, word: str, work: Path
) -> tuple[dict[str, str], list[tuple[str, list[str]]]]:
    """Returns the files of a job, and its commands by stage."""
    if not sys.platform.startswith("linux"):
        raise PlanError(
            f"Programs cannot be run on {sys.platform}. The sandbox requires Linux. Run them on "
            "Linux."
        )
    if language == "python":
        name = str(work / "main.py")
        source = f"{program}\nprint({word!r})\n"
        # -I and -S: no environment, no user or site packages.
        build = [PYTHON, "-I", "-S", "-c", SYNTAX_CHECK, name]
        start = [PYTHON, "-I", "-S", name]
        return {"main.py": source}, [("build", build), ("run", start)]
    if language != "c":
        raise DataError(
            f"language={language!r} is not supported. Supported languages are "
            f"{' and '.join(get_args(Language))}. Use one of them."
        )
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise PlanError(
            "No C compiler was found (gcc or cc). Programs in C need one. Install gcc, or remove "
            "the tasks in C."
        )
    options = ["-O2", "-std=c11", "-w"]
    return {"main.c": program, "ends.c": C_TEST_MAIN.format(word=word)}, [
        ("build", [compiler, *options, "-Dmain=tests_main", "-c", "main.c"]),
        ("build", [compiler, *options, "main.o", "ends.c", "-o", "main", "-lm"]),
        ("run", [str(work / "main")]),
    ]


def _run_worker(job: Path, limits: SandboxLimits) -> tuple[bytes, list[dict[str, Any]], str]:
    """Returns output and report of a worker, and why it was killed, if it was."""
    told, report = os.pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(WORKER_PATH), str(job), str(report)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(report,),
            env={},
            cwd="/",
            start_new_session=True,
        )
    finally:
        # Only the worker keeps the write end, so the report ends when the worker exits.
        os.close(report)
    assert process.stdout is not None
    # At most three commands (two for a C build, and the run), each with the full time limit.
    stages = 3
    limit = time.monotonic() + stages * limits.seconds + GRACE_SECONDS
    why = ""
    parts: dict[int, bytearray] = {process.stdout.fileno(): bytearray(), told: bytearray()}
    open_ = set(parts)
    try:
        while open_ and not why:
            # Output and report are read together, because a full pipe would block the worker.
            ready, _, _ = select.select(open_, [], [], max(limit - time.monotonic(), 0.0))
            if ready:
                why = ""
            else:
                why = f"ran longer than {limits.seconds:g} s"
            for handle in ready:
                piece = os.read(handle, 1 << 16)
                open_ -= set() if piece else {handle}
                parts[handle] += piece
            if len(parts[process.stdout.fileno()]) > limits.output_bytes:
                why = f"wrote more than {limits.output_bytes} bytes of output"
    finally:
        if process.poll() is None:
            _kill_worker(process)
        output = parts[process.stdout.fileno()]
        lines = parts[told]
        process.stdout.close()
        os.close(told)
    return bytes(output), _parse_report(bytes(lines)), why


def _kill_worker(process: subprocess.Popen[bytes]) -> None:
    """Kills a worker. All its processes end with the first one, after which none can write."""
    try:
        # A worker that has just closed its pipes may be about to exit by itself.
        process.wait(0.2)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert process.stdout is not None
    # End of file on the output means that every process that held it has ended.
    limit = time.monotonic() + KILL_SECONDS
    while (left := limit - time.monotonic()) > 0.0:
        ready, _, _ = select.select([process.stdout], [], [], left)
        if ready and not os.read(process.stdout.fileno(), 1 << 16):
            return


def _parse_report(text: bytes) -> list[dict[str, Any]]:
    """Returns the complete lines of a report; an incomplete last line is dropped."""
    return [json.loads(line) for line in text.split(b"\n")[:-1]]


def _judge_report(
    output: bytes, lines: Sequence[dict[str, Any]], cut: str, word: str, limits: SandboxLimits
) -> SandboxResult:
    """Returns the result according to output and report."""
    text = output[: limits.output_bytes].decode(errors="replace")
    lacks = tuple(lack for line in lines for lack in line.get("lacks", ()))
    guards = tuple(guard for line in lines for guard in line.get("guards", ()))
    stages = [line for line in lines if "stage" in line]
    # The worker writes this line before the first command, so without it nothing ran.
    if not any("lacks" in line for line in lines):
        return SandboxResult(
            False, False, 0.0, f"the sandbox failed to start: {text[-500:]}", text, lacks, guards
        )
    builds = [line for line in stages if line["stage"] == "build"]
    runs = [line for line in stages if line["stage"] == "run"]
    failed = [
        _failure_of_command(line, limits)
        for line in builds
        if line["code"] != 0 or line["late"] or line["large"]
    ]
    built = not failed and bool(runs or cut)
    if not built:
        return SandboxResult(
            False, False, 0.0, f"not built: {(failed or [cut])[0]}", text, lacks, guards
        )
    if not runs:
        return SandboxResult(True, False, 0.0, cut or "ended with its sandbox", text, lacks, guards)
    why = cut or _failure_of_command(runs[0], limits)
    seconds = float(runs[0]["seconds"])
    # Exit code 0 is not enough, because the program may have exited before its tests.
    if not why and word not in text:
        why = "exited before the end of its tests"
    text = text.replace(f"{word}\n", "")
    return SandboxResult(True, not why, seconds, why, text, lacks, guards)


def _failure_of_command(line: dict[str, Any], limits: SandboxLimits) -> str:
    """Returns why a command failed; empty if it did not."""
    code = int(line["code"])
    if line["late"]:
        return f"ran longer than {limits.seconds:g} s"
    if line["large"]:
        return f"used more than {limits.total_memory_bytes} bytes of memory in all its processes"
    # At its hard CPU limit a process gets SIGKILL; a wall time beyond the limit identifies it.
    if code == -signal.SIGXCPU or (
        code == -signal.SIGKILL and line["seconds"] >= limits.cpu_seconds
    ):
        return f"used more than {limits.cpu_seconds} s of CPU time"
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    if code:
        return f"exit code {code}"
    return ""
