"""The tables of this folder: lines of columns, and the changes to a folder that some describe."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SECRET = "a secret of this machine"


def rows(name: str) -> dict[str, list[str]]:
    """The columns of each line of a table, by the first of them."""
    found: dict[str, list[str]] = {}
    for line in (HERE / name).read_text(encoding="utf-8").splitlines():
        if line.strip() and not line.startswith("#"):
            first, *rest = line.split(" :: ")
            assert first not in found, f"{name} has two lines {first!r}"
            found[first] = rest
    assert found, name
    return found


@contextlib.contextmanager
def within(seconds: int) -> Iterator[None]:
    """Fail what waits."""

    def late(*_: object) -> None:
        raise AssertionError(f"it took longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def change(folder: Path, outside: Path, words: str) -> None:
    """Do the changes of a line to a folder; outside: where `@` leads."""
    outside.mkdir(exist_ok=True)
    (outside / "secret.txt").write_text(SECRET)
    for one in words.split(" ; "):
        verb, name, *rest = one.strip().split(" ", 2)
        text = rest[0].replace("@", f"{outside}/") if rest else ""
        _do(verb, folder / name, folder, text)


def _do(verb: str, path: Path, folder: Path, text: str) -> None:
    if verb == "set":
        key, value = text.split(" ", 1)
        table = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        _set(table, key, json.loads(value))
        path.write_text(json.dumps(table), encoding="utf-8")
        return
    if verb == "move":
        path.rename(folder / text)
        return
    if verb == "cut":
        os.truncate(path, int(text))
        return
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    match verb:
        case "link":
            path.symlink_to(text)
        case "hardlink":
            os.link(text if text.startswith("/") else folder / text, path)
        case "pipe":
            os.mkfifo(path)
        case "socket":
            here = os.getcwd()
            os.chdir(path.parent)  # names of sockets are short
            with socket.socket(socket.AF_UNIX) as one:
                one.bind(path.name)
            os.chdir(here)
        case "folder":
            path.mkdir(parents=True)
        case "large":
            with path.open("wb") as file:
                file.truncate(int(text))
        case "write":
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(
                text.encode().decode("unicode_escape").encode("utf-8", "surrogatepass")
            )
        case "remove":
            pass
        case _:
            raise AssertionError(f"no change is called {verb!r}")


def _set(table: dict[str, Any], key: str, value: Any) -> None:
    *above, last = key.split(".")
    for one in above:
        table = table.setdefault(one, {})
    table[last] = value


def tells_secret(folder: Path) -> bool:
    """Whether any file of a folder holds the secret."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return any(SECRET.encode() in path.read_bytes() for path in files)
