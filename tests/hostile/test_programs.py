"""Programs that reach out of their cell, and honest ones beside them: see programs.toml.

Programs share a cell where they can, one after the other, each in a process of its own: a cell for
each would take as long as starting Python three times.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ranvier.eval.code import sandbox
from ranvier.eval.code.sandbox import SandboxLimits, SandboxResult, run_program

TABLE = Path(__file__).with_name("programs.toml")
LIMITS = SandboxLimits(
    seconds=20.0, cpu_seconds=2, memory_bytes=256 << 20, total_memory_bytes=160 << 20, processes=16
)
PRELUDE = """\
import ctypes, os, platform
libc = ctypes.CDLL(None, use_errno=True)
def call(x86_64, generic, *arguments):
    number = x86_64 if platform.machine() == "x86_64" else generic
    result = libc.syscall(number, *arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
"""
DRIVER = """\
import json, os, sys, traceback
import ctypes, mmap, multiprocessing.connection, platform, resource, socket, subprocess
def outcome(name, program):
    out, into = os.pipe()
    os.set_inheritable(into, True)
    child = os.fork()
    if child == 0:
        os.setsid()
        os.dup2(into, 1), os.dup2(into, 2)
        os.close(out), os.close(into)
        try:
            exec(compile(program, name, "exec"), {"__name__": "__main__"})
            code = 0
        except SystemExit as error:
            print(error.code, flush=True)
            code = 1
        except BaseException:
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        os._exit(code)
    os.close(into)
    text = b""
    while piece := os.read(out, 65536):
        text += piece
    os.close(out)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return {"name": name, "code": code, "output": text.decode(errors="replace")[-400:]}
for name, program in PROGRAMS:
    print(json.dumps(outcome(name, program)), flush=True)
"""
ROWS: list[dict[str, Any]] = [
    row
    for row in tomllib.loads(TABLE.read_text(encoding="utf-8"))["programs"]
    if row.get("machine", platform.machine()) == platform.machine()
]
WAYS = ["as it is"]
"""Ways to keep programs in, by what this machine has."""
WAYS += ["without bubblewrap"] * (shutil.which("bwrap") is not None)
LATER = ["without namespaces", "without Landlock"]


def is_alone(row: dict[str, Any]) -> bool:
    """Whether a program has a cell of its own."""
    return bool(row.get("alone")) or row.get("language") == "c"


def marked(rows: list[dict[str, Any]]) -> list[Any]:
    """Rows as parameters of a test."""
    return [
        pytest.param(row, id=row["name"], marks=[pytest.mark.full] if row.get("full") else [])
        for row in rows
    ]


@pytest.fixture(scope="module")
def around() -> Iterator[dict[str, Any]]:
    """What programs must not reach: by the words that stand for it in the table."""
    # not in pytest's own directory, which other users cannot enter anyway
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="around-"))
        home = Path(folder)
        home.chmod(0o777)
        (home / "secret").write_text("the secret\n")
        (home / "secret").chmod(0o666)
        kinds = {
            "unix": (socket.AF_UNIX, socket.SOCK_STREAM, f"{folder}/unix"),
            "datagram": (socket.AF_UNIX, socket.SOCK_DGRAM, f"{folder}/datagram"),
            "abstract": (socket.AF_UNIX, socket.SOCK_STREAM, f"\0{home.name}"),
            "tcp": (socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0)),
            "udp": (socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0)),
        }
        sockets = {}
        for name, (domain, kind, address) in kinds.items():
            sockets[name] = one = stack.enter_context(socket.socket(domain, kind))
            one.bind(address)
            one.setblocking(False)
            if kind == socket.SOCK_STREAM:
                one.listen()
        for name in ("unix", "datagram"):
            Path(kinds[name][2]).chmod(0o777)
        sleeper = subprocess.Popen(
            ["/bin/sleep", "999"],
            env={"LEAK": "the secret"},
            **({"user": 65534, "group": 65534, "extra_groups": []} if os.getuid() == 0 else {}),
        )
        words = {
            "unix": kinds["unix"][2],
            "datagram": kinds["datagram"][2],
            "abstract": home.name,
            "tcp": sockets["tcp"].getsockname()[1],
            "udp": sockets["udp"].getsockname()[1],
            "secret": f"{folder}/secret",
            "home": folder,
            "pid": sleeper.pid,
        }
        yield {"words": words, "sockets": sockets, "sleeper": sleeper}
        sleeper.kill()
        sleeper.wait()


def check_around(around: dict[str, Any]) -> None:
    """Nothing came in, nothing was changed."""
    for name, one in around["sockets"].items():
        receive = one.accept if name in ("unix", "abstract", "tcp") else lambda one=one: one.recv(1)
        with pytest.raises(BlockingIOError):
            receive()
    assert around["sleeper"].poll() is None, "a process was ended"
    home = Path(around["words"]["home"])
    assert sorted(path.name for path in home.iterdir()) == ["datagram", "secret", "unix"]
    assert (home / "secret").read_text() == "the secret\n"


def filled(row: dict[str, Any], around: dict[str, Any]) -> str:
    """A program with the words of the table filled in."""
    text = str(row["program"])
    for word, value in around["words"].items():
        text = text.replace(f"@{word}@", str(value))
    return text if row.get("language") == "c" else PRELUDE + text


def check_outcome(row: dict[str, Any], passed: bool, said: str, lacks: tuple[str, ...]) -> str:
    """What is wrong with the outcome of a program; empty: nothing."""
    name, outcome = row["name"], row["outcome"]
    if "the secret" in said:
        return f"{name}: read the secret"
    if passed == (outcome == "passes") and (passed or outcome in said):
        return ""
    return f"{name}: not {outcome!r}, but passed={passed}: {said!r} {lacks}"


@pytest.fixture(params=[*WAYS, *(pytest.param(way, marks=pytest.mark.full) for way in LATER)])
def way(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The cell as it is on this machine, and as it is where something is missing."""
    refused = "        raise OSError(1, 'refused for a test')\n"
    heads = {
        "without namespaces": "        user = os.getuid()\n",
        "without Landlock": "        abi = check_syscall(libc.syscall(CREATE_RULESET,",
    }
    if request.param in heads:
        text, head = sandbox.WORKER_PATH.read_text(), heads[request.param]
        assert head in text
        path = tmp_path / "cell.py"
        path.write_text(text.replace(head, refused + head))
        monkeypatch.setattr(sandbox, "WORKER_PATH", path)
    if request.param in ("without bubblewrap", "without namespaces"):
        monkeypatch.setattr(sandbox, "BUBBLEWRAP", "no-such-program")
    return str(request.param)


def skipped(way: str, row: dict[str, Any]) -> bool:
    """Whether a program is let through where a mechanism is missing, as the docs say."""
    name = row["name"]
    if way == "without namespaces":  # neither bounded together nor counted
        return name in ("many-files", "many-names", "memory-of-many", "memory-of-many-who-hide")
    if way == "without Landlock":
        files = row["outcome"] == "Error: [Errno" or name == "c-includes-a-secret"
        return files and shutil.which("bwrap") is None
    return False


def test_programs_that_share_a_cell(way: str, around: dict[str, Any]) -> None:
    rows = [row for row in ROWS if not is_alone(row) and not skipped(way, row)]
    programs = [(row["name"], filled(row, around)) for row in rows]
    limits = replace(LIMITS, seconds=90.0, cpu_seconds=10)  # for all of them
    found = run_program("python", f"PROGRAMS = {programs!r}\n{DRIVER}", limits)
    assert found.passed, found
    assert bool(found.missing_guards) == (way in LATER), found
    lines = [json.loads(line) for line in found.output.splitlines()]
    problems = []
    for row, line in zip(rows, lines, strict=True):
        assert row["name"] == line["name"]
        code = line["code"]
        said = line["output"] + (signal.Signals(-code).name if code < 0 else "")
        problems.append(check_outcome(row, code == 0, said, found.missing_guards))
    assert not any(problems), "\n".join(filter(None, problems))
    check_around(around)


@pytest.mark.parametrize("row", marked([row for row in ROWS if is_alone(row)]))
def test_a_program_alone(way: str, row: dict[str, Any], around: dict[str, Any]) -> None:
    if skipped(way, row):
        pytest.skip(f"{way}: not closed, and said so")
    found = one_outcome(row, around)
    said = found.output + found.failure
    assert not check_outcome(row, found.passed, said, found.missing_guards), found
    check_around(around)


def one_outcome(row: dict[str, Any], around: dict[str, Any]) -> SandboxResult:
    """What becomes of a program in a cell of its own."""
    return run_program(row.get("language", "python"), filled(row, around), LIMITS)


@pytest.mark.full
@pytest.mark.parametrize("row", marked([row for row in ROWS if not is_alone(row)]))
def test_a_program_that_shares_a_cell_does_the_same_alone(
    row: dict[str, Any], around: dict[str, Any]
) -> None:
    found = one_outcome(row, around)
    assert not check_outcome(
        row, found.passed, found.output + found.failure, found.missing_guards
    ), found


def test_names_are_told_apart() -> None:
    names = [row["name"] for row in ROWS]
    assert len(set(names)) == len(names) and len(names) > 90
