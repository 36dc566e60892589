"""Programs are judged by their tests, and what they try against others comes to nothing."""

from __future__ import annotations

import os
import platform
import secrets
import shutil
import socket
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest

from ranvier.errors import DataError
from ranvier.eval.code import sandbox
from ranvier.eval.code.sandbox import SandboxLimits, SandboxResult, run_program
from ranvier.eval.code.sandbox_worker import bubblewrap_command
from ranvier.eval.code.seccomp import build_filter

BOUNDS = SandboxLimits(seconds=20.0, memory_bytes=256 << 20, processes=16, output_bytes=4096)
WITHOUT = "        raise OSError(1, 'refused for a test')\n"


@pytest.fixture(params=["namespaces", pytest.param("none", marks=pytest.mark.full)])
def cell(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The cell as it is, and as it is where the kernel grants no namespaces."""
    if request.param == "none":
        text = sandbox.WORKER_PATH.read_text()
        head = "        user = os.getuid()\n"
        assert head in text
        path = tmp_path / "cell.py"
        path.write_text(text.replace(head, WITHOUT + head))
        monkeypatch.setattr(sandbox, "WORKER_PATH", path)
        monkeypatch.setattr(sandbox, "BUBBLEWRAP", "no-such-program")
    return str(request.param)


def survivors(word: str) -> list[int]:
    """Processes that were given a word."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if word.encode() in Path(f"/proc/{name}/cmdline").read_bytes():
                found.append(int(name))
        except OSError:
            continue
    return [process for process in found if process != os.getpid()]


@pytest.mark.parametrize(
    ("language", "program", "built", "why"),
    [
        ("python", "assert sorted([2, 1]) == [1, 2]", True, ""),
        ("python", "assert 1 == 2", True, "exit code 1"),
        ("python", "def f(:", False, "not built"),
        ("python", "x = '\ud800'", False, "not built: character 5 is a lone surrogate"),
        ("python", "raise SystemExit(0)", True, "exited before the end of its tests"),
        ("c", "int main(void) { return 0; }", True, ""),
        ("c", "int main(void) { return 3; }", True, "exit code 3"),
        ("c", "int main(void {", False, "not built"),
        ("c", "#include <stdlib.h>\nint main(void) { exit(0); }", True, "exited before"),
        ("c", "int main(void) { volatile int *x = 0; return *x; }", True, "SIGSEGV"),
    ],
)
def test_a_program_passes_if_its_tests_come_to_their_end(
    language: str, program: str, built: bool, why: str
) -> None:
    found = run_program(language, program)
    assert (found.built, found.passed) == (built, why == ""), found
    assert found.failure.startswith(why) or why in found.failure, found
    assert (found.seconds > 0.0) == built


def test_other_languages_are_refused() -> None:
    with pytest.raises(DataError, match="python and c"):
        run_program("fortran", "end")


def attacked(program: str, limits: SandboxLimits = BOUNDS) -> SandboxResult:
    """A program that must not pass; it ends in time."""
    start = time.monotonic()
    found = run_program("python", program, limits)
    assert found.built and not found.passed, found
    assert time.monotonic() - start < 60.0, "it was let run"  # not even on a busy machine
    return found


def test_endless_programs_are_ended(cell: str) -> None:
    deaf = "import signal, time\nsignal.signal(15, signal.SIG_IGN)\n"
    spin = attacked(f"{deaf}while True: pass", replace(BOUNDS, cpu_seconds=1))
    assert spin.failure == "used more than 1 s of CPU time"
    idle = attacked(f"{deaf}time.sleep(999)", replace(BOUNDS, seconds=3.0))
    assert idle.failure == "ran longer than 3 s"


def test_what_is_left_behind_is_ended(cell: str) -> None:
    word = f"left-{secrets.token_hex(8)}"
    program = f"""
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(99)  # {word}"],
                         start_new_session=True)
assert child.poll() is None
"""
    assert run_program("python", program, BOUNDS).passed
    assert survivors(word) == []


def test_forks_are_bounded(cell: str) -> None:
    found = attacked("import os\nwhile True: os.fork()")
    assert "Resource temporarily unavailable" in found.output, found
    word = f"many-{secrets.token_hex(8)}"
    program = f"""
import subprocess, sys
made = []
try:
    for _ in range(200):
        sleep = "import time; time.sleep(9)  # {word}"
        made.append(subprocess.Popen([sys.executable, "-c", sleep]))
except OSError:
    pass
assert len(made) < 17, len(made)
"""
    found = run_program("python", program, BOUNDS)
    assert found.passed, found
    assert survivors(word) == []


def test_memory_files_and_output_are_bounded(cell: str) -> None:
    assert "MemoryError" in attacked("x = bytearray(1 << 30)").output
    big = "f = open('x', 'wb')\nwhile True: f.write(bytes(1 << 20))"
    assert "File too large" in attacked(big).output
    assert (
        attacked("while True: print('x' * 1000)").failure == "wrote more than 4096 bytes of output"
    )


def test_nothing_outside_is_written_or_read(cell: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    (tmp_path / "open").mkdir(mode=0o777)
    for path in (secret, tmp_path / "open" / "x", Path("/tmp") / secrets.token_hex(8)):
        found = attacked(f"open({str(path)!r}, 'w').write('x')")
        kept = ("Permission denied", "No such file", "Read-only file system")
        assert any(word in found.output for word in kept), found
    assert secret.read_text() == "secret" and not list((tmp_path / "open").iterdir())
    read = attacked(f"print(open({str(secret)!r}).read())").output
    assert "Permission denied" in read or "No such file" in read, read
    assert run_program(
        "python", "open('own', 'w').write('x')\nassert open('own').read() == 'x'"
    ).passed


def test_neither_environment_nor_input_come_in(cell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_KEY", "leaked")
    program = """
import os, sys
assert "SECRET_KEY" not in os.environ, os.environ
assert sys.stdin.read() == ""
for name in ["self", str(os.getppid()), *map(str, range(1, 400))]:
    try:
        text = open(f"/proc/{name}/environ").read()
    except OSError:
        continue
    assert "leaked" not in text
for handle in range(3, 64):
    try:
        os.write(handle, b'{"stage": "run", "code": 0}')
    except OSError:
        continue
    raise AssertionError(handle)
"""
    found = run_program("python", program)
    assert found.passed, found


def test_there_is_no_network(cell: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        found = attacked(f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 1)")
        assert "refused" in found.output or "Permission" in found.output, found
    if cell == "none":
        assert any("network" in lack for lack in found.missing_guards), (
            "it is said what is not granted"
        )


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo 'bwrap: No permissions to create new namespace' >&2; exit 1", "No permissions"),
        (
            'while [ "$1" != -- ]; do shift; done; shift; exec "$@"',
            "did not create a process namespace",
        ),
        ("exit 0", "without a message"),
    ],
)
def test_a_bubblewrap_that_does_not_work_is_told_and_done_without(
    script: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory() as folder:  # others can enter it, unlike tmp_path
        Path(folder).chmod(0o755)
        program = Path(folder) / "bwrap"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setattr(sandbox, "BUBBLEWRAP", str(program))
        found = run_program(
            "python", "import os\nassert os.getppid() in (0, 1), os.getppid()", BOUNDS
        )
    assert found.passed and "bubblewrap" not in found.guards, found
    assert any("bubblewrap" in lack and said in lack for lack in found.missing_guards), (
        found.missing_guards
    )
    assert found.output == "", "what bubblewrap says is no output of the program"


def test_bubblewrap_is_given_a_root_of_its_own() -> None:
    words = bubblewrap_command("/usr/bin/bwrap", "/tmp/x y/work", ["/usr/local", "/no/such"], ["a"])
    assert words[0] == "/usr/bin/bwrap" and words[-2:] == ["--", "a"]
    for space in ("user", "pid", "net", "ipc", "uts"):
        assert f"--unshare-{space}" in words
    binds = [words[i + 1 : i + 3] for i, word in enumerate(words) if word == "--ro-bind"]
    assert ["/usr", "/usr"] in binds and ["/usr/local", "/usr/local"] in binds
    assert all(here == there and os.path.isdir(here) for here, there in binds)
    assert not {"/", "/home", "/tmp", "/run", "/var", "/dev", "/proc"} & {here for here, _ in binds}
    assert "--bind" not in words, "nothing of the machine can be written"
    assert words[words.index("--dir") + 1] == "/tmp/x y/work"
    assert words[words.index("--remount-ro") + 1] == "/"
    assert words.index("--remount-ro") > words.index("--dir")


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
def test_bubblewrap_is_used_where_it_is_installed() -> None:
    program = """
import ctypes, os
assert not os.path.exists("/home") and not os.path.exists("/run")
capabilities = (ctypes.c_uint32 * 6)()
assert ctypes.CDLL(None).capget((ctypes.c_uint32 * 2)(0x20080522, 0), capabilities) == 0
assert not any(capabilities), list(capabilities)
"""
    found = run_program("python", program, BOUNDS)
    assert found.passed and not found.missing_guards, found
    assert found.guards == ("bubblewrap", "namespaces", "Landlock", "seccomp")


@pytest.mark.parametrize("program", [None, build_filter("aarch64"), b"12345678"])
def test_a_machine_without_filter_is_told(
    program: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if program and platform.machine() != "x86_64":
        pytest.skip("it is another machine's filter on x86-64 only")
    monkeypatch.setattr(sandbox, "build_filter", lambda machine: program)
    found = run_program("python", "assert True", BOUNDS)
    assert found.passed and "seccomp" not in found.guards
    assert any(
        "system call filter is not available" in lack and "sockets" in lack
        for lack in found.missing_guards
    )


@pytest.mark.full
def test_a_cell_that_is_ended_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    word = f"orphan-{secrets.token_hex(8)}"
    monkeypatch.setattr(sandbox, "GRACE_SECONDS", -12.0)  # the parent's own deadline comes first
    program = f"""
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(99)  # {word}"],
                 start_new_session=True)
time.sleep(99)
"""
    found = run_program("python", program, SandboxLimits(seconds=5.0))  # after 3 of the 5 seconds
    assert found.failure and found.seconds == 0.0
    assert survivors(word) == []
