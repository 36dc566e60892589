"""`ranvier simulate serving`: tables, files, and mistakes in words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from commands import call
from ranvier.config import run as runs
from ranvier.config.arguments import SimulateServingOptions
from ranvier.errors import PlanError
from ranvier.tools.simulate_serving import parse_limits, run_simulation

SMALL: dict[str, Any] = {"cluster": "dgx-h200", "num_requests": 40, "output_tokens": "fixed:20"}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def options(tables: dict[str, Any] | None = None, **given: Any) -> SimulateServingOptions:
    run = runs.run_from_tables(tables or {"model": {"size": "llama3-8b"}})
    return SimulateServingOptions(**{**vars(run), **SMALL, **given})


def simulate(capsys: pytest.CaptureFixture[str], **given: Any) -> dict[str, Any]:
    """The first variant of the JSON on the terminal."""
    assert run_simulation(options(**given, json="-")) == 0
    found = json.loads(capsys.readouterr().out)
    variant: dict[str, Any] = found["variants"][0]
    return variant


def test_tables_and_files(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model.size", "llama3-8b", "--cluster", "dgx-h200", "--num-requests", "40"]
    words += ["--policies", "decode_first", "static", "--max-num-batched-tokens", "512", "2048"]
    assert call("simulate", "serving", *words, "--json", "a.json", "--html", "a.html") == 0
    said = capsys.readouterr().out
    assert "15.0 GiB of weights" in said
    assert said.count("decode_first") == 4 and said.count("static") == 4
    assert "time to first token" in said and "written: a.json" in said
    found = json.loads(Path("a.json").read_text())
    assert [(one["policy"], one["max_num_batched_tokens"]) for one in found["variants"]] == [
        ("decode_first", 512),
        ("decode_first", 2048),
        ("static", 512),
        ("static", 2048),
    ]
    for one in found["variants"]:
        assert one["num_requests"] == 40 and one["ttft_p50"] <= one["ttft_p99"]
    # Static batches make requests wait.
    assert found["variants"][2]["ttft_p50"] > 2 * found["variants"][0]["ttft_p50"]
    text = Path("a.html").read_text()
    assert text.count("<svg") == 7 and "Simulated serving" in text


def test_load_and_rate(capsys: pytest.CaptureFixture[str]) -> None:
    full = simulate(capsys, rate=0.0)
    assert full["rate"] is None
    half = simulate(capsys, load=0.5)
    assert half["rate"] == pytest.approx(0.5 * full["requests_per_second"])
    again = simulate(capsys, rate=half["rate"])
    assert again == half


def test_largest_rate(capsys: pytest.CaptureFixture[str]) -> None:
    found = simulate(capsys, find_rate=True, limits=("ttft_p99=60", "itl_p99=30"), html="a.html")
    assert Path("a.html").read_text().count("<svg") == 9
    assert found["holds"] and found["ttft_p99"] <= 60 and found["itl_p99"] <= 30
    assert found["rate"] == max(one["rate"] for one in found["trials"] if one["holds"])
    assert found["trials"][-1]["rate"] is None
    assert simulate(capsys, find_rate=True, limits=("itl_p50=1e9",))["rate"] is None
    assert run_simulation(options(find_rate=True, limits=("itl_p50=0.1",))) == 0
    assert "no rate holds itl_p50 <= 0.1 ms" in capsys.readouterr().out


def test_grids_and_memory(capsys: pytest.CaptureFixture[str]) -> None:
    one = simulate(capsys, rate=0.0)
    plan = {"model": {"size": "llama3-8b"}, "plan": {"row": 2, "data": 2}}
    four = simulate(capsys, rate=0.0, tables=plan)
    assert four["requests_per_second"] > 1.5 * one["requests_per_second"]
    assert four["num_blocks"] > 2 * one["num_blocks"]
    small = simulate(capsys, rate=0.0, kv_cache_gib=0.5, input_tokens="fixed:500")
    assert small["num_blocks"] == 64 and small["block_use_max"] > 0.9
    big = {"model": {"size": "llama3-405b"}}
    with pytest.raises(PlanError, match=r"leaves no room for the KV cache.*Use more devices"):
        run_simulation(options(big))


def test_traces_and_measured_steps(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"arrival": 0.1 * i, "input_tokens": 200, "output_tokens": 10, "prefix_group": "a"}
        for i in range(30)
    ]
    Path("trace.jsonl").write_text("\n".join(map(json.dumps, rows)))
    steps = [
        {"decode_tokens": d, "mean_context": 200, "prompt_tokens": p, "seconds": 0.01 + p / 1e4}
        for d in (1, 4, 16)
        for p in (0, 64, 256)
    ]
    Path("steps.json").write_text(json.dumps(steps))
    found = simulate(capsys, trace="trace.jsonl", steps="steps.json")
    assert found["num_requests"] == 30 and found["rate"] is None
    # Each later request finds all but the last of four blocks of 64 tokens.
    assert found["prefix_hit_rate"] == pytest.approx(29 / 30 * 192 / 200)
    assert found["itl_p50"] == pytest.approx(10, rel=0.2)
    cold = simulate(capsys, trace="trace.jsonl", steps="steps.json", prefix_caching=False)
    assert cold["prefix_hit_rate"] == 0 and cold["ttft_p50"] > found["ttft_p50"]
    faster = simulate(capsys, trace="trace.jsonl", steps="steps.json", rate=30.0)
    assert faster["seconds"] < 0.5 * found["seconds"]
    slower = simulate(capsys, trace="trace.jsonl", steps="steps.json", request_overhead_ms=53.0)
    assert slower["ttft_p50"] == pytest.approx(found["ttft_p50"] + 50, abs=3)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_requests": 0}, "num_requests=0 is out of range"),
        ({"load": 0.0}, "load=0.0 is out of range"),
        ({"efficiency": 2.0}, "efficiency=2.0 is out of range"),
        ({"rate": -1.0}, "rate=-1.0 is out of range"),
        ({"policies": ("decode-first",)}, "policy 'decode-first' is not known"),
        ({"policies": ()}, "policies or max_num_batched_tokens is empty"),
        ({"max_num_batched_tokens": (0,)}, "A step needs at least 1 token"),
        ({"input_tokens": "many"}, "not a distribution of lengths"),
        ({"cluster": "nowhere"}, "cluster 'nowhere' is not known"),
        ({"max_model_len": 5}, r"tokens, but a sequence may have 5 \(max_model_len\)"),
    ],
)
def test_mistakes_are_explained(given: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        run_simulation(options(**given))


def test_limits_are_parsed() -> None:
    assert parse_limits(["ttft_p99=250", "itl_mean=7.5"]) == {"ttft_p99": 250.0, "itl_mean": 7.5}
    for word in ("ttft=5", "ttft_p99", "ttft_p99=x", "itl_p99=-1", "itl_p99=nan"):
        with pytest.raises(PlanError, match="is not valid"):
            parse_limits([word])
