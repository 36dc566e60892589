"""The shipped constants on published runs, and the whole score with --full."""

from __future__ import annotations

import csv
import statistics
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import published  # noqa: E402
import published_frameworks as frameworks  # noqa: E402
import published_rows  # noqa: E402
from published_rows import Row  # noqa: E402

from ranvier.planner import predict  # noqa: E402


def row(start: str, **facts: str) -> Row:
    """A given run with other facts."""
    found = next(one for one in published_rows.rows() if one.name == start)
    return Row({**found.facts, **facts})


def test_shipped_constants_predict_published_runs() -> None:
    errors = defaultdict(list)
    for one in published.given():
        if one.facts["framework"] != "DeepSpeed ZeRO-3":  # a known miss (docs/concepts/planner.md)
            errors[one.source, one.narrow].append(published.guess(one).error)
    for narrow, limit in ((False, 10), (True, 15)):
        means = [published.mape(some) for (_, kind), some in errors.items() if kind is narrow]
        assert len(means) >= 3
        assert statistics.fmean(means) < limit


def test_published_runs_with_context_are_predicted() -> None:
    guesses = [published.guess(one) for one in published.given() if one.number("cp") > 1]
    assert len(guesses) >= 8
    assert published.mape(one.error for one in guesses) < 10
    titan = [one for one in guesses if one.row.source == "TITAN"]
    # Blocks of 8 ranks are slower than their kernels, merges and messages (TITAN-010).
    assert sorted(abs(one.error) for one in titan)[-2] < 0.08 and len(titan) == 4


def test_context_of_torchtitan_neither_overlaps_nor_shares_kv_heads() -> None:
    one = row("TITAN-010")
    spent = published.guess(one).prediction.seconds_by_part["context"]
    runs = published_rows.framework(one)
    assert not runs.overlaps_context and runs.repeats_kv_heads and runs.context_grad_bytes == 4
    hidden = published.guess(one, None, replace(runs, overlaps_context=True))
    shared = published.guess(one, None, replace(runs, repeats_kv_heads=False))
    assert hidden.prediction.seconds_by_part["context"] < 0.2 * spent
    assert shared.prediction.seconds_by_part["context"] < 0.8 * spent


def test_the_sweep_is_ranked_as_it_was_measured() -> None:
    sweep = [published.guess(one) for one in published.given() if published.is_sweep(one)]
    each = [one.row.number("global_batch") for one in sweep]
    measured = [one.row.seconds / n for one, n in zip(sweep, each, strict=True)]
    guessed = [one.prediction.step_seconds / n for one, n in zip(sweep, each, strict=True)]
    assert len(sweep) == 10
    assert published.tau(measured, guessed) > 0.7
    assert measured[guessed.index(min(guessed))] < 1.05 * min(measured)


def test_runs_out_of_memory_are_called_so() -> None:
    guesses = [published.guess(one) for one in published_rows.rows() if one.scored]
    assert all(not one.fits for one in guesses if one.row.oom)
    ran = [one.fits for one in guesses if one.row.seconds]
    assert sum(ran) > 0.96 * len(ran)
    assert all("communicators" not in one.prediction.memory.device for one in guesses)


def test_memory_is_not_understated_for_a_run_that_set_no_reserve() -> None:
    guesses = [published.guess(one) for one in published.measured(published_rows.rows())]
    assert len(guesses) > 40
    assert published.mape(map(published.overstated, guesses)) < 12
    assert min(map(published.overstated, guesses)) > -0.02
    assert min(published.overstated(published.without_it(one, guesses)) for one in guesses) > -0.05


@pytest.mark.parametrize(
    "name",
    ["Megatron-Kwai", "MegatronX", "NeMo-Aligner", "torchtitan-next", "Megatron-LM + X", "Own", ""],
)
def test_an_unknown_framework_is_not_read_as_another(name: str) -> None:
    one = row("MEG21-003", framework=name)
    assert published_rows.known_framework(name) is None
    assert one.scored
    assert one.unknown == [f"framework {name!r}"]
    assert published.timed([one]) == []
    assert published_rows.framework(one).name == frameworks.COMMON.name
    assert published.guess(one).prediction.error_factors == published.fits.UNKNOWN_FRAMEWORK


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("Megatron-LM 2021", frameworks.MEGATRON21),
        ("Megatron-LM 2024 (README)", frameworks.MEGATRON_CORE),
        ("Megatron-Bridge 26.04.01", frameworks.MEGATRON_CORE),
        ("DeepSpeed+Megatron", frameworks.MEGATRON_DEEPSPEED),
        ("nanotron v0.6", frameworks.NANOTRON),
    ],
)
def test_versions_of_a_framework_are_the_framework(name: str, found: frameworks.Framework) -> None:
    assert published_rows.known_framework(name) is found


@pytest.mark.parametrize("word", ["zero1+offload", "mics", "fsdp24", "tensor", "fsdp offload"])
def test_an_unknown_sharding_word_is_not_read_as_another(word: str) -> None:
    one = row("MPT-003", sharding=word, dp="128")
    if word == "fsdp24":
        assert published_rows.known_split(row("MPT-003", sharding="fsdp32", dp="128")) is not None
    assert one.unknown == [f"sharding {word!r}"]
    assert published.timed([one]) == []


def test_other_words_that_nothing_models_are_reported() -> None:
    assert row("MEG21-003", recompute="block 4").unknown == ["recompute 'block 4'"]
    assert row("MEG21-003", precision="tf32").unknown == ["precision 'tf32'"]
    assert row("MEG21-003", arch="mamba").unknown == ["arch 'mamba'"]


def test_the_sharding_word_decides_what_is_split() -> None:
    splits = {
        word: published_rows.known_split(row("MPT-003", sharding=word))
        for word in ("none", "zero1", "fsdp2", "fsdp8", "fsdp4", "fsdp hybrid_shard", "zero2")
    }
    depths = {word: split.depth for word, split in splits.items() if split is not None}
    assert depths == {
        "none": 1, "zero1": 1, "fsdp2": 128, "fsdp8": 8, "fsdp4": 4, "fsdp hybrid_shard": 8,
        "zero2": 128,
    }  # fmt: skip
    whole = published_rows.framework(row("NEMO2407-001", sharding="none"))
    assert not whole.shards_states
    assert whole.reduce == "all_reduce"


def test_the_report_names_what_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    several = [row("MEG21-003"), row("MEG21-004", framework="Own"), row("MPT-003", sharding="mics")]
    path = tmp_path / "runs.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(several[0].facts))
        writer.writeheader()
        writer.writerows(one.facts for one in several)
    monkeypatch.setattr(published, "fitted", lambda group, name: published.fits.Terms())
    monkeypatch.setattr(sys, "argv", ["published.py", "--data", str(path)])
    published.main()
    printed = capsys.readouterr().out
    assert "not scored: 2 runs" in printed
    assert "MEG21-004: unknown framework 'Own'; with the common framework" in printed
    assert "MPT-003: unknown sharding 'mics'" in printed


def test_an_unknown_number_of_chunks_is_a_range() -> None:
    facts = {"global_batch": "240", "dp": "4"}  # short pipelines: the bubble counts
    several = {n: published.guess(row("PTD2-009", vp=str(n), **facts)) for n in (1, 2, 4, 8)}
    known = [one.prediction.step_seconds for one in several.values()]
    open_ = published.guess(row("PTD2-009", vp="", **facts)).prediction
    low, high = open_.interval
    assert max(known) > 1.1 * min(known)
    assert min(known) < open_.step_seconds < max(known)
    assert low < min(known) < max(known) < high
    assert open_.time_spread == pytest.approx(max(known) / min(known))
    certain = several[2].prediction.interval
    assert high / low > certain[1] / certain[0]
    assert high / low < 1.6


def test_a_framework_without_chunks_has_one() -> None:
    assert {way.chunks for way in published_rows.ways(row("BLOOM-054", vp=""))} == {1}
    assert {way.chunks for way in published_rows.ways(row("PTD2-009", vp=""))} == {1, 2, 4, 8}


def test_an_unknown_micro_batch_is_a_range() -> None:
    open_ = published_rows.ways(row("MEG21-005", micro_batch="", vp="1"))
    assert {way.micro_batch for way in open_} == {1, 2, 4, 8}


def test_tau_ignores_pairs_within_the_noise() -> None:
    assert published.tau([1.0, 1.05, 2.0], [1.0, 0.9, 3.0]) == 1.0
    assert published.tau([1.0, 1.5, 2.0], [3.0, 2.0, 1.0]) == -1.0


@pytest.mark.full
def test_each_source_without_its_own_runs(capsys: pytest.CaptureFixture[str]) -> None:
    rows = list(published.given())
    published.times(published.left_out(rows), published.null_errors(rows))
    printed = capsys.readouterr().out
    assert "FAIL" not in printed
    assert printed.count("pass") == 5


@pytest.mark.full
def test_the_interval_holds_runs_whose_framework_is_left_out() -> None:
    guesses = [one for one, _ in published.left_out(published.given(), "framework")]
    for several in (guesses, [one for one in guesses if not one.row.narrow]):
        assert 0.75 <= statistics.fmean(one.inside for one in several) <= 0.85
    assert max(map(published.width, guesses)) <= 1.6
    low, high = published.calibrated([one for one in guesses if not one.row.narrow])
    assert pytest.approx((low, high), abs=0.01) == predict.ERROR_INTERVAL
