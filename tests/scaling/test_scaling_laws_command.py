"""`ranvier scaling-laws`: what it reads, prints and writes, and how it refuses bad input."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from commands import SMALL_OPTIONS, call, metrics
from ranvier.config.run import load_run_config
from ranvier.errors import DataError, PlanError
from ranvier.scaling.flops import FlopShape
from ranvier.scaling.rows import COLUMNS, collect_losses, parse_line

EXAMPLES = Path(__file__).parents[2] / "examples"
ROW: dict[str, Any] = {"run": "a", "width": 256, "depth": 4, "tokens": 1e9, "loss": 3.5}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def error_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The message of a command that fails, without a traceback."""
    capsys.readouterr()
    assert call("scaling-laws", *words) in (PlanError.exit_code, DataError.exit_code)
    text = capsys.readouterr().err
    assert "Traceback" not in text
    return " ".join(text.split())


def write_rows(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def small_rows() -> list[dict[str, Any]]:
    """Four runs of a known law."""
    rows = []
    for width, depth in ((128, 2), (128, 8), (256, 4), (384, 3)):
        parameters = 15 * width**2 * depth + 1000 * width
        tokens = [1e7 * 2**i for i in range(6)]
        loss = [1.7 + 400 * parameters**-0.34 + 400 * count**-0.28 for count in tokens]
        rows.append(
            {
                "run": f"{width}x{depth}",
                "width": width,
                "depth": depth,
                "parameters": parameters,
                "tokens": tokens,
                "loss": loss,
            }
        )
    return rows


def test_everything_is_printed_and_written(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_rows(folder / "rows.jsonl", *small_rows())
    out = ("--json", "laws.json", "--html", "laws.html", "--rows", "again.jsonl")
    budget = ("--flops", "1e18", "--hours", "10", "--cluster", "dgx-h100")
    assert call("scaling-laws", source, *budget, *out, "--resamples", "10") == 0
    text = capsys.readouterr().out
    for words in (
        "hot losses: 24 of 4 runs",
        "hull by FLOPs",
        "law of parameters, tokens",
        "1e+18 FLOPs, by hot losses",
        "10 device hours of dgx-h100, by hot losses",
        "gemstone-",
    ):
        assert words in text, words
    laws = json.loads((folder / "laws.json").read_text())
    (law,) = [one for one in laws["laws"]["hot"]["laws"] if len(one["terms"]) == 2]
    assert law["exponents"]["parameters"] == pytest.approx(0.34, abs=0.02)
    assert law["compute_exponent"] == pytest.approx(0.28 / 0.62, abs=0.02)
    rows = laws["prescriptions"]["1e+18 FLOPs, by hot losses"]
    assert [row["law"] for row in rows][:2] == ["hull", "law of parameters, tokens"]
    low, high = rows[1]["tokens_interval"]
    assert low <= rows[1]["tokens"] * 1.001 and rows[1]["tokens"] <= high * 1.001
    page = (folder / "laws.html").read_text()
    for title in (
        "Loss against FLOPs",
        "Parameters against FLOPs",
        "Tokens against FLOPs",
        "Residuals of the law of parameters, tokens",
        "Best loss by width / depth",
    ):
        assert title in page, title
    assert "http://" not in page and "https://" not in page
    # What was collected gives the same laws.
    assert call("scaling-laws", "again.jsonl", "--json", "-", "--resamples", "10") == 0
    (again,) = [
        one
        for one in json.loads(capsys.readouterr().out)["laws"]["hot"]["laws"]
        if len(one["terms"]) == 2
    ]
    assert again["exponents"] == pytest.approx(law["exponents"], rel=1e-6)


def test_a_steep_hull_and_losses_that_rise_are_fitted(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Almost equal costs: a line that leaves all numbers. No prescription follows from it.
    near = [{**ROW, "flops_per_token": 1e8}, {**ROW, "run": "b", "width": 512, "loss": 3.2}]
    near[1]["flops_per_token"] = 1.0001e8
    source = write_rows(folder / "near.jsonl", *near)
    words = (source, "--resamples", "10", "--flops", "1e21", "--json", "x.json", "--html", "x.html")
    assert call("scaling-laws", *words) == 0
    assert (
        json.loads(Path("x.json").read_text())["prescriptions"]["1e+21 FLOPs, by hot losses"] == []
    )
    # An exponent below 0 is printed with one sign.
    rising = [{**row, "loss": row["loss"][::-1]} for row in small_rows()]
    source = write_rows(folder / "rising.jsonl", *rising)
    capsys.readouterr()
    assert call("scaling-laws", source, "--resamples", "10") == 0
    assert "D^0.2800" in capsys.readouterr().out


def test_laws_are_fitted_without_torch(folder: Path) -> None:
    source = write_rows(folder / "rows.jsonl", *small_rows())
    code = (
        "import sys\nfrom ranvier.cli.main import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit as end:\n    assert not end.code\n"
        "assert 'torch' not in sys.modules and 'scipy' not in sys.modules\n"
    )
    words = ["scaling-laws", source, "--resamples", "10", "--json", "-"]
    words += ["--hours", "10", "--cluster", "dgx-h100"]
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_runs_are_collected(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Hot losses of wsd runs at their peak, and the last one as cooled."""
    own = ["--optim.schedule", "wsd", "--optim.warmup-steps", "2", "--optim.decay-ratio", "0.5"]
    own += ["--train.steps", "10", "--train.eval-interval", "2", "--nproc", "1"]
    own += ["--data.validation-fraction", "0.1"]
    for name, layers in (("small", 1), ("large", 3)):
        words = [*SMALL_OPTIONS, *own, "--model.layers", str(layers)]
        assert call("train", *words, "--train.output-dir", name) == 0
    found = collect_losses([Path("small"), Path("large")])
    assert found.hot.runs == found.cooled.runs == ("small", "large")
    run = load_run_config(Path("large") / "config.toml")
    rows = {row["step"]: row for row in metrics(Path("large"))}
    evaluated = [step for step, row in rows.items() if row["val_loss"] is not None]
    hot = [step for step in evaluated if rows[step]["lr"] == run.peak_lr]
    assert hot and len(hot) < len(evaluated)
    own_rows = found.hot.run_index == 1
    assert found.hot.loss[own_rows].tolist() == [rows[step]["val_loss"] for step in hot]
    assert found.hot.column("tokens")[own_rows].tolist() == [rows[step]["tokens"] for step in hot]
    assert found.cooled.loss[1] == rows[9]["val_loss"]
    want = FlopShape.from_config(run.decoder, run.data.seq_len).flops_per_token * rows[9]["tokens"]
    assert found.cooled.column("flops")[1] == pytest.approx(want)
    spent = sum(row["step_seconds"] for row in rows.values())
    assert found.cooled.column("device_seconds")[1] == pytest.approx(spent)
    facts = json.loads((Path("large") / "run.json").read_text())
    assert found.cooled.column("parameters")[1] == facts["parameters"]
    assert (found.vocab, found.seq) == (260, 32)
    # Written rows have all that a fit of the runs has.
    again = collect_losses([Path(write_rows(folder / "rows.jsonl", *found.to_records()))])
    assert (again.vocab, again.seq, again.hot.runs) == (260, 32, found.hot.runs)
    for name in COLUMNS:
        assert again.hot.column(name).tolist() == pytest.approx(found.hot.column(name).tolist())
    assert "during warm-up or while the learning rate decays" in found.notes[0]
    capsys.readouterr()
    assert call("scaling-laws", "small", "large", "--resamples", "10", "--flops", "1e12") == 0
    assert "cooled losses: 2 of 2 runs" in capsys.readouterr().out
    # Each refusal, on the same runs.
    assert "Only one run, small, has held-out losses" in error_of(capsys, "small")
    lines = (Path("small") / "metrics.jsonl").read_text().splitlines()
    broken = [{**json.loads(line), "loss": None} for line in lines]
    (Path("small") / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in broken))
    assert "small has a loss that is not finite at step 0." in error_of(capsys, "small", "large")
    # The loss of step 0 is that of the initial weights, also without warm-up.
    first = {**json.loads(lines[0]), "lr": run.peak_lr, "val_loss": 6.0}
    (Path("small") / "metrics.jsonl").write_text("\n".join([json.dumps(first), *lines[1:]]))
    assert len(collect_losses([Path("small"), Path("large")]).hot) == len(found.hot)
    lost = [json.loads(line) for line in lines]
    lost[-1]["val_loss"] = None
    (Path("small") / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lost))
    assert "small has a loss that is not finite at step 9." in error_of(capsys, "small", "large")
    (Path("small") / "metrics.jsonl").write_text("\n".join([*lines[:3], "{broken", *lines[3:]]))
    assert "metrics.jsonl:4 is not a row of metrics" in error_of(capsys, "small", "large")
    # A cut last line, of a run that was killed, is not an error.
    (Path("small") / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 10, "to']))
    assert len(collect_losses([Path("small"), Path("large")]).hot) == len(found.hot)
    (Path("small") / "run.json").write_text(json.dumps({**facts, "fingerprint": "other"}))
    message = error_of(capsys, "small", "large")
    assert "small was trained on data with the fingerprint other, but large on data with" in message
    assert "--allow-data-mismatch" in message
    words = ("small", "large", "--resamples", "10", "--allow-data-mismatch")
    assert call("scaling-laws", *words) == 0
    config = (Path("small") / "config.toml").read_text()
    (Path("small") / "config.toml").write_text(config.replace("seq_len = 32", "seq_len = 16"))
    runs = [Path("small"), Path("large")]
    noted = collect_losses(runs, allow_data_mismatch=True).notes[-1]
    assert noted.startswith("Runs have samples of 16, 32 tokens")
    recurrent = config.replace("core_layers = 0", "core_layers = 1")
    (Path("small") / "config.toml").write_text(recurrent)
    assert "small has recurrent depth (model.core_layers=1)" in error_of(capsys, "small", "large")
    streams = config.replace("parscale_streams = 0", "parscale_streams = 2")
    (Path("small") / "config.toml").write_text(streams)
    assert "small has model.parscale_streams=2" in error_of(capsys, "small", "large")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"loss": math.nan}, "loss is nan. It must be a number above 0 and at most 1e+30."),
        ({"loss": None}, "loss is None. It must be a number above 0"),
        ({"loss": "3"}, "loss is '3'. It must be"),
        ({"tokens": -1}, "tokens is -1. It must be"),
        ({"tokens": [1, 2]}, "tokens and losses of different length"),
        ({"width": 0}, "width is 0. It must be"),
        ({"width": 100}, "has no parameters, and width=100 is not one of"),
        ({"los": 3}, "'los' is not a key of a row. Did you mean 'loss'?"),
        ({"cooled": "yes"}, "cooled='yes' is invalid. It must be true or false."),
        ({"flops_per_token": math.inf}, "flops_per_token is inf."),
        ({"width": 1e300, "parameters": 1e9}, "width is 1e+300. It must be"),
        ({"tokens": 10**400}, "tokens is 1000000"),
    ],
)
def test_malformed_rows_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError) as caught:
        parse_line(json.dumps({**ROW, **changes}), "rows.jsonl:7")
    assert str(caught.value).startswith("rows.jsonl:7") and words in str(caught.value)


def test_rows_of_the_suite_are_read_as_they_are() -> None:
    published = {"run_name": "a", "params_active_precise": 5, "width": 256, "depth": 4}
    published |= {"tokens": 100, "step": 10, "num_nodes": 2, "seconds_per_step": 0.5}
    ((run, values, cooled),) = parse_line(json.dumps({**published, "final_loss": 3.0}), "x:1")
    assert (run, cooled, values["loss"], values["parameters"]) == ("a", False, 3.0, 5)
    assert values["device_seconds"] == pytest.approx(10 * 0.5 * 2 * 8)


def test_mistakes_of_the_command_line_are_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = write_rows(folder / "one.jsonl", ROW, {**ROW, "tokens": 2e9, "loss": 3.3})
    several = write_rows(folder / "rows.jsonl", *small_rows())
    (folder / "broken.jsonl").write_text('{"width": 1')
    (folder / "list.jsonl").write_text("[1]\n")
    for words, message in (
        ((), "No run is given."),
        (("nope",), "nope does not exist."),
        (("broken.jsonl",), "broken.jsonl:1 is not valid JSON"),
        (("list.jsonl",), "list.jsonl:1 is not a JSON object"),
        ((one,), "Only one run, a, has held-out losses."),
        ((str(folder),), "is not a run: it has no config.toml"),
        ((several, "--flops", "-1"), "--flops -1 is out of range."),
        ((several, "--hours", "5"), "the times of some losses are not known"),
        ((several, "--cluster", "dgx-h100"), "without --hours or --design"),
        ((several, "--resamples", "2"), "resamples"),
        ((several, "--design", "6"), "A design writes new runs and reads none."),
        (("--design", "6", "--flops", "1e21", "--json", "x"), "--flops, --json with --design 6."),
        ((several, "--budget", "1e18", "--base", "x"), "--budget, --base without --design."),
        ((several, several), "rows.jsonl is given twice."),
        ((several, "--seed", "-1"), "--seed -1 is out of range."),
        ((several, "--hours", "5", "--cluster", "nope"), "nope"),
        ((several, "--flops", "1e301"), "--flops 1e+301 is out of range."),
        (("--design", "2", "--cluster", "dgx-h100"), "--design 2 is too few."),
        (("--design", "6", "--budget", "0", "--cluster", "dgx-h100"), "--budget 0 is out of"),
        (("--design", "6", "--budget", "1e12", "--cluster", "dgx-h100"), "is too small for 6 runs"),
    ):
        assert message in error_of(capsys, *words), words
