"""Cache of search results, keyed by everything that they depend on.

A key is the SHA-256 of the request (model, workload, cluster with measurements, settings) and of
this package's own files, so another version of the code searches again. An entry is compressed JSON
with its key and a checksum. It is written to a temporary file and renamed, so that a reader sees
either a complete entry or none. An entry that cannot be read or is invalid counts as missing. If
the directory is not writable, nothing is stored. The newest MAX_ENTRIES entries are kept.
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
"""Maximum number of entries."""
MAX_ENTRY_BYTES = 2**28
"""Maximum size of a decompressed entry. Larger files are not written by this module."""
SHARED_FIELDS = ("tokens", "flops", "devices", "peak", "limit")
"""Fields of a prediction that all layouts of a request share."""


def load_result(wish: SearchRequest) -> SearchResult | None:
    """Returns the cached result of the same request, if there is a valid one."""
    key = request_key(wish)
    try:
        path = _cache_folder() / _entry_name(key)
        if not path.is_file():
            return None
        return _result_from_dict(wish, _unpack_entry(path.read_bytes(), key))
    # The file may be damaged or written by another program: any parse error means a missing entry.
    except (OSError, ValueError, KeyError, TypeError, AttributeError, AssertionError, zlib.error):
        return None


def store_result(result: SearchResult) -> None:
    """Stores a result if possible."""
    key = request_key(result.request)
    with contextlib.suppress(OSError):
        folder = _cache_folder()
        folder.mkdir(exist_ok=True)
        handle, name = tempfile.mkstemp(dir=folder, suffix=".part")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(_pack_entry(_result_to_dict(result), key))
            os.replace(name, folder / _entry_name(key))
        # Also on KeyboardInterrupt: never leave a partial file behind.
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
    """Deletes all but the newest entries; other processes may do the same concurrently."""
    ages = list[tuple[float, Path]]()
    for path in folder.iterdir():
        with contextlib.suppress(OSError):
            ages.append((path.stat().st_mtime, path))
    for _, path in sorted(ages, reverse=True)[MAX_ENTRIES:]:
        with contextlib.suppress(OSError):
            path.unlink()


# ---- keys ---------------------------------------------------------------------------------


def request_key(wish: SearchRequest) -> str:
    """Returns the cache key of a request: a hash of everything that the result depends on."""
    text = json.dumps([CACHE_FORMAT, code_version(), _to_plain(wish)], separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


@cache
def code_version() -> str:
    """Returns the SHA-256 of all files of this package that a prediction may depend on."""
    root = Path(__file__).resolve().parents[1]
    found = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        if path.suffix in (".py", ".toml", ".json"):
            found.update(f"{path.relative_to(root)}\0".encode())
            found.update(hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()


def _to_plain(value: Any) -> Any:
    """Returns a value of a request in JSON-compatible form, in a deterministic order."""
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
    # Bounded, so that a corrupt or malicious file cannot exhaust memory.
    text = zlib.decompressobj().decompress(packed, MAX_ENTRY_BYTES)
    if hashlib.sha256(text).digest() != checksum:
        raise ValueError("the checksum differs")
    facts: dict[str, Any] = json.loads(text)
    if facts["key"] != key:
        raise ValueError("it is the result of another request")
    return facts


def _result_to_dict(result: SearchResult) -> dict[str, Any]:
    every = (*result.feasible_candidates, *result.oversized_candidates)
    usual = result.request.plan
    if every:
        same = [getattr(every[0].prediction, name) for name in SHARED_FIELDS]
    else:
        same = []
    # Stored once for all candidates, which keeps entries small.
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
    """Returns the plan's fields that differ from the request, and the prediction of a layout."""
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
    # JSON has no tuples, but the fields of a plan are tuples.
    own = {name: tuple(one) if isinstance(one, list) else one for name, one in own.items()}
    plan = replace(wish.plan, **own)
    layout = Candidate(plan=plan, axis_order=plan.axis_order, states=states, fp8=wish.fp8)
    return PredictedCandidate(
        layout, Prediction(parts, MemoryBreakdown(device, host, where), **same)
    )
