"""Measured choices: what is timed, what is kept, and what happens if it cannot be."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ranvier import launch
from ranvier.nn import attention_backends, autotune
from ranvier.nn.autotune import Autotuner


def counted(calls: list[str], name: str, seconds: float = 0.0) -> Callable[[], object]:
    def way() -> object:
        calls.append(name)
        return time.sleep(seconds)

    return way


def ways(calls: list[str]) -> dict[str, Callable[[], object]]:
    return {"slow": counted(calls, "slow", 0.004), "quick": counted(calls, "quick")}


def test_the_fastest_is_kept_and_not_timed_again(tmp_path: Path) -> None:
    path, calls = tmp_path / "new" / "fastest.json", list[str]()
    chooser = Autotuner("cpu", path)
    assert chooser.choose_fastest("nap", "1", ways(calls), "slow") == "quick"
    assert {"slow", "quick"} == {*calls}
    stored = json.loads(path.read_text())["nap"]["1"]
    assert stored["choice"] == "quick" and {*stored["milliseconds"]} == {"slow", "quick"}
    count = len(calls)
    for again in (chooser, Autotuner("cpu", path)):
        assert again.choose_fastest("nap", "1", ways(calls), "slow") == "quick"
    assert len(calls) == count
    assert os.listdir(path.parent) == [path.name]


def test_other_shapes_and_other_ways_are_timed() -> None:
    calls: list[str] = []
    chooser = Autotuner("cpu")
    chooser.choose_fastest("nap", "1", ways(calls), "slow")
    for key, more in (("2", {}), ("1", {"none": counted(calls, "none")})):
        calls.clear()
        chooser.choose_fastest("nap", key, {**ways(calls), **more}, "slow")
        assert {"slow", "quick", *more} == {*calls}


def test_the_default_stays_unless_another_gains() -> None:
    chooser = Autotuner("cpu")
    assert chooser.pick_fastest({"a": 1.0, "b": 0.99}, "a") == "a"
    assert chooser.pick_fastest({"a": 1.0, "b": 0.979}, "a") == "b"
    assert chooser.pick_fastest({"a": 1.0, "b": 0.99}, "b") == "b"
    assert chooser.pick_fastest({"b": 2.0, "c": 1.0}, "a") == "c", "the default has failed"
    assert chooser.pick_fastest({}, "a") == "a"


def test_slow_ways_are_called_twice_and_quick_ones_often() -> None:
    chooser, calls = Autotuner("cpu"), list[str]()
    chooser.sampling_seconds = 0.01
    chooser.choose_fastest("nap", "1", {"slow": counted(calls, "slow", 0.02)}, "slow")
    assert len(calls) == 2
    calls.clear()
    chooser.sampling_seconds = 60.0
    chooser.choose_fastest("nap", "2", {"quick": counted(calls, "quick")}, "quick")
    assert (
        chooser.warmup_samples + chooser.max_samples
        < len(calls)
        <= 2 + 11 * chooser.max_calls_per_sample
    )


def test_a_way_that_raises_is_left_out(tmp_path: Path) -> None:
    def broken() -> object:
        raise RuntimeError("no such kernel\nand much more")

    chooser = Autotuner("cpu", tmp_path / "fastest.json")
    assert chooser.choose_fastest("nap", "1", {"a": broken, "b": lambda: None}, "a") == "b"
    stored = Autotuner("cpu", chooser.cache_path).find_result("nap", "1")
    assert stored is not None and stored["failed"] == {"a": "no such kernel"}
    assert {*stored["milliseconds"]} == {"b"}


def test_too_little_memory_is_not_kept(tmp_path: Path) -> None:
    def large() -> object:
        raise torch.OutOfMemoryError("out of memory")

    chooser = Autotuner("cpu", tmp_path / "fastest.json")
    assert chooser.choose_fastest("nap", "1", {"a": large, "b": lambda: None}, "a") == "b"
    assert chooser.choose_fastest("nap", "2", {"a": large}, "a") == "a", (
        "nothing ran: the run will tell"
    )
    assert not (tmp_path / "fastest.json").exists()


BROKEN = (
    b"",
    b'{"nap": {"1": {"choi',
    b"\xff\xfe\x00",
    b"[1, 2]",
    b'{"nap": 3}',
    b'{"nap": {"1": {"choice": "quick"}, "2": 4}}',
    b'{"nap": {"1": {"choice": [], "milliseconds": {"quick": 1.0}}}}',
    b'{"nap": {"1": {"choice": "other", "milliseconds": {"quick": 1.0}}}}',
    b'{"nap": {"1": {"choice": "quick", "milliseconds": {"quick": "1", "slow": null}}}}',
)


@pytest.mark.parametrize("content", BROKEN)
def test_a_broken_file_is_an_empty_one(tmp_path: Path, content: bytes) -> None:
    path, calls = tmp_path / "fastest.json", list[str]()
    path.write_bytes(content)
    chooser = Autotuner("cpu", path)
    assert chooser.results == {}
    assert chooser.choose_fastest("nap", "1", ways(calls), "slow") == "quick" and calls
    assert json.loads(path.read_text())["nap"]["1"]["choice"] == "quick"


def test_a_folder_that_cannot_be_written_does_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    assert Autotuner("cpu", tmp_path / "file" / "a.json").choose_fastest(
        "nap", "1", ways([]), "slow"
    )

    def refuse(*_: object) -> None:
        raise PermissionError(13, "read-only")

    monkeypatch.setattr(os, "replace", refuse)
    chooser = Autotuner("cpu", tmp_path / "a.json")
    assert chooser.choose_fastest("nap", "1", ways([]), "slow") == "quick"
    assert os.listdir(tmp_path) == ["file"]


def test_writers_keep_what_others_have_found(tmp_path: Path) -> None:
    path = tmp_path / "fastest.json"
    first, second = Autotuner("cpu", path), Autotuner("cpu", path)
    first.choose_fastest("nap", "1", ways([]), "slow")
    second.choose_fastest("nap", "2", ways([]), "slow")
    second.choose_fastest("rest", "1", ways([]), "slow")
    assert {kind: {*shapes} for kind, shapes in Autotuner("cpu", path).results.items()} == {
        "nap": {"1", "2"},
        "rest": {"1"},
    }


def test_each_device_and_torch_has_a_file_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    path = Autotuner.for_device("cpu").cache_path
    assert path is not None and path.parent == launch.cache_dir()
    assert path.name.startswith("fastest-cpu-") and "torch" in path.name
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200 (A/B)")
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    name = autotune.cache_filename(torch.device("cuda"))
    assert name == "fastest-nvidia-h200-a-b-torch2.11.0-cu130.json"


def test_noise_leaves_the_generators_alone() -> None:
    before = torch.get_rng_state()
    first, second = autotune.random_tensors([(2, 3), (4,)], torch.float32, "cpu")
    assert (first.shape, second.shape) == ((2, 3), (4,))
    assert torch.equal(before, torch.get_rng_state())


def test_attention_on_a_cpu_is_what_torch_takes() -> None:
    chooser = Autotuner("cpu")
    assert (
        attention_backends.choose_backend(2, 8, 4, 2, 16, torch.bfloat16, "cpu", chooser) == "auto"
    )
    assert chooser.results == {}
    q, k = torch.zeros(2, 8, 4, 16), torch.zeros(2, 8, 2, 16)
    assert [
        name
        for name in attention_backends.BACKENDS
        if attention_backends.supports_inputs(name, q, k, k)
    ] == ["auto"]
    q, k, v = (torch.randn(2, 8, h, 16, dtype=torch.float64) for h in (4, 2, 2))
    scores = torch.einsum("bshk,bthk->bhst", q, k.repeat_interleave(2, 2)) / 4.0
    scores = scores.masked_fill(torch.ones(8, 8).triu(1).bool(), float("-inf"))
    y = torch.einsum("bhst,bthk->bshk", scores.softmax(-1), v.repeat_interleave(2, 2))
    torch.testing.assert_close(attention_backends.sdpa_attention(q, k, v), y, rtol=0, atol=1e-12)
