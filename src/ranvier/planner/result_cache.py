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
from ranvier.planner.baselines import PredictedCandidate
from ranvier.planner.memory.breakdown import MemoryBreakdown
from ranvier.planner.predict import Candidate, Prediction
from ranvier.planner.search import SearchRequest, SearchResult

CACHE_FORMAT = 1
MAX_ENTRIES = 40
"""Entries that are kept."""
MAX_ENTRY_BYTES = 2**28
"""Bytes of an entry, unpacked: more is none of ours."""
SHARED_FIELDS = ("tokens", "flops", "devices", "peak", "limit")
"""Fields of a prediction that all layouts of a request share."""


def load_result(wish: SearchRequest) -> SearchResult | None:
    """The result of the same request, if it was kept and is whole."""
    key = request_key(wish)
    try:
        path = _cache_folder() / _entry_name(key)
        if not path.is_file():
            return None
        return _result_from_dict(wish, _unpack_entry(path.read_bytes(), key))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, AssertionError, zlib.error):
        return None


def store_result(result: SearchResult) -> None:
    """Keep a result, where that is possible."""
    key = request_key(result.request)
    with contextlib.suppress(OSError):
        folder = _cache_folder()
        folder.mkdir(exist_ok=True)
        handle, name = tempfile.mkstemp(dir=folder, suffix=".part")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(_pack_entry(_result_to_dict(result), key))
            os.replace(name, folder / _entry_name(key))
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise
        _prune_entries(folder)


def _cache_folder() -> Path:
    return launch.cache_dir() / "plans"


def _entry_name(key: str) -> str:
    return f"{key}.json.z"


def _prune_entries(folder: Path) -> None:
    """Leave the newest entries; others may do the same at once."""
    ages = list[tuple[float, Path]]()
    for path in folder.iterdir():
        with contextlib.suppress(OSError):
            ages.append((path.stat().st_mtime, path))
    for _, path in sorted(ages, reverse=True)[MAX_ENTRIES:]:
        with contextlib.suppress(OSError):
            path.unlink()


# ---- keys ---------------------------------------------------------------------------------


def request_key(wish: SearchRequest) -> str:
    """The name of a request: of all that its answer depends on."""
    text = json.dumps([CACHE_FORMAT, code_version(), _to_plain(wish)], separators=(",", ":"))
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


def _to_plain(value: Any) -> Any:
    """Anything of a request as JSON holds it, in one order."""
    if is_dataclass(value):
        own = {field.name: _to_plain(getattr(value, field.name)) for field in fields(value)}
        return [type(value).__name__, own]
    if isinstance(value, Mapping):
        return {str(name): _to_plain(value[name]) for name in sorted(value, key=str)}
    if isinstance(value, Set):
        return sorted(map(str, value))
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_to_plain(one) for one in value]
    assert value is None or isinstance(value, str | int | float | bool), value
    return value


# ---- entries ------------------------------------------------------------------------------


def _pack_entry(facts: Mapping[str, Any], key: str) -> bytes:
    text = json.dumps({"key": key, **facts}, separators=(",", ":")).encode()
    return hashlib.sha256(text).digest() + zlib.compress(text, 1)


def _unpack_entry(data: bytes, key: str) -> dict[str, Any]:
    checksum = data[:32]
    packed = data[32:]
    text = zlib.decompressobj().decompress(packed, MAX_ENTRY_BYTES)
    if hashlib.sha256(text).digest() != checksum:
        raise ValueError("the checksum differs")
    facts: dict[str, Any] = json.loads(text)
    if facts["key"] != key:
        raise ValueError("it is the answer to another request")
    return facts


def _result_to_dict(result: SearchResult) -> dict[str, Any]:
    every = (*result.feasible_candidates, *result.oversized_candidates)
    usual = result.request.plan
    if every:
        same = [getattr(every[0].prediction, name) for name in SHARED_FIELDS]
    else:
        same = []
    assert all([getattr(one.prediction, name) for name in SHARED_FIELDS] == same for one in every)
    return {
        "same": same,
        "found": [_candidate_to_row(one, usual) for one in result.feasible_candidates],
        "tight": [_candidate_to_row(one, usual) for one in result.oversized_candidates],
        "grids": result.num_grids,
        "refused": result.num_rejected_grids,
        "seconds": result.search_seconds,
    }


def _candidate_to_row(found: PredictedCandidate, usual: Plan) -> list[Any]:
    """A layout: what of its plan differs from that of the request, and what is predicted."""
    plan = found.plan
    it = found.prediction
    own = {field.name: getattr(plan, field.name) for field in fields(plan)}
    own = {name: value for name, value in own.items() if value != getattr(usual, name)}
    memory = [dict(it.memory.device), dict(it.memory.host), it.memory.where]
    return [own, found.candidate.states, dict(it.seconds_by_part), memory]


def _result_from_dict(wish: SearchRequest, facts: Mapping[str, Any]) -> SearchResult:
    same = dict(zip(SHARED_FIELDS, facts["same"], strict=bool(facts["same"])))
    both = (
        [_candidate_from_row(wish, same, row) for row in facts[name]] for name in ("found", "tight")
    )
    found, tight = both
    return SearchResult(
        wish,
        tuple(found),
        tuple(tight),
        num_grids=facts["grids"],
        num_rejected_grids=facts["refused"],
        search_seconds=facts["seconds"],
        from_cache=True,
    )


def _candidate_from_row(
    wish: SearchRequest, same: Mapping[str, Any], row: Sequence[Any]
) -> PredictedCandidate:
    own, states, parts, (device, host, where) = row
    own = {name: tuple(one) if isinstance(one, list) else one for name, one in own.items()}
    plan = replace(wish.plan, **own)
    layout = Candidate(plan=plan, axis_order=plan.axis_order, states=states, fp8=wish.fp8)
    return PredictedCandidate(
        layout, Prediction(parts, MemoryBreakdown(device, host, where), **same)
    )
