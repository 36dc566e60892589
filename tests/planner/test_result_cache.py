"""Results that are kept: the same question is answered at once, another or a damaged one anew."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from commands import call
from ranvier.cli import plan
from ranvier.config.plan import Plan
from ranvier.cost.optimizer import OptimizerSpec
from ranvier.planner import cluster, model_spec, result_cache
from ranvier.planner.cluster import MatmulRate
from ranvier.planner.predict import Workload
from ranvier.planner.search import SearchRequest, SearchResult, search_layouts

SHAPE: dict[str, Any] = {"layers": 4, "embed": 512, "heads": 8, "kv_heads": 8, "head_dim": 64}
SHAPE |= {"mlp": 2048, "gated": True, "vocab": 32000}
WORDS = (
    "--cluster",
    "dgx-h100",
    "--devices",
    "2",
    "--model.size",
    "llama3-1b",
    "--plan.global-batch",
    "8",
)


def wish(**changes: Any) -> SearchRequest:
    machine = cluster.load_cluster("dgx-h100").with_size(devices=4)
    return replace(
        SearchRequest(Workload(model_spec.dense_decoder(**SHAPE), 512, 8), machine), **changes
    )


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RANVIER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "plans"


@pytest.fixture(scope="module")
def result() -> SearchResult:
    return search_layouts(wish(fp8="tensor"))


def test_what_is_kept_is_what_was_found(folder: Path, result: SearchResult) -> None:
    assert result_cache.load_result(result.request) is None
    result_cache.store_result(result)
    again = result_cache.load_result(result.request)
    assert again == replace(result, from_cache=True)
    assert [one.sort_key for one in again.feasible_candidates] == [
        one.sort_key for one in result.feasible_candidates
    ]
    assert [path.suffix for path in folder.iterdir()] == [".z"]


def other_device(one: SearchRequest, **changes: Any) -> SearchRequest:
    return replace(one, cluster=replace(one.cluster, device=replace(one.cluster.device, **changes)))


CHANGES: list[Callable[[SearchRequest], SearchRequest]] = [
    lambda one: replace(one, workload=replace(one.workload, batch=16)),
    lambda one: replace(one, workload=replace(one.workload, seq=256)),
    lambda one: replace(
        one, workload=replace(one.workload, optimizer=OptimizerSpec(moments="bf16"))
    ),
    lambda one: replace(
        one, workload=replace(one.workload, model=model_spec.dense_decoder(**SHAPE, tied=True))
    ),
    lambda one: replace(one, cluster=one.cluster.with_size(devices=2)),
    lambda one: replace(one, cluster=replace(one.cluster, straggle=0.5)),
    lambda one: other_device(one, memory=1e9),
    lambda one: other_device(one, products=(MatmulRate(1, 1, 1, "bf16", 1e12),)),
    lambda one: replace(one, plan=Plan(row=2)),
    lambda one: replace(one, fixed_fields=frozenset({"row"})),
    lambda one: replace(one, states="host"),
    lambda one: replace(one, allows_compile=False),
]


def test_another_question_is_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [result_cache.request_key(change(wish())) for change in (lambda one: one, *CHANGES)]
    assert len({*keys}) == len(keys)
    assert result_cache.request_key(wish()) == keys[0]
    monkeypatch.setattr(result_cache, "code_version", lambda: "other code")
    assert result_cache.request_key(wish()) not in keys


@pytest.mark.parametrize("damage", ["empty", "cut", "flipped", "noise", "folder", "pipe", "other"])
def test_a_damaged_entry_is_searched_anew(folder: Path, result: SearchResult, damage: str) -> None:
    result_cache.store_result(result)
    (path,) = folder.iterdir()
    data = path.read_bytes()
    if damage in ("folder", "pipe"):
        path.unlink()
        path.mkdir() if damage == "folder" else os.mkfifo(path)
    elif damage == "other":  # the whole answer to another question
        result_cache.store_result(replace(result, request=wish()))
        (other,) = {*folder.iterdir()} - {path}
        path.write_bytes(other.read_bytes())
    else:
        middle = len(data) // 2
        changed = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
        whole = {"empty": b"", "cut": data[:middle], "flipped": changed, "noise": os.urandom(999)}
        path.write_bytes(whole[damage])
    assert result_cache.load_result(result.request) is None
    result_cache.store_result(result)
    if damage != "folder":
        assert result_cache.load_result(result.request) is not None


def test_many_write_at_once(
    folder: Path, result: SearchResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(result_cache, "MAX_ENTRIES", 2)
    asked = [replace(result, request=replace(wish(), states=s)) for s in (None, "host", "device")]
    threads = [threading.Thread(target=result_cache.store_result, args=(one,)) for one in asked * 4]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    result_cache.store_result(asked[0])
    assert len([*folder.iterdir()]) <= 2 and result_cache.load_result(asked[0].request) is not None
    assert not [*folder.glob("*.part")]


def test_a_folder_that_cannot_be_written_keeps_nothing(folder: Path, result: SearchResult) -> None:
    folder.parent.mkdir(parents=True)
    folder.write_text("a file in its place")
    result_cache.store_result(result)
    assert (
        result_cache.load_result(result.request) is None
        and folder.read_text() == "a file in its place"
    )


def test_the_second_time_nothing_is_searched(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers, counts = [], list[int]()
    monkeypatch.setattr(
        plan,
        "search_layouts",
        lambda wish, **more: (counts.append(1), search_layouts(wish, **more))[1],
    )
    for more in ((), (), ("--cache", "false")):
        assert call("plan", *WORDS, *more, "--json", "-") == 0
        answers.append(json.loads(capsys.readouterr().out))
    assert len(counts) == 2 and [one.pop("cached") for one in answers] == [False, True, False]
    for one in answers:
        one.pop("seconds")
    assert answers[0] == answers[1] == answers[2]
    assert call("plan", *WORDS) == 0 and "(cached; --cache false" in capsys.readouterr().out
