"""Runs with goldfish loss and canaries: any grid is one process, and what users see of them."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from commands import SMALL_OPTIONS, call, metrics
from grids import label
from pool import Pool
from ranvier.checkpoint.directory import find_checkpoints
from ranvier.checkpoint.load import load_full_tensors
from ranvier.config import run as runs
from ranvier.data.canaries import Canary, CanaryDocuments
from ranvier.data.goldfish import GoldfishMask
from ranvier.data.tokenizer import ByteTokenizer
from ranvier.grid import Grid
from ranvier.html.plot import escape_html
from ranvier.train.loggers import scalar_metrics
from ranvier.train.report.memorization import memorization_section
from ranvier.train.trainer import canary_notes
from training import run_of, stored, trainer_of

STRATEGIES = ("hash", "hash-table", "static", "random")
GRIDS: list[tuple[dict[str, int], str]] = [
    ({"context": 2, "row": 2}, "samples"),
    ({"pipe": 2, "data": 2, "col": 2}, "features"),
    ({"depth": 2, "col": 2, "data": 2}, "samples"),
    ({"expert": 2, "row": 2}, "samples"),
    ({"data": 8}, "samples"),
    ({"pipe": 2, "context": 2, "depth": 2}, "samples"),
    ({"row": 2, "col": 2, "context": 2}, "features"),
]
CANARIES = [Canary("9 times 9", 9, "9"), Canary("4 and 5 is 9", 4, "4"), Canary("unread", 0, "0")]
CHANGES: dict[str, Any] = {
    "data__goldfish_k": 3,
    "data__goldfish_context_width": 3,
    "data__canaries": "canaries.jsonl",
    "train__canary_interval": 2,
    "train__canary_suffix": 4,
}


def rows_of(
    grid: Grid, corpus: str, out: str, changes: dict[str, Any], steps: int = 3, resume: str = ""
) -> list[dict[str, Any]]:
    """Metrics of a run, which saves at its end. resume: a checkpoint to continue from."""
    run = run_of(out, dict(grid.degrees), steps, **CHANGES, **changes)
    canaries = CanaryDocuments.tokenize(CANARIES, ByteTokenizer())
    trainer = trainer_of(grid, corpus, run, canaries=canaries)
    if resume:
        trainer.checkpointer.resume_from(Path(resume))
    rows = list(trainer.run_steps())
    trainer.save_checkpoint()
    return rows


@pytest.fixture(scope="module")
def serial(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of all strategies on one process, and the corpus."""
    folder = tmp_path_factory.mktemp("serial")
    corpus = stored(folder)
    for name in STRATEGIES:
        changes = {"data__goldfish_strategy": name}
        rows = rows_of(Grid({}), corpus, str(folder / name), changes)
        (folder / f"{name}.json").write_text(json.dumps(rows))
    return folder


CASES = [
    pytest.param(*one, name, id=f"{label(one[0])}-{name}")
    if place % 2 == 0 and number == place // 2 % len(STRATEGIES)
    else pytest.param(*one, name, id=f"{label(one[0])}-{name}", marks=pytest.mark.full)
    for (place, one), (number, name) in itertools.product(enumerate(GRIDS), enumerate(STRATEGIES))
]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("degrees", "inner", "strategy"), CASES)
def test_any_grid_is_one_process(
    pool: Pool, serial: Path, tmp_path: Path, degrees: dict[str, int], inner: str, strategy: str
) -> None:
    """Losses, norms, counts of targets, what is memorized, and weights after three steps."""
    changes = {"data__goldfish_strategy": strategy, "plan__col_splits": inner}
    if "expert" in degrees:
        changes |= {"model__experts": 4, "model__expert_mlp": 16}
        want = rows_of(Grid({}), str(serial / "corpus"), str(tmp_path / "one"), changes)
        origin = tmp_path / "one"
    else:
        want, origin = json.loads((serial / f"{strategy}.json").read_text()), serial / strategy
    out = tmp_path / "run"
    rows = pool.on_grid(degrees, rows_of, str(serial / "corpus"), str(out), changes)[0]
    for have, row in zip(rows, want, strict=True):
        assert have["supervised_tokens"] == row["supervised_tokens"] < row["tokens"]
        for key in ("loss", "grad_norm"):
            assert have[key] == pytest.approx(row[key], rel=1e-9), key
        assert have.get("canary_match") == row.get("canary_match")
        assert have.get("canary_loss") == pytest.approx(row.get("canary_loss"), rel=1e-9)
    assert ["canary_match" in row for row in rows] == [True, True, True]
    (saved,), (known,) = (find_checkpoints(folder / "checkpoints") for folder in (out, origin))
    tensors = load_full_tensors(saved)
    for name, x in load_full_tensors(known).items():
        assert torch.allclose(tensors[name], x, rtol=1e-9, atol=1e-9 * float(x.abs().max())), name


@pytest.mark.parametrize(
    "strategy", ["random", *(pytest.param(one, marks=pytest.mark.full) for one in STRATEGIES[:3])]
)
def test_a_run_resumes_with_the_same_masks_and_canaries(
    pool: Pool, serial: Path, tmp_path: Path, strategy: str
) -> None:
    """On another grid, after one of three steps."""
    corpus = str(serial / "corpus")
    changes = {
        "data__goldfish_strategy": strategy,
        "data__canary_samples": 24,
        "optim__schedule": "wsd",
        "optim__warmup_steps": 0,
        "optim__decay_ratio": 0.0,
    }
    whole = rows_of(Grid({}), corpus, str(tmp_path / "whole"), changes)
    rows_of(Grid({}), corpus, str(tmp_path / "first"), changes, 1)
    (saved,) = find_checkpoints(tmp_path / "first" / "checkpoints")
    out = str(tmp_path / "rest")
    rest = pool.on_grid({"data": 2, "context": 2}, rows_of, corpus, out, changes, 3, str(saved))[0]
    assert [row["loss"] for row in rest] == pytest.approx(
        [row["loss"] for row in whole[1:]], rel=1e-9
    )
    assert rest[-1]["canary_match"] == whole[-1]["canary_match"]


def test_strategies_give_different_runs(serial: Path) -> None:
    """The comparison above would see a wrong mask."""
    losses = [json.loads((serial / f"{name}.json").read_text())[-1]["loss"] for name in STRATEGIES]
    for one, other in itertools.combinations(losses, 2):
        assert abs(one - other) > 1e-6


# ---- the commands ---------------------------------------------------------------------------

TEXTS = [f"Text {n} is about {n * n * 7919 % 9973} and {n * 31 % 101}." for n in range(30)]
FAST = [*SMALL_OPTIONS, "--nproc", "1", "--data.sources", "texts.jsonl"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    lines = [json.dumps({"text": text}) + "\n" for text in TEXTS]
    (tmp_path / "texts.jsonl").write_text("".join(lines[:20]))
    (tmp_path / "others.jsonl").write_text("".join(lines[20:]))
    return tmp_path


def test_from_canaries_to_results(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--buckets", "0", "4", "--documents", "3", "--length", "20", "--tokenizer", "bytes")
    assert call("data", "canaries", "others.jsonl", *words, "--output", "canaries.jsonl") == 0
    out = capsys.readouterr().out
    assert "6 documents of 20 tokens in buckets 0, 4, read 12 times" in out
    train = "--data.sources YOUR.txt --data.canaries canaries.jsonl --data.tokenizer bytes"
    assert f"ranvier train {train} --data.seq-len 21" in out
    records = [json.loads(line) for line in (folder / "canaries.jsonl").read_text().splitlines()]
    assert [record["times"] for record in records] == [0] * 3 + [4] * 3
    assert {record["text"] for record in records} <= {text[:20] for text in TEXTS[20:]}
    canaries = ("--data.canaries", "canaries.jsonl", "--train.canary-interval", "2")
    common = (*canaries, "--train.canary-suffix", "6", "--train.steps", "4")
    assert call("train", *FAST, *common, "--train.output-dir", "plain") == 0
    goldfish = ("--data.goldfish-k", "2", "--data.goldfish-context-width", "4")
    assert call("train", *FAST, *common, *goldfish, "--train.output-dir", "gold") == 0
    out = capsys.readouterr().out
    assert "goldfish hash, k=2, context width 4" in out and "memorized 0: 0%, 4: 0%" in out
    rows = metrics(folder / "gold")
    assert [list(row.get("canary_match", {})) for row in rows] == [["0", "4"]] * 2 + [
        [],
        ["0", "4"],
    ]
    for row, other in zip(rows, metrics(folder / "plain"), strict=True):
        share = row["supervised_tokens"] / other["supervised_tokens"]
        assert row["tokens"] == other["tokens"] and 0.5 < share < 0.75
    assert "Memorized canaries" in (folder / "gold" / "report.html").read_text()
    assert runs.load_run_config(folder / "gold" / "config.toml").data.canary_samples == 32
    # A longer run continues with the samples and counts that it had, also with another batch.
    capsys.readouterr()
    assert call("train", "gold", "--train.steps", "5", "--plan.global-batch", "4") == 0
    assert "not all of their reads happen" not in capsys.readouterr().out
    assert runs.load_run_config(folder / "gold" / "config.toml").data.canary_samples == 32
    last = metrics(folder / "gold")[-2:]
    assert last[0]["supervised_tokens"] < last[1]["supervised_tokens"] < last[1]["tokens"]
    # Another rule is other data.
    capsys.readouterr()
    assert call("train", "gold", "--train.steps", "6", "--data.goldfish-k", "3") != 0
    assert "mixture weights, canaries and goldfish mask" in capsys.readouterr().err
    check_evaluation(folder, capsys)


@pytest.mark.parametrize(
    ("canary_samples", "step", "samples", "steps_needed"),
    [(32, 0, 0, 0), (40, 0, 0, 5), (40, 2, 32, 0), (48, 2, 8, 7)],
    ids=["all", "too few", "large batch before", "small batch before"],
)
def test_a_run_that_ends_before_all_reads_says_so(
    canary_samples: int, step: int, samples: int, steps_needed: int
) -> None:
    """Steps before a resume may have had another batch than the 8 samples of the run."""
    changes = {"data__canaries": "canaries.jsonl", "data__canary_samples": canary_samples}
    notes = canary_notes(run_of("", {}, 4, **changes), step=step, samples=samples)
    if not steps_needed:
        assert notes == []
        return
    (note,) = notes
    ends = samples + (4 - step) * 8
    assert f"canary_samples={canary_samples} samples, but the run ends after {ends}" in note
    assert note.endswith(f"until it is extended to train.steps={steps_needed}.")


def check_evaluation(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The evaluation of both runs: tables, files, and agreement with training."""
    words = ("--canaries", "canaries.jsonl", "--suffix", "6", "--output", "both.json")
    assert call("eval", "plain", "gold", *words) == 0
    out = capsys.readouterr().out
    assert re.search(r"bucket +times +documents +exact match +RougeL tokens", out)
    assert re.search(r"loss\nbucket +plain +gold\n0 +\d\.\d+ ± \d\.\d+ +\d\.\d+ ± ", out)
    both = json.loads((folder / "both.json").read_text())["runs"]
    for name, step in (("plain", 4), ("gold", 5)):
        alone = json.loads((folder / name / f"eval-{step}.json").read_text())
        assert alone["canaries"] == both[name]["canaries"] and both[name]["step"] == step
        lines = (folder / name / f"canaries-{step}.jsonl").read_text().splitlines()
        assert len(lines) == 6
        trained = metrics(folder / name)[-1]
        for bucket, row in alone["canaries"].items():
            assert row["loss"] == pytest.approx(trained["canary_loss"][bucket], rel=1e-4)
            assert row["exact_match"] == trained["canary_match"][bucket]
            assert 0.0 <= row["rouge_l_tokens"] <= 1.0 and row["documents"] == 3
            assert row["loss_per_zlib_byte"] < row["loss"] and row["loss_stderr"] > 0.0
    # The buckets of another file replace those of this one.
    (folder / "other.jsonl").write_text(json.dumps(CANARY) + "\n")
    words = ("--canaries", "other.jsonl", "--suffix", "6")
    assert call("eval", "plain", *words) == 0
    assert [*json.loads((folder / "plain" / "eval-4.json").read_text())["canaries"]] == ["a"]
    assert call("eval", "plain", "plain/", *words) != 0
    assert "plain and plain/ are the same run" in capsys.readouterr().err
    assert call("eval", "plain", "--canaries", "canaries.jsonl", "--suffix", "20") != 0
    assert "has 20 tokens, but the suffix has 20" in capsys.readouterr().err
    assert call("eval", "plain", "gold", "--corpus", "texts.jsonl") != 0
    assert "Only --canaries compares runs" in capsys.readouterr().err
    assert call("eval", "plain", "--corpus", "texts.jsonl", "--prefix", "3") != 0
    assert "--prefix is given without --canaries" in capsys.readouterr().err


@pytest.mark.full
def test_an_evaluation_on_a_grid_is_that_of_one_process(folder: Path) -> None:
    write = ("--buckets", "0", "2", "--documents", "3", "--length", "20", "--tokenizer", "bytes")
    assert call("data", "canaries", "others.jsonl", *write, "--output", "canaries.jsonl") == 0
    words = ("--data.canaries", "canaries.jsonl", "--train.steps", "2", "--train.output-dir", "run")
    assert call("train", *FAST, *words) == 0
    tables = []
    for name, options in {"one": (), "two": ("--nproc", "2", "--plan.row", "2")}.items():
        more = ("--suffix", "6", "--output", f"{name}.json", "--train.dtype", "fp64", *options)
        assert call("eval", "run", "--canaries", "canaries.jsonl", *more) == 0
        tables.append(json.loads((folder / f"{name}.json").read_text())["canaries"])
    for bucket, row in tables[0].items():
        assert tables[1][bucket] == pytest.approx(row, rel=1e-9)


def test_commands_without_data_accept_the_settings(folder: Path) -> None:
    words = ("--data.goldfish-k", "4", "--data.canaries", "missing.jsonl", "--plan.row", "2")
    assert call("dry-run", *words, *SMALL_OPTIONS, "--plan.global-batch", "8") == 0


CANARY = {"text": "a text of some tokens", "times": 2, "bucket": "a"}
BAD: list[tuple[list[Any], tuple[str, ...], str]] = [
    ([], ("--data.goldfish-k", "1"), r"data.goldfish_k=1 drops every target\. .*Use "),
    ([], ("--data.goldfish-k", "-4"), r"data.goldfish_k=-4 is too small"),
    (
        [],
        ("--data.goldfish-k", "4", "--data.goldfish-context-width", "0"),
        r"data.goldfish_context_width=0 is too small\. It must be at least 1\. Use 1 or more",
    ),
    (
        [],
        ("--data.goldfish-k", "4", "--data.goldfish-context-width", "32"),
        r"goldfish_context_width=32 with data.seq_len=32 drops at most the last target .*Use ",
    ),
    (
        [{**CANARY, "text": "x" * 32}],
        (),
        r"has 33 tokens with its end token, but data.seq_len=32\..*Use data.seq_len=33 or more",
    ),
    (
        [CANARY, {**CANARY, "text": "b", "times": 3}],
        (),
        r"bucket 'a' is there twice.*Use another bucket",
    ),
    ([{**CANARY, "times": 17}], (), r"read 17 times in all, but .*=16 .*must be at least 17"),
    ([CANARY], ("--train.canary-interval", "1"), r"has 21 tokens, but the suffix has 50"),
    ([], ("--train.canary-interval", "1"), r"canary_interval=1 without data.canaries"),
]


@pytest.mark.parametrize(("records", "options", "message"), BAD, ids=lambda x: str(x)[:24])
def test_bad_input_is_refused_before_a_run_begins(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    records: list[Any],
    options: tuple[str, ...],
    message: str,
) -> None:
    if records:
        text = "".join(json.dumps(record) + "\n" for record in records)
        (folder / "canaries.jsonl").write_text(text)
        options = ("--data.canaries", "canaries.jsonl", *options)
    assert call("train", *FAST, *options, "--train.steps", "2", "--train.output-dir", "run") != 0
    error = capsys.readouterr().err
    assert re.search(message, error), error
    assert "Traceback" not in error and not (folder / "run").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--buckets", "1", "4", "4"), r"has 4 twice\..*Name it once"),
        (("--buckets", "-1"), r"buckets=\[-1\] is invalid"),
        (("--documents", "0"), r"documents=0 is out of range"),
        (("--length", "25", "--documents", "9"), r"has \d+ documents .* need 45\. Use fewer"),
        (("--output", "texts.jsonl"), r"exists already"),
        (
            (*("--buckets", "1", "--documents", "2", "--length", "9"), "--output", "texts.jsonl/c"),
            r"texts.jsonl/c cannot be written: .* Use another --output",
        ),
    ],
)
def test_bad_options_of_canaries_are_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], message: str
) -> None:
    assert call("data", "canaries", "others.jsonl", "--tokenizer", "bytes", *options) != 0
    assert re.search(message, capsys.readouterr().err)


def test_the_report_survives_edited_metrics() -> None:
    assert memorization_section([{"step": 0, "loss": 1.0}]) == ""
    rows = [
        {"step": 0, "canary_match": {"0": 0.0, "<b>": None}, "canary_loss": {"0": 3.0}},
        {"step": 1, "canary_match": []},
        {"step": 2, "canary_match": {"0": "x", "<b>": 1.0}},
    ]
    section = memorization_section(rows)
    assert escape_html("bucket <b>") in section and "<b>" not in section
    assert "1.0000" in section


def test_loggers_get_a_number_for_each_bucket() -> None:
    row = {"step": 3, "loss": 1.0, "canary_match": {"0": 0.0, "50": 0.5}, "expert_loads": [1]}
    assert scalar_metrics(row) == {"loss": 1.0, "canary_match/0": 0.0, "canary_match/50": 0.5}


def test_a_mask_that_is_not_a_function_of_the_sample_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A negative control: two runs with such a mask differ."""
    corpus = stored(tmp_path)
    calls = itertools.count()
    find = GoldfishMask.find_dropped
    monkeypatch.setattr(
        GoldfishMask, "find_dropped", lambda self, window, _: find(self, window, next(calls))
    )
    changes = {"data__goldfish_strategy": "random"}
    first, second = (
        rows_of(Grid({}), corpus, str(tmp_path / name), changes) for name in ("a", "b")
    )
    assert first[0]["loss"] != pytest.approx(second[0]["loss"], rel=1e-9)
