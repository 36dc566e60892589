"""Result cache: answers of earlier searches, found again by all that they depend on.

A key is the SHA-256 of the request (model, job, cluster with what was measured, settings) and of
this package's own files: another version of the code searches anew. An entry is compressed JSON
with its key and a checksum, written beside its name and moved there, so that a reader sees a whole
one or none. An entry that cannot be read, or is not what it should be, counts as missing; a folder
that cannot be written keeps nothing. The newest MOST entries stay.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import zlib
from collections.abc import Mapping, Sequence, Set
from dataclasses import fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from ranvier import launch
from ranvier.config.plan import Plan
from ranvier.planner.baselines import Found
from ranvier.planner.memory.breakdown import Table
from ranvier.planner.predict import Layout, Prediction
from ranvier.planner.search import Result, Wish

FORMAT = 1
MOST = 40
"""Entries that are kept."""
LARGEST = 2**28
"""Bytes of an entry, unpacked: more is none of ours."""
SAME = ("tokens", "flops", "devices", "peak", "limit")
"""Fields of a prediction that all layouts of a request share."""


def load(wish: Wish) -> Result | None:
    """The result of the same request, if it was kept and is whole."""
    key = key_of(wish)
    try:
        path = _folder() / _name(key)
        if not path.is_file():
            return None
        return _result(wish, _unpacked(path.read_bytes(), key))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, AssertionError, zlib.error):
        return None


def store(result: Result) -> None:
    """Keep a result, where that is possible."""
    key = key_of(result.wish)
    with contextlib.suppress(OSError):
        folder = _folder()
        folder.mkdir(exist_ok=True)
        handle, name = tempfile.mkstemp(dir=folder, suffix=".part")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(_packed(_facts(result), key))
            os.replace(name, folder / _name(key))
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise
        _prune(folder)


def _folder() -> Path:
    return launch.cache() / "plans"


def _name(key: str) -> str:
    return f"{key}.json.z"


def _prune(folder: Path) -> None:
    """Leave the newest entries; others may do the same at once."""
    ages = list[tuple[float, Path]]()
    for path in folder.iterdir():
        with contextlib.suppress(OSError):
            ages.append((path.stat().st_mtime, path))
    for _, path in sorted(ages, reverse=True)[MOST:]:
        with contextlib.suppress(OSError):
            path.unlink()


# ---- keys ---------------------------------------------------------------------------------


def key_of(wish: Wish) -> str:
    """The name of a request: of all that its answer depends on."""
    text = json.dumps([FORMAT, code_version(), _plain(wish)], separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


@cache
def code_version() -> str:
    """The SHA-256 of all files of this package that a prediction may depend on."""
    root = Path(__file__).resolve().parents[1]
    found = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        if path.suffix in (".py", ".toml", ".json"):
            found.update(f"{path.relative_to(root)}\0".encode())
            found.update(hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()


def _plain(value: Any) -> Any:
    """Anything of a request as JSON holds it, in one order."""
    if is_dataclass(value):
        own = {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
        return [type(value).__name__, own]
    if isinstance(value, Mapping):
        return {str(name): _plain(value[name]) for name in sorted(value, key=str)}
    if isinstance(value, Set):
        return sorted(map(str, value))
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(one) for one in value]
    assert value is None or isinstance(value, str | int | float | bool), value
    return value


# ---- entries ------------------------------------------------------------------------------


def _packed(facts: Mapping[str, Any], key: str) -> bytes:
    text = json.dumps({"key": key, **facts}, separators=(",", ":")).encode()
    return hashlib.sha256(text).digest() + zlib.compress(text, 1)


def _unpacked(data: bytes, key: str) -> dict[str, Any]:
    checksum, packed = data[:32], data[32:]
    text = zlib.decompressobj().decompress(packed, LARGEST)
    if hashlib.sha256(text).digest() != checksum:
        raise ValueError("the checksum differs")
    facts: dict[str, Any] = json.loads(text)
    if facts["key"] != key:
        raise ValueError("it is the answer to another request")
    return facts


def _facts(result: Result) -> dict[str, Any]:
    every, usual = (*result.found, *result.tight), result.wish.plan
    same = [getattr(every[0].prediction, name) for name in SAME] if every else []
    assert all([getattr(one.prediction, name) for name in SAME] == same for one in every)
    return {
        "same": same,
        "found": [_row(one, usual) for one in result.found],
        "tight": [_row(one, usual) for one in result.tight],
        "grids": result.grids,
        "refused": result.refused,
        "seconds": result.seconds,
    }


def _row(found: Found, usual: Plan) -> list[Any]:
    """A layout: what of its plan differs from that of the request, and what is predicted."""
    plan, it = found.plan, found.prediction
    own = {field.name: getattr(plan, field.name) for field in fields(plan)}
    own = {name: value for name, value in own.items() if value != getattr(usual, name)}
    memory = [dict(it.memory.device), dict(it.memory.host), it.memory.where]
    return [own, found.layout.states, dict(it.parts), memory]


def _result(wish: Wish, facts: Mapping[str, Any]) -> Result:
    same = dict(zip(SAME, facts["same"], strict=bool(facts["same"])))
    both = ([_found(wish, same, row) for row in facts[name]] for name in ("found", "tight"))
    found, tight = both
    return Result(
        wish,
        tuple(found),
        tuple(tight),
        grids=facts["grids"],
        refused=facts["refused"],
        seconds=facts["seconds"],
        cached=True,
    )


def _found(wish: Wish, same: Mapping[str, Any], row: Sequence[Any]) -> Found:
    own, states, parts, (device, host, where) = row
    own = {name: tuple(one) if isinstance(one, list) else one for name, one in own.items()}
    plan = replace(wish.plan, **own)
    layout = Layout(plan=plan, order=plan.placed, states=states, fp8=wish.fp8)
    return Found(layout, Prediction(parts, Table(device, host, where), **same))
